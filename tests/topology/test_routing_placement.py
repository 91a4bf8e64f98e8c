"""``placement_from_routing``: even loads, and the experts of a token on few hosts."""

from __future__ import annotations

import random
from itertools import combinations, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moe_comm.errors import ConfigError
from moe_comm.topology.placement import Placement
from moe_comm.topology.rebalance import busiest_rows, rebalance, replayed_ratio, rows_per_rank
from moe_comm.topology.routing_placement import _Tokens, loads_of, placement_from_routing, remote_copies
from tests.topology.test_rebalance import zipf

PAIRED = np.array([[0, 2], [0, 2], [1, 3], [1, 3]])


def topics(tokens: int, experts: int, topk: int, seed: int) -> np.ndarray:
    """Tokens of four topics, which each choose most of their experts from a random quarter of the experts."""
    rng = np.random.default_rng(seed)
    order = np.random.default_rng(99).permutation(experts).reshape(4, -1)
    ids = np.empty((tokens, topk), dtype=np.int64)
    for token in range(tokens):
        own = order[rng.integers(4)]
        ids[token, :-1] = rng.choice(own, topk - 1, replace=False)
        ids[token, -1] = rng.choice(np.setdiff1d(np.arange(experts), ids[token, :-1]))
    return ids


def test_loads_count_ids_and_ignore_missing_ones() -> None:
    assert loads_of([[0, 2], [2, -1]], 4) == [1, 0, 2, 0]
    assert loads_of(np.zeros((0, 2), dtype=np.int32), 3) == [0, 0, 0]


def test_remote_copies_count_other_hosts_once_per_token() -> None:
    contiguous = Placement.contiguous(4, 2)
    assert remote_copies(PAIRED, contiguous, 1) == 1.0  # two hosts of two, times the half of the tokens elsewhere
    assert remote_copies(PAIRED, contiguous, 1, host_T=[0, 1, 0, 1]) == 1.0
    paired = Placement(((0,), (1,), (0,), (1,)), 2)
    assert remote_copies(PAIRED, paired, 1) == 0.5
    assert remote_copies(PAIRED, paired, 1, host_T=[0, 0, 1, 1]) == 0.0
    assert remote_copies(PAIRED, paired, 2) == 0.0
    assert remote_copies([[0, -1]], contiguous, 1, host_T=[1]) == 1.0


def test_experts_that_are_chosen_together_share_a_host() -> None:
    placement = placement_from_routing(PAIRED, 4, 2, ranks_per_host=1)
    assert placement.homes[0] == placement.homes[2] != placement.homes[1] == placement.homes[3]
    # The host of the tokens decides which of the two groups is where.
    placement = placement_from_routing(PAIRED, 4, 2, ranks_per_host=1, host_T=[1, 1, 0, 0])
    assert placement.homes == (1, 0, 1, 0)


def test_new_tokens_of_the_same_topics_are_sent_to_fewer_hosts_at_no_more_load() -> None:
    seen, new = topics(2000, 32, 4, 0), topics(2000, 32, 4, 1)
    first = Placement.contiguous(32, 8)
    placement = placement_from_routing(seen, 32, 8, ranks_per_host=2)
    assert placement.slots_per_rank == first.slots_per_rank
    assert remote_copies(new, placement, 2) < 0.75 * remote_copies(new, first, 2)
    busiest = [max(rows_per_rank(loads_of(new, 32), one)) for one in (first, placement)]
    assert busiest[1] <= 1.05 * busiest[0]
    assert placement_from_routing(seen, 32, 8, ranks_per_host=2) == placement


def test_theta_trades_even_loads_for_transfers() -> None:
    ids = topics(2000, 32, 4, 0)
    ids[ids == 7] = 3  # a hot expert
    even, near = (placement_from_routing(ids, 32, 8, ranks_per_host=2, theta=theta) for theta in (1.0, 0.0))
    loads = loads_of(ids, 32)

    def host_rows(placement: Placement) -> int:
        rows = rows_per_rank(loads, placement)
        return max(rows[rank] + rows[rank + 1] for rank in range(0, 8, 2))

    assert host_rows(even) < host_rows(near)
    assert remote_copies(ids, near, 2) < remote_copies(ids, even, 2)


