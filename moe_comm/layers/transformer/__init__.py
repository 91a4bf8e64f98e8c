"""Complete transformers: blocks, model, configuration, initialization and state."""
