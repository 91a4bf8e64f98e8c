"""Predict one training step: its operators, their overlap, and a replay of the passes of the pipeline."""
