"""Expert parallelism for SGLang: a dispatcher of its MoE layers, and the plugin that selects it."""

from moe_comm.runtime.versions import attach_adapter

__getattr__, __dir__, __all__ = attach_adapter(__name__, __file__, "sglang")
