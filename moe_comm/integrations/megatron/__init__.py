"""Expert parallelism for Megatron-Core: a token dispatcher, and two ways to put it into MoE layers."""

from moe_comm.runtime.versions import attach_adapter

__getattr__, __dir__, __all__ = attach_adapter(__name__, __file__, "megatron-core")
