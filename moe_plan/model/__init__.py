"""Model shapes and what follows from them: parameters, FLOPs and memory. No other package counts these."""
