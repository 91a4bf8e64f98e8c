"""Attention that raises on one rank raises on all ranks of its groups, long before the deadline."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.layers.attention.attention_blocks import AttentionGradients, AttentionState
from moe_comm.layers.attention.config import AttentionConfig
from moe_comm.layers.attention.layer import Attention
from moe_comm.overlap.options import Overlap
from tests.pool import RankPool

CONFIG = AttentionConfig(hidden=8, heads=4, kv_heads=4, head_dim=4)
LATE = CollectiveOptions(timeout_s=200.0)
"""Operations time out later than the run, so a rank that waits for its own timeout fails the test."""
INSIDE = {"forward": AttentionState, "backward": AttentionGradients}
"""Classes that compute, by pass. They are replaced on one rank, because no input makes the computation fail."""


def step(layer: Attention, width: int = 8) -> str:
    """Return the error of a forward and backward pass with tokens of ``width``, or ""."""
    try:
        layer(torch.zeros(1, 8, width).requires_grad_()).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def last_rank_raises(rank: int, world: int, arg: tuple[str, dict[str, Any], bool]) -> tuple[str, str]:
    """Return the error of a step in which the last rank raises, and of the next step."""
    where, settings, shared = arg
    axis, *_ = (name for name in settings if name.endswith("group"))
    configure_collectives(CollectiveOptions(LATE.timeout_s, shared_memory=shared))
    try:
        layer = Attention(CONFIG, **settings | {axis: dist.new_group(list(range(world)))})
        assert not step(layer)
        last = rank == world - 1
        broken = patch.object(INSIDE[where], "add", side_effect=ZeroDivisionError("x")) if where in INSIDE else None
        with broken if broken is not None and last else nullcontext():
            error = step(layer, 6 if where == "input" and last else 8)
        return error, step(layer)
    finally:
        configure_collectives(CollectiveOptions())


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({"tp_group": None}, True),
        ({"tp_group": None, "sequence_parallel": False}, False),
        ({"tp_group": None, "overlap": Overlap()}, False),
        ({"cp_group": None, "overlap": Overlap()}, True),
        ({"cp_group": None, "context": "ulysses"}, False),
        ({"cp_group": None, "context": "ring"}, False),
        ({"cp_group": None, "context": "token_ring"}, True),
    ],
    ids=str,
)
def test_an_invalid_input_of_one_rank(settings: dict[str, Any], shared: bool, pools: dict[int, RankPool]) -> None:
    (peer, after), (own, _) = pools[2].run(last_rank_raises, ("input", settings, shared), timeout=60)
    assert own.startswith("InputError: attention expects")
    assert "rank 1" in peer and "raised InputError in layer 'attention'" in peer
    if shared:  # the group works on
        assert peer.startswith("PeerRaised") and not after
    else:
        assert peer.startswith("PeerError") and after.startswith("PeerError")


@pytest.mark.parametrize("where", list(INSIDE))
@pytest.mark.parametrize("context", ["ring", "token_ring"])
def test_an_exception_while_keys_are_in_flight(where: str, context: str, pools: dict[int, RankPool]) -> None:
    settings = {"cp_group": None, "context": context}
    (peer, after), (own, _) = pools[2].run(last_rank_raises, (where, settings, True), timeout=60)
    assert own.startswith("ZeroDivisionError")
    # The text of the exception reaches ranks that wait in a transfer of the backend.
    assert peer.startswith("PeerError") and after.startswith("PeerError")
    assert "rank 1 raised ZeroDivisionError" in peer or "rank 1 aborted the operation" in peer


def one_of_two_groups(rank: int, world: int, context: Any) -> str:
    configure_collectives(LATE)
    try:
        tp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        cp_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        layer = Attention(CONFIG, tp_groups[rank // 2], cp_groups[rank % 2], context=context)
        assert not step(layer)
        return step(layer, 6 if rank == 3 else 8)
    finally:
        configure_collectives(CollectiveOptions())


@pytest.mark.parametrize("context", ["ulysses", "ring"])
def test_an_exception_reaches_the_ranks_that_share_no_group(context: str, pools: dict[int, RankPool]) -> None:
    *peers, own = pools[4].run(one_of_two_groups, context, timeout=60)
    assert own.startswith("InputError") and all(peer.startswith("PeerRaised") for peer in peers)


def every_rank_raises(rank: int, world: int, settings: dict[str, Any]) -> None:
    layer = Attention(CONFIG, **dict.fromkeys(settings, dist.new_group(list(range(world)))))
    for _ in range(2):
        assert step(layer, 6).startswith("InputError") and not step(layer)


@pytest.mark.parametrize("axis", ["tp_group", "cp_group"])
def test_an_invalid_input_of_all_ranks_leaves_the_group_usable(axis: str, pools: dict[int, RankPool]) -> None:
    pools[2].run(every_rank_raises, {axis: None}, timeout=60)
