"""Simulated steps of all ranks: predictions without slow ranks, the cost of slow ranks, and exact merging of lanes."""

from __future__ import annotations

import numpy as np
import pytest

from moe_comm.errors import ConfigError
from moe_plan.arrays import Floats, Ints
from moe_plan.step import simulate as simulation
from moe_plan.step.replay import TaskGraph, replay
from moe_plan.step.simulate import StepDetails, factors, parse_slow, simulate
from moe_plan.step.step import StepModel
from tests.plan.step.test_step import model

SMALL = {
    "pipeline": ("tp=2,pp=4,ep=4", 32, {}),
    "interleaved": ("tp=2,pp=2,vpp=4,ep=2,etp=2", 16, {}),
    "cells of several groups": ("tp=2,cp=2,pp=2,ep=2", 32, {}),
    "no pipeline": ("ep=4", 16, {"sharding": "replicate"}),
    "sharded weights": ("ep=4,pp=2", 16, {"sharding": "fsdp"}),
    "replicas": ("ep=2,pp=2,replicas=2", 16, {"sharding": "fsdp"}),
    "replicas of experts": ("tp=2,ep=4,etp=2,replicas=2", 16, {"sharding": "fsdp", "overlap": "outer"}),
    "overlap": ("tp=2,pp=2,ep=4", 16, {"overlap": "all"}),
    "alone": ("", 1, {}),
    "zero bubble": ("tp=2,pp=2,vpp=2,ep=2", 16, {"pipeline": "zero_bubble"}),
    "V": ("pp=4,ep=2", 16, {"pipeline": "zbv", "overlap": "inter", "recompute": "selective"}),
    "pairs": ("pp=4,ep=2", 16, {"pipeline": "dualpipev", "sharding": "fsdp"}),
}


def small(name: str) -> StepModel:
    mapping, gpus, settings = SMALL[name]
    return model("olmoe-1b-7b", mapping, gpus, batch=64 if gpus > 1 else 4, seq=1024, **settings)


