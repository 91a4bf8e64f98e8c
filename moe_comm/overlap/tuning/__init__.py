"""Choice of backend and number of chunks: cost model, measured rates, stored measurements."""
