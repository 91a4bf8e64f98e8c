"""A training run: build the model's parts on this rank, train step by step, evaluate, save and export."""
