"""Capacity against a loop over slots."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_comm.dispatch.capacity import Capacity, apply_capacity
from moe_comm.errors import ConfigError, InputError


def by_hand(ids: list[int], weights: list[float], num_experts: int, limit: int, policy: str) -> list[int]:
    """The slots one after another, best first, each taken while its expert has room."""
    order = list(range(len(ids)))
    if policy == "probability":
        order.sort(key=lambda slot: -weights[slot])  # stable: the earliest of equal ones first
    room = [limit] * num_experts
    out = [-1] * len(ids)
    for slot in order:
        if not 0 <= ids[slot] < num_experts:
            out[slot] = ids[slot]
        elif room[ids[slot]]:
            room[ids[slot]] -= 1
            out[slot] = ids[slot]
    return out


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.data())
def test_the_same_slots_stay_as_by_hand(data: st.DataObject) -> None:
    experts, tokens, top_k = (data.draw(st.integers(lo, hi)) for lo, hi in ((1, 6), (0, 15), (1, 4)))
    size = tokens * top_k
    ids = data.draw(st.lists(st.integers(-2, experts), min_size=size, max_size=size))
    weights = [w / 4 for w in data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))]
    factor = data.draw(st.sampled_from([0.01, 0.5, 1.0, 1.1, 1.25, 7.0]))
    policy = data.draw(st.sampled_from(["position", "probability"]))
    limit = math.ceil(Fraction(str(factor)) * tokens * top_k / experts)
    found, dropped = apply_capacity(
        torch.tensor(ids, dtype=torch.int64).view(tokens, top_k),
        torch.tensor(weights).view(tokens, top_k),
        experts,
        Capacity(factor, policy),
    )
    expected = by_hand(ids, weights, experts, limit, policy)
    assert found.reshape(-1).tolist() == expected
    assert int(dropped) == sum(a != b for a, b in zip(ids, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_small_factor_leaves_one_row_for_each_expert(dtype: torch.dtype) -> None:
    ids_TK = torch.zeros(100, 1, dtype=torch.int32)
    weights_TK = torch.linspace(0, 1, 100).view(100, 1).to(dtype).requires_grad_()
    for policy, survivor in (("position", 0), ("probability", 99)):
        found, dropped = apply_capacity(ids_TK, weights_TK, 50, Capacity(1e-9, policy))  # type: ignore[arg-type]
        assert int(dropped) == 99 and found[survivor] == 0 and found.dtype == torch.int32
    assert not ids_TK.any(), "the given ids stay as they are"


def test_the_limit_is_exact_where_floating_point_is_not() -> None:
    assert Capacity(1.1).limit(10, 1, 1) == 11
    assert Capacity(1.25).limit(4096, 8, 64) == 640
    assert Capacity(1.0).limit(0, 8, 64) == 0
    assert Capacity(2).limit(3, 1, 4) == 2


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf")])
def test_factors_that_mean_nothing_are_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match="capacity factor"):
        Capacity(factor)


def test_unknown_policies_and_unequal_shapes_are_refused() -> None:
    unknown: Any = "random"
    with pytest.raises(ConfigError, match="position, probability"):
        Capacity(1.0, unknown)
    with pytest.raises(InputError, match=r"\(3, 2\)"):
        apply_capacity(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 1), 4, Capacity(1.0))
