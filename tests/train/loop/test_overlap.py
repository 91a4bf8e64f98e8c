"""Training with overlap has the same bits as without, for all forms of data and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from moe_comm.overlap.options import Overlap
from moe_comm.train.loop import build
from tests.pool import RankPool
from tests.train.common import Trained, train, whole

MAPPINGS = {
    "ep": ("parallel.ep=2",),
    "fsdp": ("parallel.ep=2", "parallel.sharding=fsdp"),
    "zero1": ("parallel.ep=2", "parallel.sharding=zero1"),
    "etp": ("parallel.ep=1", "parallel.etp=2"),
    "pipeline": ("parallel.ep=2", "parallel.pp=2"),
    "split backward": ("parallel.ep=2", "parallel.pp=2", "parallel.schedule=zero_bubble"),
    "recompute": ("parallel.ep=2", "model.recompute=full"),
}


def _train(rank: int, world: int, settings: Sequence[str]) -> Trained:
    """Train with chunks of any size, so that tiny tensors are sent in several chunks."""
    build.Overlap, real = partial(Overlap, chunk_bytes=1), build.Overlap  # type: ignore[misc, assignment]
    try:
        return train(rank, world, settings)
    finally:
        build.Overlap = real  # type: ignore[misc]


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_overlap_changes_no_bit_of_training(mapping: str, settings: list[str], request: pytest.FixtureRequest) -> None:
    world = 4 if "parallel.pp=2" in MAPPINGS[mapping] else 2
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    common = [*settings, *MAPPINGS[mapping], f"parallel.ranks={world}", "parallel.backend=all_to_all"]
    plain, overlapped = (
        pool.run(_train, [*common, f"parallel.overlap_chunks={chunks}"], timeout=120) for chunks in (0, 3)
    )
    for ours, theirs in zip(overlapped, plain, strict=True):
        assert ours.losses == theirs.losses
        assert ours.norms == theirs.norms
    ours_whole, theirs_whole = (whole([trained.parts for trained in run]) for run in (overlapped, plain))
    assert all(torch.equal(ours_whole[name], tensor) for name, tensor in theirs_whole.items())
