"""Records, traces, diagnosis and reports of training runs, and fault injection."""
