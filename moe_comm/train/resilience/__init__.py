"""Fault tolerance: step guard, restarts, snapshots in memory, watching for hung ranks, and fault injection."""
