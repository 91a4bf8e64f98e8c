"""Executors: the order in which rows are dispatched, computed by their experts, and combined."""
