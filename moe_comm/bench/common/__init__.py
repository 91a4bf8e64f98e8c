"""Shared parts of the benchmarks: inputs, timing, interleaved rounds, ranks, settings and tables."""
