"""One training step: its operators, how they overlap, and the replay of a pipeline's passes."""
