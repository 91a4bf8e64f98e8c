"""Plans that lend rows to other ranks: their bounds, the best ones by search, and the native core."""

from __future__ import annotations

import random
from itertools import product

import pytest

from moe_comm.errors import ConfigError
from moe_comm.topology import Placement
from moe_comm.topology.balance import Balance, Lent, Limits, digest, intervals, plan_rows, rows_of_ranks


def draw_case(rng: random.Random) -> tuple[list[int], list[int], int, Limits, list[tuple[int, int]]]:
    """Return skewed loads, homes in any order and number, ranks, limits and residents."""
    world = rng.randint(1, 9)
    home_E = [rng.randrange(world) for _ in range(rng.randint(1, 20))]
    skew = rng.choice((1, 3, 20, 1000))
    loads_E = [rng.choice((0, rng.randint(0, 9), rng.randint(0, 9 * skew))) for _ in home_E]
    most = max(map(home_E.count, range(world)))
    even = -(-sum(loads_E) // world)
    rows = even + rng.choice((0, 0, even // 8, rng.randint(0, even + 1)))
    memory = rng.choice((rows, 2 * rows, sum(loads_E)))
    slots = rng.choice((most, most, most + 2, 1))
    limits = Limits(rows, memory, rng.choice((1, 7)), rng.choice((0, 0, 3, 500)), slots)
    elsewhere = [(e, r) for e, r in product(range(len(home_E)), range(world)) if home_E[e] != r]
    return loads_E, home_E, world, limits, rng.sample(elsewhere, rng.randint(0, min(len(elsewhere), 12)))


def test_no_rank_exceeds_the_limit_and_plans_are_small() -> None:
    rng, lending, fallbacks = random.Random(1), 0, 0
    for _ in range(3000):
        loads_E, home_E, world, limits, residents = draw_case(rng)
        lent = plan_rows(loads_E, home_E, world, limits, residents)
        before, after = (rows_of_ranks(loads_E, home_E, world, one) for one in ((), lent))
        most = max(map(home_E.count, range(world)))
        copies = [sum(one.rank == rank for one in lent) for rank in range(world)]
        assert sum(after) == sum(loads_E) and min(after) >= 0 and max(after) <= max(before)
        assert lent == tuple(sorted(set(lent)))
        assert all(one.rows > 0 and home_E[one.expert] != one.rank for one in lent)
        for expert, load in enumerate(loads_E):
            assert sum(one.rows for one in lent if one.expert == expert) <= load
        assert max(copies) <= limits.copies
        if limits.copies >= most:
            assert max(after) <= limits.memory
            if limits.copy_ns == 0:
                assert max(after) <= limits.rows
        fresh = [one for one in lent if (one.expert, one.rank) not in residents]
        if lent and max(before) <= limits.memory:
            saved = (max(before) - max(after)) * limits.row_ns
            assert saved > 0 and saved > limits.copy_ns * max(map([one.rank for one in fresh].count, range(world)))
        if max(before) <= limits.rows:
            assert not lent
        lending += bool(lent)
        # The greedy plan may need more slots than the limit, and another one is used.
        more = limits._replace(copies=len(home_E))
        fallbacks += lent != plan_rows(loads_E, home_E, world, more, residents)
    assert lending > 1000 and fallbacks > 50


def test_plans_reach_the_smallest_number_of_rows_that_a_search_finds() -> None:
    """With one slot for a copy: a search over all copies and all their rows."""
    rng = random.Random(2)
    for _ in range(60):
        world = rng.randint(2, 3)
        home_E = list(range(world))
        loads_E = [rng.choice((0, rng.randint(0, 7))) for _ in home_E]
        even = -(-sum(loads_E) // world)
        lent = plan_rows(loads_E, home_E, world, Limits(even, sum(loads_E), 1, 0, 1))
        best = max(loads_E)
        for experts in product(home_E, repeat=world):
            for rows in product(*(range(loads_E[e] + 1) for e in experts)):
                moved = [Lent(e, r, n) for r, (e, n) in enumerate(zip(experts, rows, strict=True)) if e != r and n]
                if all(sum(one.rows for one in moved if one.expert == e) <= loads_E[e] for e in home_E):
                    best = min(best, max(rows_of_ranks(loads_E, home_E, world, moved)))
        assert max(rows_of_ranks(loads_E, home_E, world, lent)) == best == even


def test_resident_copies_are_used_first_and_cost_nothing() -> None:
    loads_E, home_E = [9, 3, 1, 1], [0, 0, 1, 1]
    limits = Limits(7, 14, 1, 4, 2)
    assert plan_rows(loads_E, home_E, 2, limits) == (Lent(0, 1, 5),)
    assert plan_rows(loads_E, home_E, 2, limits._replace(copy_ns=5)) == ()
    assert plan_rows(loads_E, home_E, 2, limits._replace(copy_ns=5, memory=11)) == (Lent(0, 1, 5),)
    assert plan_rows(loads_E, home_E, 2, limits._replace(copy_ns=5), [(0, 1)]) == (Lent(0, 1, 5),)
    assert plan_rows(loads_E, home_E, 2, limits, [(1, 1)]) == (Lent(1, 1, 3),)
    assert plan_rows(loads_E, home_E, 2, limits._replace(copy_ns=1), [(1, 1)]) == (Lent(0, 1, 2), Lent(1, 1, 3))
    assert digest(()) == 0 and digest([Lent(0, 1, 5)]) != digest([Lent(0, 1, 4)])


def test_a_copy_costs_its_bytes_and_a_row_its_flops() -> None:
    assert Balance().costs(10**6, 4, hosts=1) == (120_000, 50_000 + 2_400_000)
    assert Balance().costs(10**6, 2, hosts=1) == (120_000, 50_000 + 1_600_000)
    assert Balance().costs(10**6, 4, hosts=2) == (120_000, 50_000 + 96_000_000)
    assert Balance(flops=1e12, bytes_per_s=1e10).costs(10**6, 4, hosts=2) == (6_000, 50_000 + 1_200_000)
    assert Balance(worth=7).costs(10**6, 4, hosts=1) == (1, 7)
    row, copy = Balance().costs(25_000_000, 2, hosts=1, device="cuda")
    assert (row, copy) == (250, 50_000 + 444_444)  # 1778 rows and the launches
    # 200 rows of 120 us pay for weights that another process of the host has, but not for those of another host.
    for hosts, lent in ((1, (Lent(0, 1, 200),)), (2, ())):
        limits = Balance(1.0).limits(400, 200, 2, 2, Balance().costs(10**6, 4, hosts))
        assert plan_rows([400, 0, 0, 0], [0, 0, 1, 1], 2, limits) == lent


def test_the_cheapest_of_several_limits_is_kept() -> None:
    loads_E, home_E = [140, 100, 90, 70], [0, 1, 2, 3]
    even = (Lent(0, 2, 10), Lent(0, 3, 30))
    for copy_ns, lent in ((4, even), (15, (Lent(0, 3, 35),)), (40, ())):
        assert plan_rows(loads_E, home_E, 4, Limits(100, 400, 1, copy_ns, 1)) == lent
    assert max(rows_of_ranks(loads_E, home_E, 4, plan_rows(loads_E, home_E, 4, Limits(100, 110, 1, 99, 1)))) <= 110


def test_the_rows_of_an_expert_are_cut_in_the_order_of_sources() -> None:
    lent = (Lent(0, 1, 3), Lent(0, 2, 4), Lent(1, 0, 5))
    cuts = [intervals(lent, [12, 5], before, own) for before, own in (([0, 0], [6, 2]), ([6, 2], [6, 3]))]
    assert cuts == [{0: [5, 1, 0], 1: [0, 2]}, {0: [0, 2, 4], 1: [0, 3]}]


def test_the_native_core_returns_the_same_plans() -> None:
    """More plans, those of the GPU kernel included, are compared in ``tests/gpu_emulated/test_lend.py``."""
    core = pytest.importorskip("moe_comm._C", reason="the native core is not built")
    rng = random.Random(3)
    for _ in range(3000):
        case = draw_case(rng)
        wanted = plan_rows(*case)
        lent, hashed = core.plan_rows(*case)
        assert tuple(Lent(*one) for one in lent) == wanted and hashed == digest(wanted), case


def test_settings_that_cannot_hold_are_refused() -> None:
    homes = Placement.contiguous(6, 2)
    assert Balance().placement(homes).slots == 3 and Balance(copies=1).placement(homes).slots == 1
    assert Balance().placement(Placement.contiguous(6, 1)).slots is None
    assert Balance(1.25, 1.5).limits(100, 60, 2, 3, (1, 20)) == (62, 90, 1, 20, 3)
    assert Balance(1.25, 1.0).limits(101, 51, 2, 3, (1, 20)) == (51, 51, 1, 20, 3)
    for values in (
        {"rows": 0.9},
        {"rows": True and "1"},
        {"memory": 0.5},
        {"copies": 0},
        {"worth": -1},
        {"worth": 1.5},
        {"flops": 0},
        {"bytes_per_s": float("nan")},
    ):
        with pytest.raises(ConfigError, match="Balance"):
            Balance(**values)
    with pytest.raises(ConfigError, match="at least 3"):
        Balance(memory=1.5, copies=2).placement(homes)
    with pytest.raises(ConfigError, match="without copies"):
        Balance().placement(Placement.contiguous(6, 2, slots=1))