def test_changes_of_exchanges_equal_a_recount() -> None:
    rng = np.random.default_rng(3)
    ids = np.array([rng.choice(6, 3, replace=False) for _ in range(40)])
    hosts = rng.integers(0, 3, 40)
    tokens = _Tokens.of(ids, 6, 3, hosts)
    host_E = np.array([0, 0, 1, 1, 2, 2])
    changes = tokens.exchanges(host_E)

    def cost(of_E: np.ndarray) -> float:
        return float(tokens.away_TH[tokens.counts(of_E) > 0].sum())

    for a, b in combinations(range(6), 2):
        if host_E[a] != host_E[b]:
            other = host_E.copy()
            other[[a, b]] = other[[b, a]]
            assert changes[a, b] == changes[b, a] == cost(other) - cost(host_E)


def test_one_host_is_the_placement_by_loads() -> None:
    ids = np.array([[0], [0], [0], [1], [2], [3]])
    assert placement_from_routing(ids, 4, 2) == rebalance(loads_of(ids, 4), Placement.contiguous(4, 2))


def ids_of(loads: list[int]) -> npt.NDArray[np.int64]:
    """Return [T, 1] ids with these loads."""
    return np.repeat(np.arange(len(loads)), loads)[:, None]


def least_with_copies(loads: list[int], world: int, slots: int) -> int:
    """Return the least rows of the busiest rank over all homes and copies."""
    current, ranks, best = Placement.contiguous(len(loads), world), range(world), sum(loads)
    for homes in product(ranks, repeat=len(loads)):
        if tuple(map(homes.count, ranks)) != current.homes_per_rank:
            continue
        others = [[expert for expert, home in enumerate(homes) if home != rank] for rank in ranks]
        for copies in product(*(combinations(experts, slots) for experts in others)):
            owners = [(home, *(r for r in ranks if expert in copies[r])) for expert, home in enumerate(homes)]
            best = min(best, busiest_rows(loads, Placement(tuple(owners), world)))
        if best * world < sum(loads) + world:
            break
    return best


@pytest.mark.parametrize("s", [0.5, 2.5])
@pytest.mark.parametrize(("experts", "world", "slots"), [(6, 2, 1), (6, 2, 2), (6, 3, 1)])
def test_with_copies_the_busiest_rank_is_within_5_percent_of_the_best(
    experts: int, world: int, slots: int, s: float
) -> None:
    for seed in range(2):
        loads = zipf(experts, 2000, s, random.Random(seed))
        placement = placement_from_routing(ids_of(loads), experts, world, slots=slots)
        assert max(placement.copies_per_rank) <= slots
        assert busiest_rows(loads, placement) <= 1.05 * least_with_copies(loads, world, slots)


@pytest.mark.parametrize("s", [0.5, 1.0, 1.5])
def test_copies_spread_experts_that_are_above_the_mean_rank(s: float) -> None:
    loads = zipf(64, 100_000, s, random.Random(2))
    assert replayed_ratio([loads], placement_from_routing(ids_of(loads), 64, 8, slots=2)) < 1.1
    # All rows on one expert: without copies its rank has them all, with one slot per rank each rank computes a part.
    one = [0, 0, 0, 4001, 0, 0, 0, 0]
    assert busiest_rows(one, placement_from_routing(ids_of(one), 8, 4, slots=1)) == 1001
    assert not placement_from_routing(ids_of([500] * 8), 8, 4, slots=1).has_copies


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ids_TK": [[0.5, 1.0]]}, "integers"),
        ({"ids_TK": [0, 1]}, r"\[T, K\]"),
        ({"ids_TK": [[0, 4]]}, "from -1 to 3"),
        ({"ranks_per_host": 3}, "must divide the 4 ranks"),
        ({"host_T": [0]}, "for each of 4 tokens"),
        ({"host_T": [0, 1, 2, 0]}, "a host from 0 to 1"),
        ({"theta": 1.5}, "theta must be from 0 to 1"),
        ({"slots": 1}, "one host only"),
        ({"slots": 4, "ranks_per_host": None}, "from 0 to the 3 experts"),
        ({"slots": -1, "ranks_per_host": None}, "got -1"),
    ],
)
def test_bad_input_is_refused(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"ids_TK": PAIRED, "experts": 4, "world": 4, "ranks_per_host": 2} | changed
    with pytest.raises(ConfigError, match=message):
        placement_from_routing(**arguments)
