"""Expert parallelism for Lightning: ``ExpertParallelStrategy`` trains and saves models with distributed experts."""

from moe_comm.lazy import attach_stub
from moe_comm.runtime.versions import require

require("lightning", "moe_comm.integrations.lightning")

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
