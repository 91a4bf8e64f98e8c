"""Benchmarks: what dispatch, combine and a whole layer cost here, against what people use today."""
