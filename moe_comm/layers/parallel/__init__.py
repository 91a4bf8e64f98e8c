"""Layers and collectives for tensor, sequence and vocabulary parallelism; recomputation and interleaving."""
