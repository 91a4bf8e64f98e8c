"""Expert parallelism for DeepSpeed: ``swap_transport`` moves the rows of its MoE layers with the dispatchers here."""

from moe_comm.lazy import attach_stub
from moe_comm.runtime.versions import require

require("deepspeed", "moe_comm.integrations.deepspeed")

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
