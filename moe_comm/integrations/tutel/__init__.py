"""Tutel's MoE layer over the dispatchers of this library: ``moe_layer``. Only ``routed`` needs no Tutel."""

from moe_comm.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
