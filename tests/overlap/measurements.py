"""Synthetic measurements for the tests of the store and of the choice."""

from __future__ import annotations

from pathlib import Path

import torch

from moe_comm.comm.communicator import communicators
from moe_comm.overlap.options import TRITON
from moe_comm.overlap.tuning import choose, store
from moe_comm.overlap.tuning.cost import OperatorWork
from moe_comm.overlap.tuning.store import Measurement, OverlapChoice, Trial, TuningEnvironment

PLACE = TuningEnvironment(hosts=1, shared=False, threads=1, device="cpu", bytes_per_s=1e9)
WORK = OperatorWork("gather_matmul", "forward", 1024, 512, 512, torch.float32, 2)


def configure_tuning(folder: Path | None = None) -> None:
    """Let this process use the measurements in ``folder``, and forget earlier choices. None: its own folder again.

    Call it on every rank or on none.
    """
    choose.cache_folder = store.cache_folder if folder is None else lambda: folder  # type: ignore[assignment,misc]
    for comm in communicators():
        comm.forget("tuning")


def measured(
    work: OperatorWork = WORK, chunks: int = 8, place: TuningEnvironment = PLACE, ms: float = 1.0
) -> Measurement:
    trials = (Trial(OverlapChoice(), 2.0, 1.5), Trial(OverlapChoice(chunks=chunks), ms, 0.9 * ms))
    return Measurement(work, place, trials, int(chunks > 1))


def fused(work: OperatorWork = WORK, programs: int = 8, ms: float = 0.5) -> Measurement:
    """Return a measurement in which a Triton kernel is the fastest, and 4 chunks the fastest without it."""
    trials = (
        Trial(OverlapChoice(), 2.0, 1.5),
        Trial(OverlapChoice(chunks=4), 1.0, 0.9),
        Trial(OverlapChoice(TRITON, programs=programs), ms, 0.0),
        Trial(OverlapChoice(TRITON, programs=2 * programs), 2 * ms, 0.0),
    )
    return Measurement(work, PLACE, trials, 2)
