"""Expert parallelism for Megatron-Core: a token dispatcher, and two ways to put it into MoE layers."""

from moe_comm.lazy import attach_stub
from moe_comm.runtime.versions import require

require("megatron-core", "moe_comm.integrations.megatron")

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
