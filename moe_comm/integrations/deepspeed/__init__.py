"""Expert parallelism for DeepSpeed: ``swap_transport`` moves the rows of its MoE layers with the dispatchers here."""

from moe_comm.runtime.versions import attach_adapter

__getattr__, __dir__, __all__ = attach_adapter(__name__, __file__, "deepspeed")
