"""Simulated steps of all ranks: predictions without slow ranks, the cost of slow ranks, and exact merging of lanes."""

from __future__ import annotations

import numpy as np
import pytest

from moe_comm.errors import ConfigError
from moe_comm.plan.step.replay import TaskGraph, replay
from moe_comm.plan.step.simulate import factors, parse_slow, simulate, simulate_every_rank
from moe_comm.plan.step.step import StepModel
from tests.plan.step.test_step import model

SMALL = {
    "pipeline": ("tp=2,pp=4,ep=4", 32, {}),
    "interleaved": ("tp=2,pp=2,vpp=4,ep=2,etp=2", 16, {}),
    "cells of several groups": ("tp=2,cp=2,pp=2,ep=2", 32, {}),
    "no pipeline": ("ep=4", 16, {"sharding": "replicate"}),
    "sharded weights": ("ep=4,pp=2", 16, {"sharding": "fsdp"}),
    "overlap": ("tp=2,pp=2,ep=4", 16, {"overlap": "all"}),
    "alone": ("", 1, {}),
    "zero bubble": ("tp=2,pp=2,vpp=2,ep=2", 16, {"pipeline": "zero_bubble"}),
    "V": ("pp=4,ep=2", 16, {"pipeline": "zbv", "overlap": "inter", "recompute": "selective"}),
    "pairs": ("pp=4,ep=2", 16, {"pipeline": "dualpipev", "sharding": "fsdp"}),
}


def small(name: str) -> StepModel:
    mapping, gpus, settings = SMALL[name]
    return model("olmoe-1b-7b", mapping, gpus, batch=64 if gpus > 1 else 4, seq=1024, **settings)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("case", ["even", "one", "some", "all"])
