"""Benchmarks of dispatch, layers, overlap and training against other libraries."""
