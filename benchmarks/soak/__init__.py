"""Train through hundreds of faults; the run must end with the bits of a run without any."""
