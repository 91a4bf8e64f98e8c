"""What keeps a run going: agreement on wrong numbers, restarts, state in memory, watching, and faults on purpose."""
