"""Checks and measurements on one NVIDIA GPU: ``bash benchmarks/gpu.sh``."""
