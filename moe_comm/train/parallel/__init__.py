"""Data parallelism over a parallel mesh: replication, ZeRO-1, FSDP2, compressed gradients, and the global norm."""

from moe_comm.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
