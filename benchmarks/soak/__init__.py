"""Train with hundreds of injected faults; the result must be bit-identical to a run without faults."""
