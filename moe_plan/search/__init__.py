"""Search for the fastest mapping that fits into the accelerators' memory, and report the result."""
