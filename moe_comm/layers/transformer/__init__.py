"""Whole transformers: blocks, the model, its description, initial weights and gathered state."""
