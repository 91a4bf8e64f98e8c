"""Measure the accuracy of ``moe-comm diagnose`` in training runs with injected faults."""
