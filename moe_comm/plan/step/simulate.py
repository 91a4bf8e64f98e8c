"""A step of all ranks: what slow ranks and slow links cost those that wait for them.

Every rank runs its own compute, slowed by its own factor, and meets others in transfers:

    cell        ranks that a stage's passes tie to each other: those of one tensor, context, expert (or, with sharded
                weights, data) parallel group, and of all groups that share a rank with it. All wait for the slowest.
    pipeline    a cell of each position: stage transfers, schedule and all
    stage       sums of gradients: replicas wait for each other, then each updates its part and gathers weights

                 position 0   position 1   position 2
    pipeline 0   cell 0       cell 0       cell 0          a slow rank here slows a cell, the cell its pipeline,
    pipeline 1   cell 1       cell 1       cell 1          and at the sums the pipeline all of its replicas

A cell meets in every pass, so that its ranks are together again after each: one replay of the pipeline's graph, with
a lane of durations for each pipeline that differs from the others, is the replay of all ranks. ``every_rank`` has the
tasks of each rank on its own, for worlds in which they are few enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moe_comm.errors import ConfigError
from moe_comm.plan.arrays import Floats, Ints
from moe_comm.plan.step.parts import After, Parts, parts_of
from moe_comm.plan.step.replay import Tasks, prepare, replay
from moe_comm.plan.step.step import StepModel
from moe_comm.topology import ParallelConfig

Factors = Mapping[int, float] | ArrayLike | None
"""By rank: how many times longer something takes than elsewhere; None or left out: 1."""
_NUMBERS = 1 << 24
"""Durations that are replayed at once; more pipelines are taken in turns."""


@dataclass(frozen=True)
class Simulated:
    """A step of all ranks. even: its seconds if no rank were slow.

    By rank, in order, seconds [world]: compute (products, memory passes, optimizer), moving (transfers that compute
    waits for, once all are there), waiting (for other ranks, pipeline bubble among it). They add up to ``seconds``.
    tasks, lanes: of the replay; ranks that must be alike share theirs.
    """

    seconds: float
    even: float
    compute: Floats
    moving: Floats
    waiting: Floats
    tasks: int
    lanes: int

    @property
    def slowdown(self) -> float:
        """Times that the step is longer than with no slow rank."""
        return self.seconds / self.even

    @property
    def busy(self) -> Floats:
        """Seconds of each rank in which it computes or moves rows."""
        found: Floats = self.compute + self.moving
        return found

    def __str__(self) -> str:
        ranks, waits = len(self.waiting), self.waiting.mean() / self.seconds
        return (
            f"{self.seconds:.4g} s on {ranks:,} ranks, {self.slowdown:.3f} times the {self.even:.4g} s of even ranks; "
            f"ranks wait {waits:.1%} of it"
        )


def parse_slow(given: list[str] | tuple[str, ...]) -> dict[int, float]:
    """From ["3=1.5", "17=2"]: factors by rank.

    Raises:
        ConfigError: something is no RANK=FACTOR, or a rank is given twice.
    """
    found: dict[int, float] = {}
    for text in given:
        rank, equals, factor = text.partition("=")
        try:
            if not equals or int(rank) in found:
                raise ValueError
            found[int(rank)] = float(factor)
        except ValueError:
            raise ConfigError(f"a slow rank is RANK=FACTOR, each rank once, such as 3=1.5; got {text!r}") from None
    return found


def simulate(model: StepModel, slow: Factors = None, links: Factors = None) -> Simulated:
    """Replay a step of all ranks of ``model``. Without factors it takes what ``model.predict()`` says.

    Args:
        slow: how many times longer each rank computes: by rank, or an array [world].
        links: how many times longer transfers of each rank take; a transfer is as slow as the slowest of its ranks.

    Raises:
        ConfigError: a rank that is not there, or a factor that is no finite number above 0.
    """
    parts, world = parts_of(model), _World.of(model)
    slow_W, links_W = factors(slow, world.size), factors(links, world.size)
    slow_PC, links_PC = world.slowest(slow_W), world.slowest(links_W)
    both = np.concatenate([slow_PC, links_PC])
    distinct, lane = np.unique(both, axis=1, return_inverse=True)
    lane = lane.reshape(-1)
    lasts = []
    pp, lanes = parts.order.pp, distinct.shape[1]
    for first in range(0, lanes, _lanes(parts)):
        some = distinct[:, first : first + _lanes(parts)]
        lasts.append(_last(parts, some[:pp], some[pp:]))
    last_PL: Floats = np.concatenate(lasts, axis=1)
    end_W = world.spread(last_PL[:, lane])
    for one in parts.after:
        end_W = _one_after(world, one, end_W, slow_W, links_W)
    compute_W, moving_W = _busy(parts, world, slow_W, slow_PC, links_W, links_PC)
    seconds = float(end_W.max())
    waiting_W: Floats = np.maximum(seconds - compute_W - moving_W, 0.0)
    return Simulated(seconds, parts.predicted.seconds, compute_W, moving_W, waiting_W, len(parts.tasks), lanes)


def factors(given: Factors, world: int) -> Floats:
    """Factors of all ranks, [world].

    Raises:
        ConfigError: see ``simulate``.
    """
    found = np.ones(world)
    if isinstance(given, Mapping):
        for rank, factor in given.items():
            if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or not 0 <= rank < world:
                raise ConfigError(f"a slow rank must be one from 0 to {world - 1}; got {rank!r}")
            found[rank] = factor
    elif given is not None:
        found = np.array(given, dtype=np.float64)
        if found.shape != (world,):
            raise ConfigError(f"factors must be one for each of the {world} ranks; got shape {found.shape}")
    wrong = np.flatnonzero(~((found > 0) & (found < math.inf)))
    if len(wrong):
        raise ConfigError(f"a factor must be a finite number above 0; rank {wrong[0]} has {found[wrong[0]]}")
    return found


# ---- who waits for whom


@dataclass(frozen=True)
class _World:
    """Ranks as [positions, cells, ranks of a cell]: a cell is a block of ranks that follow each other.

    Blocks of tp * cp ranks and of etp * ep ranks lie on one line; those that overlap together cover what the least
    common multiple of the two covers.
    """

    parallel: ParallelConfig
    cell: int

    @classmethod
    def of(cls, model: StepModel) -> _World:
        mapping = model.place.mapping
        p = mapping.parallel
        tied = math.lcm(p.tp * p.cp, p.etp * p.ep)
        return cls(p, p.stage if mapping.sharding == "fsdp" else tied)

    @property
    def size(self) -> int:
        return self.parallel.world

    @property
    def cells(self) -> int:
        """Of each position; as many as there are pipelines."""
        return self.parallel.stage // self.cell

    def slowest(self, factor_W: Floats) -> Floats:
        """[positions, cells]."""
        found: Floats = factor_W.reshape(self.parallel.pp, self.cells, self.cell).max(axis=2)
        return found

    def spread(self, of_PC: Floats) -> Floats:
        """[world], from [positions, cells]."""
        found: Floats = np.repeat(of_PC.reshape(-1), self.cell)
        return found

    def groups(self, axis: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The world's shape with one axis for each kind of group, slowest first, and the axes along which a group of
        ``axis`` lies."""
        p = self.parallel
        if axis == "dp_cp":
            return (p.pp, p.dp * p.cp, p.tp), (1,)
        return (p.pp, p.edp, p.ep * p.etp), (1,)

    def latest(self, axis: str, of_W: Floats) -> Floats:
        """The largest in each rank's group, [world]."""
        shape, along = self.groups(axis)
        found = of_W.reshape(shape)
        return np.broadcast_to(found.max(axis=along, keepdims=True), shape).reshape(-1)


