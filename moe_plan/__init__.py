"""Planner: predicts the time and memory of a training step, searches parallel mappings, and analyses recorded runs."""