def test_collapsed_ranks_end_when_every_rank_on_its_own_does(name: str, case: str) -> None:
    one = small(name)
    world = one.placed.mapping.parallel.world
    draw = np.random.default_rng(7)
    slow = {
        "even": None,
        "one": {world // 2: 1.5},
        "some": {0: 1.1, world - 1: 1.7, world // 3: 0.9},
        "all": draw.uniform(0.8, 1.6, world),
    }[case]
    links = {"even": None, "one": None, "some": {world // 2: 2.0}, "all": draw.uniform(1, 3, world)}[case]
    result = simulate(one, slow, links)
    assert result.seconds == pytest.approx(simulate_every_rank(one, slow, links), rel=1e-12)
    if case == "even":
        assert result.seconds == pytest.approx(one.predict().seconds, rel=1e-12)
        assert result.slowdown == pytest.approx(1.0)


@pytest.mark.parametrize("name", SMALL)
def test_seconds_of_a_rank_add_up_and_waits_are_not_negative(name: str) -> None:
    one = small(name)
    world = one.placed.mapping.parallel.world
    result = simulate(one, {0: 1.5})
    assert result.compute.shape == result.moving.shape == result.waiting.shape == (world,)
    assert np.allclose(result.compute + result.moving + result.waiting, result.seconds, rtol=1e-9)
    assert (result.waiting >= 0).all() and np.array_equal(result.busy, result.compute + result.moving)
    even = simulate(one)
    assert result.compute[0] == pytest.approx(1.5 * even.compute[0])
    assert np.array_equal(result.compute[1:], even.compute[1:])


def test_a_slow_rank_costs_at_most_its_own_share_and_all_that_are_slow_cost_as_much_as_one() -> None:
    one = small("pipeline")
    even = simulate(one).seconds
    single = simulate(one, {5: 1.5}).seconds
    assert even < single <= 1.5 * even
    cell = simulate(one, {4: 1.5, 5: 1.5, 6: 1.5, 7: 1.5}).seconds
    assert cell == pytest.approx(single, rel=1e-3), "the ranks of a cell wait for each other anyway"
    replica = simulate(one, dict.fromkeys(range(8), 1.5)).seconds
    assert replica == pytest.approx(single, rel=1e-3), "and replicas at the sums of gradients"
    assert simulate(one, np.full(32, 1.5)).seconds > single


def test_where_a_rank_is_slow_others_wait_and_it_does_not() -> None:
    result = simulate(small("no pipeline"), {6: 2.0})
    assert result.waiting.argmin() == 6 and result.waiting[6] == pytest.approx(0, abs=1e-9 * result.seconds)
    assert (np.delete(result.waiting, 6) > 0.1 * result.seconds).all()


def test_slow_links_lengthen_transfers_alone() -> None:
    one = small("no pipeline")
    even, result = simulate(one), simulate(one, links={3: 2.0})
    assert np.array_equal(result.compute, even.compute)
    assert even.seconds < result.seconds <= 2 * even.seconds
    assert (result.moving[:4] > result.moving[4]).all(), "the four ranks of its cell, and not the next"
    alone = small("alone")
    assert simulate(alone, links={0: 5.0}).seconds == simulate(alone).seconds


def test_large_worlds_share_the_replay_of_what_is_alike() -> None:
    one = model("deepseek-v3", "tp=2,pp=16,ep=64", 16384, batch=16384)
    assert simulate(one).lanes == 1
    result = simulate(one, {700: 1.3, 9000: 1.2})
    assert result.lanes == 3 and result.compute.shape == (16384,)
    assert one.predict().seconds < result.seconds < 1.3 * one.predict().seconds
    assert "16,384 ranks" in str(result)


def test_slow_ranks_are_parsed() -> None:
    assert parse_slow(["3=1.5", "17=2"]) == {3: 1.5, 17: 2.0}
    for wrong in ("3", "=2", "3=", "a=1", "3=1=2"):
        with pytest.raises(ConfigError, match="RANK=FACTOR"):
            parse_slow([wrong])
    with pytest.raises(ConfigError, match="each rank may occur once"):
        parse_slow(["3=1", "3=2"])


def test_factors_that_cannot_be_are_refused() -> None:
    assert factors({2: 1.5}, 4).tolist() == [1, 1, 1.5, 1]
    for wrong, message in (
        ({4: 1.5}, "from 0 to 3; got 4"),
        ({-1: 1.5}, "got -1"),
        ({0: 0.0}, "rank 0 has 0.0"),
        ({1: float("nan")}, "rank 1 has nan"),
        ([1.0, 2.0], "each of the 4 ranks; got shape"),
    ):
        with pytest.raises(ConfigError, match=message):
            factors(wrong, 4)


def operator_by_operator(one: StepModel, slow: dict[int, float]) -> float:
    """Seconds of the same step with a meeting of just the ranks of its own group for every single transfer of every
    layer, where ``simulate`` has one of all that meet somehow for each pass. Without what follows the last pass."""
    p = one.placed.mapping.parallel
    order, plan, _ = one.pipeline()
    factor_W = factors(slow, p.world)
    group = {}
    for axis in ("tp", "cp", "ep", "etp"):
        group[axis] = np.empty(p.world, dtype=np.int64)
        for ranks in p.groups(axis):
            group[axis][list(ranks)] = ranks[0]
    duration, stream, collective, before, after = [], [], [], [], []
    first, last = np.empty((len(order), p.stage), dtype=np.int64), np.empty((len(order), p.stage), dtype=np.int64)
    meetings: dict[tuple[int, int, str, int], int] = {}
    for at, (position, kind, stage) in enumerate(zip(order.rank, order.kind, order.stage, strict=True)):
        passes = one.stage_passes[stage]
        for j in range(p.stage):
            rank = int(position) * p.stage + j
            first[at, j] = len(duration)
            for number, each in enumerate(passes.backward if kind else passes.forward):
                moves = each.kind == "transfer"
                axis = "etp" if each.name.startswith("expert ") else "tp"
                axis = "ep" if each.name in ("dispatch", "combine") else "cp" if "swap" in each.name else axis
                key = at, number, axis, int(group[axis][rank])
                duration.append(each.seconds * (1.0 if moves else factor_W[rank]))
                stream.append(rank)
                collective.append(meetings.setdefault(key, len(meetings)) if moves else -1)
            last[at, j] = len(duration) - 1
    sends = np.arange(len(duration), len(duration) + (len(plan.tasks) - len(order)) * p.stage).reshape(-1, p.stage)
    for source, target in zip(plan.tasks.before.tolist(), plan.tasks.after.tolist(), strict=True):
        before.append(last[source] if source < len(order) else sends[source - len(order)])
        after.append(first[target] if target < len(order) else sends[target - len(order)])
    tasks = TaskGraph(
        np.concatenate([duration, np.full(sends.size, one._hop.seconds)]),
        np.concatenate([stream, np.full(sends.size, -1)]),
        np.concatenate(before) if before else np.empty(0, dtype=np.int64),
        np.concatenate(after) if after else np.empty(0, dtype=np.int64),
        np.concatenate([collective, np.full(sends.size, -1)]),
    )
    return float(replay(tasks).span)


@pytest.mark.parametrize(
    ("mapping", "gpus"), [("tp=2,pp=2,ep=4", 8), ("tp=2,pp=2,ep=2,etp=2", 16), ("tp=4,ep=2", 8), ("pp=4,ep=2", 8)]
)
def test_one_collective_per_pass_equals_one_per_transfer(mapping: str, gpus: int) -> None:
    one = model("olmoe-1b-7b", mapping, gpus, batch=4 * gpus, seq=1024, sharding="replicate")
    even = operator_by_operator(one, {})
    predicted = one.predict()
    assert even < predicted.seconds
    for slow in ({1: 1.5}, {0: 1.2, gpus - 1: 2.0}):
        exact = operator_by_operator(one, slow)
        assert 1.05 * even < exact
        # Of what follows, the slow rank's optimizer takes longer, which shows if its position ends last.
        behind = predicted.seconds - even
        longer = (max(slow.values()) - 1.0) * predicted.breakdown["optimizer"]
        assert 0.99 * (exact + behind) <= simulate(one, slow).seconds <= 1.01 * (exact + behind + longer)
