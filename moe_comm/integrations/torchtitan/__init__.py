"""Expert parallelism for torchtitan: a token dispatcher, and overrides that select it."""

from moe_comm.lazy import attach_stub
from moe_comm.runtime.versions import require

require("torchtitan", "moe_comm.integrations.torchtitan")

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
