"""Layers and collectives that tensor, sequence and vocabulary parallelism share; recomputation and interleaving."""