def every_rank(model: StepModel, slow: simulation.Factors = None, links: simulation.Factors = None) -> TaskGraph:
    """Return the tasks of every rank of the world. Their replay takes the time of the step.

    The tasks of a rank are: one for the computation of each pass and one for its transfers, which is a collective of
    the cell; transfers between positions; and tail operations, which are collectives of groups. There is one stream per
    rank for each kind: compute, transfers, sent activations, sent gradients, and tail.
    """
    details, world = simulation.step_details(model), simulation._World.of(model)
    order, passes, hops = details.order, len(details.order), len(details.sender)
    pipelines, pp = world.parallel.stage, order.pp
    slow_W, links_W = factors(slow, world.size), factors(links, world.size)
    slow_PJ = slow_W.reshape(pp, pipelines)
    slowest_PJ = [world.spread(world.slowest(one)).reshape(pp, pipelines) for one in (slow_W, links_W)]
    compute = details.compute[order.stage, order.kind][:, None] * slow_PJ[order.rank]
    waits = simulation._pass_seconds(details, slowest_PJ[0], slowest_PJ[1])[1]
    hop_seconds = simulation._hop_seconds(details, slowest_PJ[1])

    # Task numbers: [passes or transfers, pipelines], one block after the other.
    pipeline = np.arange(pipelines)
    computes = np.arange(passes)[:, None] * pipelines + pipeline
    sync_tasks = computes + passes * pipelines
    sends = 2 * passes * pipelines + np.arange(hops)[:, None] * pipelines + pipeline
    rank = order.rank[:, None] * pipelines + pipeline
    follows = np.flatnonzero(order.rank[1:] == order.rank[:-1])
    before = [computes, sync_tasks[follows]]
    after = [sync_tasks, computes[follows + 1]]
    tasks = details.tasks
    for source, target in zip(tasks.before.tolist(), tasks.after.tolist(), strict=True):
        before.append(sync_tasks[source] if source < passes else sends[source - passes])
        after.append(computes[target] if target < passes else sends[target - passes])
    lane = tasks.stream[passes:, None]
    stream = [rank, world.size + rank, np.where(lane < 0, -1, (lane + pp) * pipelines + pipeline)]
    collective = [np.full_like(rank, -1), np.arange(passes)[:, None] * world.cells + pipeline // world.cell]
    collective.append(np.full_like(sends, -1))
    tail = _tail_tasks(details, world, slow_W, links_W, 4 * world.size, passes * world.cells)
    first = (2 * passes + hops) * pipelines
    if len(tail[0]):
        ends = np.full(pp, 0)
        np.maximum.at(ends, order.rank, np.arange(passes))
        before.append(sync_tasks[ends])
        after.append(first + np.arange(world.size).reshape(pp, pipelines))
    return TaskGraph(
        np.concatenate([one.ravel() for one in (compute, waits, hop_seconds, tail[0])]),
        np.concatenate([one.ravel() for one in (*stream, tail[1])]),
        np.concatenate([one.ravel() for one in before]),
        np.concatenate([one.ravel() for one in after]),
        np.concatenate([one.ravel() for one in (*collective, tail[2])]),
    )


def _tail_tasks(
    details: StepDetails, world: simulation._World, slow_W: Floats, links_W: Floats, stream: int, collective: int
) -> tuple[Floats, Ints, Ints]:
    """Return durations, streams and collectives of the tail, [tail operations * world]."""
    ranks = np.arange(world.size)
    duration, collectives = [np.empty(0)], [np.empty(0, dtype=np.int64)]
    for operation in details.tail:
        if operation.axis:
            shape = world.shape(operation.axis)
            number = np.arange(shape[0] * shape[2]).reshape(shape[0], 1, shape[2])
            collectives.append(collective + np.broadcast_to(number, shape).reshape(-1))
            duration.append(simulation._exposed_seconds(operation, world.latest(operation.axis, links_W)))
            collective += shape[0] * shape[2]
        else:
            collectives.append(np.full(world.size, -1))
            duration.append(operation.seconds * slow_W)
    streams = np.tile(stream + ranks, len(details.tail))
    return np.concatenate(duration), streams, np.concatenate(collectives)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("case", ["even", "one", "some", "all"])
def test_merged_lanes_equal_a_simulation_of_every_rank(name: str, case: str) -> None:
    step_model = small(name)
    world = step_model.placed.mapping.parallel.world
    rng = np.random.default_rng(7)
    slow = {
        "even": None,
        "one": {world // 2: 1.5},
        "some": {0: 1.1, world - 1: 1.7, world // 3: 0.9},
        "all": rng.uniform(0.8, 1.6, world),
    }[case]
    links = {"even": None, "one": None, "some": {world // 2: 2.0}, "all": rng.uniform(1, 3, world)}[case]
    result = simulate(step_model, slow, links)
    assert result.seconds == pytest.approx(float(replay(every_rank(step_model, slow, links)).span), rel=1e-12)
    if case == "even":
        assert result.seconds == pytest.approx(step_model.predict().seconds, rel=1e-12)
        assert result.slowdown == pytest.approx(1.0)


@pytest.mark.parametrize("name", SMALL)
def test_seconds_of_a_rank_add_up_and_waits_are_not_negative(name: str) -> None:
    step_model = small(name)
    world = step_model.placed.mapping.parallel.world
    result = simulate(step_model, {0: 1.5})
    assert result.compute.shape == result.moving.shape == result.waiting.shape == (world,)
    assert np.allclose(result.compute + result.moving + result.waiting, result.seconds, rtol=1e-9)
    assert (result.waiting >= 0).all() and np.array_equal(result.busy, result.compute + result.moving)
    even = simulate(step_model)
    assert result.compute[0] == pytest.approx(1.5 * even.compute[0])
    assert np.array_equal(result.compute[1:], even.compute[1:])


def test_slow_ranks_that_wait_for_each_other_cost_as_much_as_one() -> None:
    step_model = small("pipeline")
    even = simulate(step_model).seconds
    single = simulate(step_model, {5: 1.5}).seconds
    assert even < single <= 1.5 * even
    cell = simulate(step_model, {4: 1.5, 5: 1.5, 6: 1.5, 7: 1.5}).seconds
    assert cell == pytest.approx(single, rel=1e-3), "ranks 4 to 7 wait for each other in every pass"
    replica = simulate(step_model, dict.fromkeys(range(8), 1.5)).seconds
    assert replica == pytest.approx(single, rel=1e-3), "replicas wait for each other at the gradient sums"
    assert simulate(step_model, np.full(32, 1.5)).seconds > single


def test_other_ranks_wait_for_a_slow_rank() -> None:
    result = simulate(small("no pipeline"), {6: 2.0})
    assert result.waiting.argmin() == 6 and result.waiting[6] == pytest.approx(0, abs=1e-9 * result.seconds)
    assert (np.delete(result.waiting, 6) > 0.1 * result.seconds).all()


def test_slow_links_lengthen_only_transfers() -> None:
    step_model = small("no pipeline")
    even, result = simulate(step_model), simulate(step_model, links={3: 2.0})
    assert np.array_equal(result.compute, even.compute)
    assert even.seconds < result.seconds <= 2 * even.seconds
    assert (result.moving[:4] > result.moving[4]).all(), "only the transfers of ranks 0 to 3 take longer"
    alone = small("alone")
    assert simulate(alone, links={0: 5.0}).seconds == simulate(alone).seconds


def test_identical_lanes_are_merged_for_many_ranks() -> None:
    step_model = model("deepseek-v3", "tp=2,pp=16,ep=64", 16384, batch=16384)
    assert simulate(step_model).lanes == 1
    result = simulate(step_model, {700: 1.3, 9000: 1.2})
    assert result.lanes == 3 and result.compute.shape == (16384,)
    assert step_model.predict().seconds < result.seconds < 1.3 * step_model.predict().seconds
    assert "16,384 ranks" in str(result)


def test_slow_ranks_are_parsed() -> None:
    assert parse_slow(["3=1.5", "17=2"]) == {3: 1.5, 17: 2.0}
    for wrong in ("3", "=2", "3=", "a=1", "3=1=2"):
        with pytest.raises(ConfigError, match="RANK=FACTOR"):
            parse_slow([wrong])
    with pytest.raises(ConfigError, match="each rank may occur once"):
        parse_slow(["3=1", "3=2"])


def test_invalid_factors_are_rejected() -> None:
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


def operator_by_operator(step_model: StepModel, slow: dict[int, float]) -> float:
    """Return the seconds of the passes of a step, with one collective per transfer of each layer over its own group.

    ``simulate`` has one collective per pass, over all ranks that are connected by any of its transfers.
    """
    p = step_model.placed.mapping.parallel
    order, plan, _ = step_model.pipeline()
    factor_W = factors(slow, p.world)
    group = {}
    for axis in ("tp", "cp", "ep", "etp"):
        group[axis] = np.empty(p.world, dtype=np.int64)
        for ranks in p.groups(axis):
            group[axis][list(ranks)] = ranks[0]
    duration, stream, collective, before, after = [], [], [], [], []
    first, last = np.empty((len(order), p.stage), dtype=np.int64), np.empty((len(order), p.stage), dtype=np.int64)
    collective_ids: dict[tuple[int, int, str, int], int] = {}
    for at, (position, kind, stage) in enumerate(zip(order.rank, order.kind, order.stage, strict=True)):
        passes = step_model.stage_passes[stage]
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
                collective.append(collective_ids.setdefault(key, len(collective_ids)) if moves else -1)
            last[at, j] = len(duration) - 1
    sends = np.arange(len(duration), len(duration) + (len(plan.tasks) - len(order)) * p.stage).reshape(-1, p.stage)
    for source, target in zip(plan.tasks.before.tolist(), plan.tasks.after.tolist(), strict=True):
        before.append(last[source] if source < len(order) else sends[source - len(order)])
        after.append(first[target] if target < len(order) else sends[target - len(order)])
    tasks = TaskGraph(
        np.concatenate([duration, np.full(sends.size, step_model._hop.seconds)]),
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
    step_model = model("olmoe-1b-7b", mapping, gpus, batch=4 * gpus, seq=1024, sharding="replicate")
    even = operator_by_operator(step_model, {})
    predicted = step_model.predict()
    assert even < predicted.seconds
    for slow in ({1: 1.5}, {0: 1.2, gpus - 1: 2.0}):
        exact = operator_by_operator(step_model, slow)
        assert 1.05 * even < exact
        # After the passes, the optimizer of the slow rank takes longer, which counts if its position ends last.
        after_passes_s = predicted.seconds - even
        optimizer_delay_s = (max(slow.values()) - 1.0) * predicted.breakdown["optimizer"]
        assert (
            0.99 * (exact + after_passes_s)
            <= simulate(step_model, slow).seconds
            <= 1.01 * (exact + after_passes_s + optimizer_delay_s)
        )
