"""Expert parallelism for Lightning: ``ExpertParallelStrategy`` trains and saves models with distributed experts."""

from moe_comm.runtime.versions import attach_adapter

__getattr__, __dir__, __all__ = attach_adapter(__name__, __file__, "lightning")
