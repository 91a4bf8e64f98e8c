"""Training is bit-identical with and without overlap, for all forms of data and pipeline parallelism."""

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
    "etp": ("parallel.ep=1", "parallel.etp=2"),
    "split backward": ("parallel.ep=2", "parallel.pp=2", "parallel.schedule=zero_bubble"),
    "recompute": ("parallel.ep=2", "model.recompute=full"),
}


def _train(rank: int, world: int, settings: Sequence[str]) -> Trained:
    """Train without a minimum chunk size, so that tiny tensors are sent in several chunks."""
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
    serial, overlapped = (
        pool.run(_train, [*common, f"parallel.overlap_chunks={chunks}"], timeout=120) for chunks in (0, 3)
    )
    for result, expected in zip(overlapped, serial, strict=True):
        assert result.losses == expected.losses
        assert result.norms == expected.norms
    weights, expected_weights = (whole([trained.parts for trained in run]) for run in (overlapped, serial))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected_weights.items())
