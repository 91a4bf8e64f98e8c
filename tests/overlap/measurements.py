"""Measurements that nobody took, for the tests of what is stored and of what is chosen."""

from __future__ import annotations

import torch

from moe_comm.overlap.cost import Work
from moe_comm.overlap.options import TRITON
from moe_comm.overlap.store import Choice, Measured, Place, Tried

PLACE = Place(hosts=1, shared=False, threads=1, device="cpu", bytes_per_s=1e9)
WORK = Work("gather_matmul", "forward", 1024, 512, 512, torch.float32, 2)


def measured(work: Work = WORK, chunks: int = 8, place: Place = PLACE, ms: float = 1.0) -> Measured:
    tried = (Tried(Choice(), 2.0, 1.5), Tried(Choice(chunks=chunks), ms, 0.9 * ms))
    return Measured(work, place, tried, int(chunks > 1))


def fused(work: Work = WORK, programs: int = 8, ms: float = 0.5) -> Measured:
    """A Triton kernel is best, and of what else there is 4 chunks."""
    tried = (
        Tried(Choice(), 2.0, 1.5),
        Tried(Choice(chunks=4), 1.0, 0.9),
        Tried(Choice(TRITON, programs=programs), ms, 0.0),
        Tried(Choice(TRITON, programs=2 * programs), 2 * ms, 0.0),
    )
    return Measured(work, PLACE, tried, 2)
