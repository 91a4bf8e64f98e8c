"""Data parallelism over a folded mesh: replication, ZeRO-1, FSDP2, compressed gradients, and the global norm."""

from moe_comm.train.parallel.compress import Traffic
from moe_comm.train.parallel.norm import clip_, global_norm
from moe_comm.train.parallel.owned import Held, Owned, hold
from moe_comm.train.parallel.strategy import DataParallel, DataParallelOptions, Strategy

__all__ = [
    "DataParallel",
    "DataParallelOptions",
    "Held",
    "Owned",
    "Strategy",
    "Traffic",
    "clip_",
    "global_norm",
    "hold",
]
