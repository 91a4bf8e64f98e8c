"""Tutel's MoE layer with its rows moved by the dispatchers of this library: ``moe_layer`` in place of Tutel's.

Tutel is imported with the first use of ``moe_layer``, because ``routed`` does without it.
"""

from moe_comm.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
