"""Optimizer state in memory tiers: on the device, in host memory, or in a file, streamed at the update.

resident    the state of all parameters is in memory; the default
settings    the section [offload] of a configuration
layout      division of state and masters into chunks
streamed    the state of the optimizer in a store, updated chunk by chunk
"""
