"""Expert parallelism for torchtitan: a token dispatcher, and overrides that select it."""

from moe_comm.runtime.versions import attach_adapter

__getattr__, __dir__, __all__ = attach_adapter(__name__, __file__, "torchtitan")
