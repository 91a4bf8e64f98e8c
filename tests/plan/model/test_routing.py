"""Mean number of hosts that a token reaches, against enumeration of all choices and random routing."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from moe_comm.layers.transformer.shape import ModelShape
from moe_plan.model.files import model_named
from moe_plan.model.mapping import hosts_reached


def shape(experts: int, top_k: int, groups: int = 1, top_groups: int = 1, zero: int = 0) -> ModelShape:
    return ModelShape(
        "one", 1, 8, 1, 1, 8, 8, experts, top_k, 8, zero_experts=zero, groups=groups, top_groups=top_groups
    )


def host_of(shape: ModelShape, hosts: int) -> list[int]:
    """Return the host of each expert; -1 for zero-computation experts."""
    ends = [shape.experts * host // hosts for host in range(hosts + 1)]
    host_of_expert = [next(host for host in range(hosts) if one < ends[host + 1]) for one in range(shape.experts)]
    return host_of_expert + [-1] * shape.zero_experts


def enumerated(shape: ModelShape, hosts: int) -> float:
    """Return the mean over all choices of groups and of experts in them."""
    host_of_expert, size = host_of(shape, hosts), shape.experts // shape.groups
    zero = list(range(shape.experts, shape.experts + shape.zero_experts))
    reached = []
    for chosen in combinations(range(shape.groups), shape.top_groups):
        candidates = [one for one in range(shape.experts) if one // size in chosen] + zero
        reached += [
            len({host_of_expert[one] for one in selected} - {-1}) for selected in combinations(candidates, shape.top_k)
        ]
    return sum(reached) / len(reached)


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "top_groups", "zero", "hosts"),
    [
        (8, 3, 1, 1, 0, 4),
        (8, 1, 1, 1, 0, 2),
        (9, 2, 1, 1, 0, 3),
        (8, 3, 1, 1, 4, 2),
        (12, 3, 4, 2, 0, 4),  # one group per host
        (12, 3, 4, 2, 0, 2),  # two groups per host
        (12, 3, 3, 2, 0, 6),  # half a group per host
        (12, 4, 4, 2, 0, 3),
        (12, 4, 3, 2, 0, 4),  # groups that span hosts
        (10, 3, 1, 1, 0, 4),  # unequal hosts
    ],
)
def test_hosts_reached_is_the_mean_over_all_choices(
    experts: int, top_k: int, groups: int, top_groups: int, zero: int, hosts: int
) -> None:
    model_shape = shape(experts, top_k, groups, top_groups, zero)
    assert hosts_reached(model_shape, hosts) == pytest.approx(enumerated(model_shape, hosts), rel=1e-12)


@pytest.mark.parametrize(("name", "hosts"), [("deepseek-v3", 8), ("deepseek-v3", 16), ("deepseek-v3", 3)])
@pytest.mark.parametrize("kept", [1.0, 0.6])
def test_hosts_reached_matches_random_routing(name: str, hosts: int, kept: float) -> None:
    model_shape, random, tokens = model_named(name), np.random.default_rng(0), 20_000
    host_of_expert = np.array(host_of(model_shape, hosts))
    scores_TE = random.random((tokens, model_shape.experts))
    size = model_shape.experts // model_shape.groups
    allowed_TG = random.random((tokens, model_shape.groups)).argsort(1) < model_shape.top_groups
    scores_TE[~np.repeat(allowed_TG, size, 1)] = -1
    hosts_TK = host_of_expert[scores_TE.argsort(1)[:, -model_shape.top_k :]]
    hosts_TK[random.random(hosts_TK.shape) > kept] = -1
    reached_T = sum((hosts_TK == host).any(1).astype(int) for host in range(hosts))
    assert hosts_reached(model_shape, hosts, kept) == pytest.approx(np.mean(reached_T), rel=0.01)


def test_hosts_reached_in_limiting_cases() -> None:
    model_shape = model_named("deepseek-v3")
    assert hosts_reached(model_shape, 1) == 1
    assert (
        hosts_reached(model_shape, 8)
        < model_shape.top_groups
        < hosts_reached(replace(model_shape, groups=1, top_groups=1), 8)
    )
    assert hosts_reached(model_shape, 256) == pytest.approx(model_shape.top_k), "one expert per host"
    assert hosts_reached(model_shape, 8, 0.0) == 0
    plain, far = shape(512, 8), 8 * (1 - (1 - 1 / 8) ** 8)
    assert hosts_reached(plain, 8) == pytest.approx(far, rel=0.01), "with many experts, choices are nearly independent"


def test_hosts_reached_with_more_combinations_than_a_float_can_hold() -> None:
    many = ModelShape("many", 1, 16, 1, 1, 8, 8, 2048, 512, 8)
    assert hosts_reached(many, 2, 1.0) == pytest.approx(2.0) and hosts_reached(many, 2, 0.01) == pytest.approx(
        1.847, abs=1e-3
    )
