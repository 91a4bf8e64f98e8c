"""Plans of inference with attention and experts on accelerators of their own: traces, costs, search and replay."""
