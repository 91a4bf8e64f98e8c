"""Scripts for developers of this library, run from the checkout as ``python -m benchmarks.NAME``."""
