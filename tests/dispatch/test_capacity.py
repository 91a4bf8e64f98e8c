"""``apply_capacity`` against a reference implementation that loops over slots."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import Tensor

from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import communicator_of
from moe_comm.dispatch.slots.capacity import Capacity, apply_capacity
from moe_comm.errors import ConfigError, InputError, RankMismatch
from tests.pool import on_ranks


def reference_capacity(ids: list[int], weights: list[float], num_experts: int, limit: int, policy: str) -> list[int]:
    """Reference implementation: keep slots in order of priority until their expert is full. Return the new ids."""
    order = list(range(len(ids)))
    if policy == "probability":
        order.sort(key=lambda slot: -weights[slot])  # stable: of equal weights, the earlier slot comes first
    free_rows = [limit] * num_experts
    kept_ids = [-1] * len(ids)
    for slot in order:
        if not 0 <= ids[slot] < num_experts:
            kept_ids[slot] = ids[slot]
        elif free_rows[ids[slot]]:
            free_rows[ids[slot]] -= 1
            kept_ids[slot] = ids[slot]
    return kept_ids


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.data())
def test_kept_slots_equal_the_reference(data: st.DataObject) -> None:
    experts, tokens, top_k = (data.draw(st.integers(lo, hi)) for lo, hi in ((1, 6), (0, 15), (1, 4)))
    size = tokens * top_k
    ids = data.draw(st.lists(st.integers(-2, experts), min_size=size, max_size=size))
    weights = [w / 4 for w in data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))]
    factor = data.draw(st.sampled_from([0.01, 0.5, 1.0, 1.1, 1.25, 7.0]))
    policy = data.draw(st.sampled_from(["position", "probability"]))
    limit = math.ceil(Fraction(str(factor)) * tokens * top_k / experts)
    actual, dropped = apply_capacity(
        torch.tensor(ids, dtype=torch.int64).view(tokens, top_k),
        torch.tensor(weights).view(tokens, top_k),
        experts,
        Capacity(factor, policy),
    )
    expected = reference_capacity(ids, weights, experts, limit, policy)
    assert actual.reshape(-1).tolist() == expected
    assert int(dropped) == sum(a != b for a, b in zip(ids, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tiny_factor_keeps_one_row_per_expert(dtype: torch.dtype) -> None:
    ids_TK = torch.zeros(100, 1, dtype=torch.int32)
    weights_TK = torch.linspace(0, 1, 100).view(100, 1).to(dtype).requires_grad_()
    for policy, kept_token in (("position", 0), ("probability", 99)):
        kept_ids, dropped = apply_capacity(ids_TK, weights_TK, 50, Capacity(1e-9, policy))  # type: ignore[arg-type]
        assert int(dropped) == 99 and kept_ids[kept_token] == 0 and kept_ids.dtype == torch.int32
    assert not ids_TK.any(), "the input ids must not be modified"


def test_the_limit_has_no_floating_point_error() -> None:
    assert Capacity(1.1).limit(10, 1, 1) == 11
    assert Capacity(1.25).limit(4096, 8, 64) == 640
    assert Capacity(1.0).limit(0, 8, 64) == 0
    assert Capacity(2).limit(3, 1, 4) == 2


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf")])
def test_invalid_factors_are_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match="capacity factor"):
        Capacity(factor)


def test_unknown_policies_and_unequal_shapes_are_refused() -> None:
    unknown: Any = "random"
    with pytest.raises(ConfigError, match="position, probability"):
        Capacity(1.0, unknown)
    with pytest.raises(ConfigError, match="rank, batch"):
        Capacity(1.0, scope=unknown)
    with pytest.raises(InputError, match=r"\(3, 2\)"):
        apply_capacity(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 1), 4, Capacity(1.0))
    ids, weights = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    for index in (torch.arange(2), torch.arange(3.0)):
        with pytest.raises(InputError, match=r"token index must be \[3\] int64"):
            apply_capacity(ids, weights, 4, Capacity(1.0, scope="batch"), None, index)


# --- over the whole batch ---


def batch(seed: int, tokens: int, top_k: int, experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids (some are negative or out of range), weights (many are equal), and a permutation of the tokens."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, experts + 1, (tokens, top_k), generator=g)
    weights = (torch.randint(0, 5, (tokens, top_k), generator=g) / 4).to(dtype)
    return ids, weights, torch.randperm(tokens, generator=g)


CASES = [
    (seed, tokens, first, factor, policy, dtype, indexed)
    for seed, (tokens, first) in enumerate([(13, 5), (12, 6), (9, 0), (9, 9), (0, 0), (1, 0)])
    for factor in (0.4, 1.0)
    for policy in ("position", "probability")
    for dtype in (torch.float32, torch.bfloat16)
    for indexed in (True, False)
]


@on_ranks(2, timeout=60)
def test_several_ranks_drop_the_same_slots_as_one(rank: int) -> None:
    """Each rank has a part of the batch, which one rank has as a whole."""
    channel = Channel(communicator_of(dist.group.WORLD), 60.0)  # type: ignore[arg-type]
    cases_with_drops = 0
    for seed, tokens, first, factor, policy, dtype, indexed in CASES:
        ids, weights, order = batch(seed, tokens, 2, 4, dtype)
        expected, all_dropped = apply_capacity(ids, weights, 4, Capacity(factor, policy))  # type: ignore[arg-type]
        capacity = Capacity(factor, policy, "batch")  # type: ignore[arg-type]
        assert torch.equal(apply_capacity(ids[order], weights[order], 4, capacity, None, order)[0], expected[order])
        if not indexed:
            order = torch.arange(tokens)
        own = order[:first] if rank == 0 else order[first:]
        kept_ids, dropped = apply_capacity(ids[own], weights[own], 4, capacity, channel, own if indexed else None)
        assert torch.equal(kept_ids, expected[own])
        assert int(dropped) == int((expected[own] != ids[own]).sum())
        cases_with_drops += int(all_dropped) > 0
    assert cases_with_drops > len(CASES) // 3


@on_ranks(2, timeout=60)
@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("top-k", RankMismatch, "rank 0: 2, rank 1: 3"),
        ("token index", RankMismatch, "rank 0: True, rank 1: False"),
        ("shape", InputError, "needs ids and weights"),
    ],
)
def test_inconsistent_inputs_are_refused_on_every_rank(rank: int, fault: str, kind: type[Exception], text: str) -> None:
    channel = Channel(communicator_of(dist.group.WORLD), 60.0)  # type: ignore[arg-type]
    top_k = 3 if fault == "top-k" and rank == 1 else 2
    ids, weights = torch.zeros(4, top_k, dtype=torch.int64), torch.zeros(4, top_k)
    index = None if fault == "token index" and rank == 1 else torch.arange(4)
    if fault == "shape" and rank == 1:
        weights = weights[:2]
    with pytest.raises(kind, match=text):
        apply_capacity(ids, weights, 4, Capacity(1.0, scope="batch"), channel, index)
    kept_ids, _ = apply_capacity(
        ids[:, :2], torch.zeros(4, 2), 4, Capacity(9.0, scope="batch"), channel, torch.arange(4)
    )
    assert not kept_ids.any(), "the channel must work after an error"
