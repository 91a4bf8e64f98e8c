"""Ranks of documents: against all possible assignments, within capacity, and the same on every machine."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from moe_comm.layers.transformer.lengths.cost import LengthCost
from moe_comm.layers.transformer.lengths.solve import CAPACITY, group_sizes, solve
from moe_comm.layers.transformer.shape import ModelShape

COST = LengthCost(pair=4, token=4000)
SLOW_LINKS = replace(COST, transfers=((2, 4000), (4, 6000)))
"""Transfers of a document take about as long as its attention."""


def lognormal(rng: random.Random, count: int, longest: int) -> list[int]:
    return [min(longest, max(1, int(rng.lognormvariate(5.5, 1.5)))) for _ in range(count)]


def share_of(cost: LengthCost, length: int, ranks: int) -> int:
    """Return the work of each rank of a document, with transfers."""
    return -(-cost.work(length) // ranks) + cost.exposed([length], ranks)[0]


def least_work(lengths: list[int], world: int, cost: LengthCost) -> int:
    """Return the work of the slowest rank of the best assignment, by trying all of them."""
    groups = [range(at, at + size) for size in group_sizes(world) for at in range(0, world - size + 1, size)]
    capacity = int(CAPACITY * sum(lengths) / world) + 1
    best = 1 << 62

    def place(document: int, loads: list[int], tokens: list[int]) -> None:
        nonlocal best
        if max(loads) >= best or max(tokens) > capacity:
            return
        if document == len(lengths):
            best = max(loads)
            return
        for group in groups:
            new_loads, new_tokens = [*loads], [*tokens]
            for rank in group:
                new_loads[rank] += share_of(cost, lengths[document], len(group))
                new_tokens[rank] -= -lengths[document] // len(group)
            place(document + 1, new_loads, new_tokens)

    place(0, [0] * world, [0] * world)
    return best


@pytest.mark.parametrize("cost", [COST, SLOW_LINKS], ids=["work", "work and transfers"])
def test_the_slowest_rank_is_within_ten_percent_of_the_best_assignment(cost: LengthCost) -> None:
    rng = random.Random(1)
    ratios = []
    for _ in range(25):
        lengths = sorted(lognormal(rng, rng.randint(1, 7), 4096), reverse=True)
        loads = [0] * 4
        for length, ranks in zip(lengths, solve(lengths, 4, cost).ranks, strict=True):
            for rank in ranks:
                loads[rank] += share_of(cost, length, len(ranks))
        ratios.append(max(loads) / least_work(lengths, 4, cost))
    assert 1 <= max(ratios) <= 1.1


def test_transfers_keep_documents_on_fewer_ranks() -> None:
    lengths = [4096, *[400] * 10]
    on = [[len(ranks) for ranks in solve(lengths, 4, cost).ranks] for cost in (COST, SLOW_LINKS)]
    assert [most[0] for most in on] == [4, 2] and sum(on[1]) < sum(on[0])
    # With a window only its tokens are received, for both chunks of each rank, and attention has less to hide them.
    window = replace(SLOW_LINKS, window=16, full_layers=1, layers=2)
    pairs = (16 * 17 // 2 + 984 * 16 + 1000 * 1001 // 2) // 2
    assert window.exposed([1000], 2) == [4000 * (64 + 936 // 2) - 4 * pairs // 2]
    assert SLOW_LINKS.exposed([1000, 8192], 2) == [4000 * 1000 - 4 * 1000 * 1001 // 4, 0]
    assert COST.exposed([1000], 2) == SLOW_LINKS.exposed([1000], 1) == [0]


@pytest.mark.parametrize(("world", "count"), [(4, 100), (6, 40), (8, 1000), (64, 1000), (4, 3), (4, 0)])
def test_documents_are_on_aligned_groups_within_capacity_and_balanced(world: int, count: int) -> None:
    lengths = [*lognormal(random.Random(2), count, 16384), 16384]
    assignment = solve(lengths, world, COST)
    assert assignment == solve(lengths, world, COST)
    tokens, loads = [0] * world, [0] * world
    for length, ranks in zip(lengths, assignment.ranks, strict=True):
        assert len(ranks) in group_sizes(world)
        assert ranks == tuple(range(ranks[0], ranks[0] + len(ranks))) and ranks[0] % len(ranks) == 0
        for rank in ranks:
            tokens[rank] -= -length // len(ranks)
            loads[rank] -= -COST.work(length) // len(ranks)
    assert tuple(loads) == assignment.loads
    assert max(tokens) <= CAPACITY * sum(lengths) / world + 1
    assert assignment.imbalance <= 1.05


def test_without_room_every_document_runs_on_all_ranks() -> None:
    assignment = solve([10, 10, 10], 4, COST, capacity=8)
    assert assignment.ranks == (tuple(range(4)),) * 3


def test_work_counts_windows_and_leaves_out_experts_that_are_on_other_ranks() -> None:
    sizes = {"hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "vocab": 10, "experts": 4, "top_k": 2, "ffn": 16}
    full = LengthCost.of(ModelShape(name="m", layers=2, **sizes), experts_stay=False)  # type: ignore[arg-type]
    # Queries and values of 2 layers of width 8, 2 FLOPs each, backward 2.5 times forward.
    assert full.pair == 2 * (2 * 8 + 2 * 8) * 3.5
    assert full.work(100) == 5050 * full.pair + 100 * full.token
    # Keys and values of width 4 in fp32: sent twice, and their gradients.
    assert full.key_bytes == 2 * (4 + 4) * 12
    shape = ModelShape(name="m", layers=2, window=10, full_layers=1, **sizes)  # type: ignore[arg-type]
    window = LengthCost.of(shape, experts_stay=True)
    assert window.work(100) == (955 + (5050 - 955) // 2) * full.pair + 100 * window.token
    assert window.token == full.token + 3 * 2 * 2 * 2 * 3 * 8 * 16