def _one_after(world: _World, one: After, end_W: Floats, slow_W: Floats, links_W: Floats) -> Floats:
    """When each rank has done it, from when it could begin."""
    if not one.axis:
        found: Floats = end_W + one.seconds * slow_W
        return found
    return world.latest(one.axis, end_W) + _slower(one, world.latest(one.axis, links_W))


def _slower(one: After, links: Floats) -> Floats:
    """Seconds that a transfer adds to the step where links are so many times slower; what is hidden stays so."""
    found: Floats = one.seconds + (links - 1.0) * one.whole
    return np.maximum(found, 0.0)


# ---- pipelines


def _lanes(parts: Parts) -> int:
    """Of pipelines, as many as are replayed at once."""
    return max(1, _NUMBERS // len(parts.tasks))


def _last(parts: Parts, slow_PL: Floats, links_PL: Floats) -> Floats:
    """When each position of each pipeline has ended its last pass: [positions, lanes]."""
    order, passes = parts.order, len(parts.order)
    compute, waits = _pass_seconds(parts, slow_PL, links_PL)
    hops = _hop_seconds(parts, links_PL)
    times = replay(parts.plan, np.concatenate([compute + waits, hops]))
    found = np.zeros((order.pp, slow_PL.shape[1]))
    ends = times.end[:passes]
    for rank in range(order.pp):
        found[rank] = ends[order.rank == rank].max(axis=0)
    return found


def _pass_seconds(parts: Parts, slow_PL: Floats, links_PL: Floats) -> tuple[Floats, Floats]:
    """[passes, lanes]: what the slowest rank of a cell computes, and what transfers then add to the pass.

    What of a transfer runs beside compute stays as long as it is; all that links slow down is added.
    """
    order = parts.order
    compute = parts.compute[order.stage, order.kind]
    moved = parts.moved[order.stage, order.kind]
    added = parts.seconds[: len(order)] - compute
    waits = added[:, None] + (links_PL[order.rank] - 1.0) * moved[:, None]
    return compute[:, None] * slow_PL[order.rank], np.maximum(waits, 0.0)


def _hop_seconds(parts: Parts, links_PL: Floats) -> Floats:
    """[transfers between positions, lanes]."""
    rank = parts.order.rank
    hop = parts.seconds[len(parts.order) :, None]
    found: Floats = hop * np.maximum(links_PL[rank[parts.sender]], links_PL[rank[parts.receiver]])
    return found


def _busy(
    parts: Parts, world: _World, slow_W: Floats, slow_PC: Floats, links_W: Floats, links_PC: Floats
) -> tuple[Floats, Floats]:
    """Seconds [world] that each rank computes, and that it moves rows while it does not."""
    order, ranks = parts.order, world.parallel.stage
    compute = np.bincount(order.rank, parts.compute[order.stage, order.kind], minlength=order.pp)
    compute_W: Floats = np.repeat(compute, ranks) * slow_W
    # Lanes of their own only where cells differ: the sum over passes is the same for all others.
    moving_PC = np.empty_like(slow_PC)
    both, at = np.unique(np.stack([slow_PC.reshape(-1), links_PC.reshape(-1)]), axis=1, return_inverse=True)
    at = at.reshape(slow_PC.shape)
    step = _lanes(parts)
    for first in range(0, both.shape[1], step):
        some = both[:, first : first + step]
        wide = [np.broadcast_to(row, (order.pp, some.shape[1])) for row in some]
        waits = _pass_seconds(parts, wide[0], wide[1])[1]
        total = np.stack([waits[order.rank == rank].sum(axis=0) for rank in range(order.pp)])
        mine = (at >= first) & (at < first + some.shape[1])
        rows = np.nonzero(mine)
        moving_PC[rows] = total[rows[0], at[rows] - first]
    moving_W = world.spread(moving_PC)
    for one in parts.after:
        if one.axis:
            moving_W = moving_W + _slower(one, world.latest(one.axis, links_W))
        else:
            compute_W = compute_W + one.seconds * slow_W
    return compute_W, moving_W


# ---- every rank on its own


def every_rank(model: StepModel, slow: Factors = None, links: Factors = None) -> Tasks:
    """The tasks of every rank of the world, for ``moe_comm.plan.step.replay``: its span is the step's seconds.

    Of each rank: a task for a pass's compute and one for its transfers, in which the cell meets, then transfers between
    positions, then what follows the last pass, in which groups meet. Streams are, by kind and then by rank: compute,
    transfers, activations sent, gradients sent, and what follows.
    """
    parts, world = parts_of(model), _World.of(model)
    order, passes, hops = parts.order, len(parts.order), len(parts.sender)
    pipelines, pp = world.parallel.stage, order.pp
    slow_W, links_W = factors(slow, world.size), factors(links, world.size)
    slow_PJ = slow_W.reshape(pp, pipelines)
    worst_PJ = [world.spread(world.slowest(one)).reshape(pp, pipelines) for one in (slow_W, links_W)]
    compute = parts.compute[order.stage, order.kind][:, None] * slow_PJ[order.rank]
    waits = _pass_seconds(parts, worst_PJ[0], worst_PJ[1])[1]
    moves = _hop_seconds(parts, worst_PJ[1])

    # Numbers of tasks: [passes or transfers, pipelines], one block behind the other.
    pipeline = np.arange(pipelines)
    computes = np.arange(passes)[:, None] * pipelines + pipeline
    meets = computes + passes * pipelines
    sends = 2 * passes * pipelines + np.arange(hops)[:, None] * pipelines + pipeline
    rank = order.rank[:, None] * pipelines + pipeline
    follows = np.flatnonzero(order.rank[1:] == order.rank[:-1])
    before = [computes, meets[follows]]
    after = [meets, computes[follows + 1]]
    tasks = parts.tasks
    for source, target in zip(tasks.before.tolist(), tasks.after.tolist(), strict=True):
        before.append(meets[source] if source < passes else sends[source - passes])
        after.append(computes[target] if target < passes else sends[target - passes])
    lane = tasks.stream[passes:, None]
    stream = [rank, world.size + rank, np.where(lane < 0, -1, (lane + pp) * pipelines + pipeline)]
    meeting = [np.full_like(rank, -1), np.arange(passes)[:, None] * world.cells + pipeline // world.cell]
    meeting.append(np.full_like(sends, -1))
    tail = _tails(parts, world, slow_W, links_W, 4 * world.size, passes * world.cells)
    first = (2 * passes + hops) * pipelines
    if len(tail[0]):
        ends = np.full(pp, 0)
        np.maximum.at(ends, order.rank, np.arange(passes))
        before.append(meets[ends])
        after.append(first + np.arange(world.size).reshape(pp, pipelines))
    return Tasks(
        np.concatenate([one.ravel() for one in (compute, waits, moves, tail[0])]),
        np.concatenate([one.ravel() for one in (*stream, tail[1])]),
        np.concatenate([one.ravel() for one in before]),
        np.concatenate([one.ravel() for one in after]),
        np.concatenate([one.ravel() for one in (*meeting, tail[2])]),
    )


def _tails(
    parts: Parts, world: _World, slow_W: Floats, links_W: Floats, stream: int, meeting: int
) -> tuple[Floats, Ints, Ints]:
    """Durations, streams and meetings of what follows the last pass: each thing of all ranks, one behind the other."""
    ranks = np.arange(world.size)
    duration, meetings = [np.empty(0)], [np.empty(0, dtype=np.int64)]
    for one in parts.after:
        if one.axis:
            shape, _ = world.groups(one.axis)
            number = np.arange(shape[0] * shape[2]).reshape(shape[0], 1, shape[2])
            meetings.append(meeting + np.broadcast_to(number, shape).reshape(-1))
            duration.append(_slower(one, world.latest(one.axis, links_W)))
            meeting += shape[0] * shape[2]
        else:
            meetings.append(np.full(world.size, -1))
            duration.append(one.seconds * slow_W)
    streams = np.tile(stream + ranks, len(parts.after))
    return np.concatenate(duration), streams, np.concatenate(meetings)


def simulate_every_rank(model: StepModel, slow: Factors = None, links: Factors = None) -> float:
    """Seconds of a step, every rank replayed on its own: what ``simulate`` finds with fewer tasks."""
    return float(replay(prepare(every_rank(model, slow, links))).span)
