"""The search for the fastest mapping that fits, and its answers."""
