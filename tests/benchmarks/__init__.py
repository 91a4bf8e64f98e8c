"""What developers run from ``benchmarks/``."""
