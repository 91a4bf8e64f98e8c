"""Optimizers on sharded parameters, and learning rate schedules."""

from moe_comm.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
