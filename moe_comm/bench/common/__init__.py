"""What the benchmarks share: input, timing, turns, ranks, settings and tables."""
