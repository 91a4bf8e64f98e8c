"""The training loop: build the model, train, evaluate, save and export."""
