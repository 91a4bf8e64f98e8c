"""Data parallelism over a parallel mesh: replication, ZeRO-1, FSDP2, compressed gradients, and the global norm."""

from moe_comm.train.parallel.compress import GradientTraffic
from moe_comm.train.parallel.norm import clip_, global_norm
from moe_comm.train.parallel.parameters import LocalParameter, OwnedParameter, local_parameters
from moe_comm.train.parallel.strategy import DataParallel, DataParallelOptions, Strategy

__all__ = [
    "DataParallel",
    "DataParallelOptions",
    "GradientTraffic",
    "LocalParameter",
    "OwnedParameter",
    "Strategy",
    "clip_",
    "global_norm",
    "local_parameters",
]
