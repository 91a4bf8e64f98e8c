"""What only developers of this library run, from the checkout: ``python -m benchmarks.NAME``."""
