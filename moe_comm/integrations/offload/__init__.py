"""Experts of swapped models in a file or in host memory, read as tokens are routed to them.

cache       experts by layer in a store, which of them are in memory, and which are read ahead
streamed    the MLPs of a layer's experts, computed one expert at a time
"""
