"""Optimizer state and activations in memory tiers: on the device, in host memory, or in a file.

resident    the state of all parameters is in memory; the default
settings    the section [offload] of a configuration
layout      division of state and masters into chunks
streamed    the state of the optimizer in a store, updated chunk by chunk
activations tensors that autograd saves, in a store between the forward and the backward pass
"""
