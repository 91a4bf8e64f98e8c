"""Simulate a step on all ranks: the cost of slow ranks and slow links for the ranks that wait for them.

``step_details`` returns the passes, the transfers between stages, and the tail after the last pass, with the times of
``StepModel.predict``. ``simulate`` distributes them over all ranks. Every rank runs its own computation, slowed by its
own factor. Ranks wait for each other in transfers:

    cell        ranks that wait for each other in the passes of a stage, because their tensor, context and expert
                parallel groups overlap (with "fsdp" also data parallel groups). All of them wait for the slowest.
    pipeline    one cell of each position, with stage transfers and the schedule
    stage       gradient sums: replicas wait for each other, then each updates its shard and gathers weights

                 position 0   position 1   position 2
    pipeline 0   cell 0       cell 0       cell 0          a slow rank slows its cell, the cell its pipeline, and the
    pipeline 1   cell 1       cell 1       cell 1          pipeline, at the gradient sums, all its replicas

The ranks of a cell synchronize in every pass. One replay of the pipeline's graph, with a lane of durations for each
distinct pipeline, therefore replays all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from moe_comm.errors import ConfigError
from moe_comm.topology import ParallelConfig
from moe_plan.arrays import Floats, Ints
from moe_plan.orders import PassOrder
from moe_plan.step.operators import BlockOperations
from moe_plan.step.replay import ReplayPlan, ReplayTimes, TaskGraph, replay
from moe_plan.step.step import StepModel, StepPrediction

TailKind = Literal["gradients", "optimizer", "weights"]


@dataclass(frozen=True)
class TailOperation:
    """An operation after the last pass of a pipeline position.

    axis: axis of the group that performs it, "" for a single rank. seconds: exposed time, which it adds to the step.
    total_seconds: its duration; the rest of it overlaps with passes.
    """

    name: str
    kind: TailKind
    axis: str
    seconds: float
    total_seconds: float


@dataclass(frozen=True)
class StepDetails:
    """A step in detail. Its tasks are the passes of ``order``, followed by the transfers between positions.

    seconds, times: duration, begin and end of the tasks. compute: [stages, kinds of passes] seconds of GEMMs and memory
    passes of a micro-batch. transfers: seconds of its transfers, including hidden ones. weight_transfers: the part of
    them for sharded weights. sender, receiver: [transfers]; the pass before and after each transfer between positions.
    exposed: receivers start these transfers only when they are idle. tail: operations that every position runs after
    its last pass, in order, with the times of the busiest position.
    """

    predicted: StepPrediction
    order: PassOrder
    plan: ReplayPlan
    seconds: Floats
    times: ReplayTimes
    compute: Floats
    transfers: Floats
    weight_transfers: Floats
    sender: Ints
    receiver: Ints
    exposed: bool
    tail: tuple[TailOperation, ...]

    @property
    def tasks(self) -> TaskGraph:
        return self.plan.tasks

    @property
    def last(self) -> Floats:
        """End of the last pass of each position, [pp]."""
        result: Floats = np.zeros(self.order.pp)
        np.maximum.at(result, self.order.rank, self.times.end[: len(self.order)])
        return result


def step_details(model: StepModel) -> StepDetails:
    """Return the details of the step that ``model`` predicts."""
    predicted = model.predict()
    order, plan, seconds = model.pipeline()
    times = replay(plan, seconds)
    passes = len(order)
    busy = np.bincount(order.rank, seconds[:passes], minlength=order.pp)
    sender, receiver = _hops(plan.tasks, passes)
    return StepDetails(
        predicted=predicted,
        order=order,
        plan=plan,
        seconds=seconds,
        times=times,
        compute=np.array([_seconds(one, transfers=False) for one in model.stage_passes]),
        transfers=np.array([_seconds(one, transfers=True) for one in model.stage_passes]) + model.weight_seconds,
        weight_transfers=model.weight_seconds,
        sender=sender,
        receiver=receiver,
        exposed=bool((plan.tasks.stream[passes:] < 0).any()),
        tail=_tail(model, int(busy.argmax()), predicted, float(times.span)),
    )


def _seconds(stage: BlockOperations, *, transfers: bool) -> list[float]:
    """Return the seconds of transfers, or of all other operations, by kind of pass, including hidden ones."""
    return [
        sum(operation.seconds for operation in pass_ if (operation.kind == "transfer") is transfers)
        for pass_ in stage.kinds
    ]


def _hops(tasks: TaskGraph, passes: int) -> tuple[Ints, Ints]:
    """Return the pass that sends each transfer (the first of its predecessors), and the pass that receives it."""
    count = len(tasks) - passes
    sender, receiver = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    # In reverse order, so that the first edge is assigned last.
    sending_edges = np.flatnonzero((tasks.after >= passes) & (tasks.before < passes))[::-1]
    sender[tasks.after[sending_edges] - passes] = tasks.before[sending_edges]
    receiving_edges = np.flatnonzero((tasks.before >= passes) & (tasks.after < passes))
    receiver[tasks.before[receiving_edges] - passes] = tasks.after[receiving_edges]
    return sender, receiver


def _tail(model: StepModel, rank: int, predicted: StepPrediction, span: float) -> tuple[TailOperation, ...]:
    """Return the operations after the last pass of position ``rank``."""
    result = [
        TailOperation(
            one.name,
            "weights" if one.kind == "weights" else "gradients",
            "ep" if one.kind == "moves" else "dp_cp" if one.family == "dense" else "edp",
            one.cost.seconds - predicted.hidden.get(one.name, 0.0),
            one.cost.seconds,
        )
        for one in model.weights.tail(rank)
        if one.cost.seconds
    ]
    optimizer_s = predicted.seconds - span - sum(one.seconds for one in result)
    result.append(TailOperation("optimizer", "optimizer", "", optimizer_s, optimizer_s))
    order = ("gradients", "optimizer", "weights")
    return tuple(sorted(result, key=lambda one: order.index(one.kind)))


Factors = Mapping[int, float] | ArrayLike | None
"""Slowdown factors: by rank, or an array [world]. Missing ranks and None mean 1."""
_NUMBERS = 1 << 24
"""Largest number of durations in one replay. More pipelines are replayed in batches."""


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step of all ranks.

    seconds: time of the step. even: its time without slow ranks and links. tasks, lanes: size of the replay.
    Arrays [world] of seconds, which add up to ``seconds`` for each rank: compute (products, memory passes, optimizer),
    moving (exposed transfers), waiting (for other ranks, including the pipeline bubble).
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
        """Time of the step relative to one without slow ranks."""
        return self.seconds / self.even

    @property
    def busy(self) -> Floats:
        """Seconds in which each rank computes or communicates."""
        result: Floats = self.compute + self.moving
        return result

    def __str__(self) -> str:
        ranks, waits = len(self.waiting), self.waiting.mean() / self.seconds
        return (
            f"{self.seconds:.4g} s on {ranks:,} ranks, {self.slowdown:.3f} times the {self.even:.4g} s without slow "
            f"ranks; ranks wait {waits:.1%} of the time"
        )


def parse_slow(arguments: Sequence[str]) -> dict[int, float]:
    """Parse ["3=1.5", "17=2"] into factors by rank. Raises ConfigError for other forms and repeated ranks."""
    factors: dict[int, float] = {}
    for text in arguments:
        rank, equals, factor = text.partition("=")
        try:
            if not equals or int(rank) in factors:
                raise ValueError
            factors[int(rank)] = float(factor)
        except ValueError:
            raise ConfigError(
                f"a slow rank must be RANK=FACTOR, such as 3=1.5, and each rank may occur once; got {text!r}"
            ) from None
    return factors


def simulate(model: StepModel, slow: Factors = None, links: Factors = None) -> SimulatedStep:
    """Replay a step on all ranks. Without factors it takes the time of ``model.predict()``.

    Args:
        slow: slowdown of each rank's computation.
        links: slowdown of each rank's transfers. A transfer is as slow as the slowest of its ranks.

    Raises:
        ConfigError: a rank does not exist, or a factor is not a finite number above 0.
    """
    details, world = step_details(model), _World.of(model)
    slow_W, links_W = factors(slow, world.size), factors(links, world.size)
    slow_PC, links_PC = world.slowest(slow_W), world.slowest(links_W)
    factors_of_cell = np.concatenate([slow_PC, links_PC])
    distinct, lane = np.unique(factors_of_cell, axis=1, return_inverse=True)
    lane = lane.reshape(-1)
    ends_of_batches = []
    pp, lanes = details.order.pp, distinct.shape[1]
    for first in range(0, lanes, _lanes_per_replay(details)):
        batch = distinct[:, first : first + _lanes_per_replay(details)]
        ends_of_batches.append(_end_of_last_pass(details, batch[:pp], batch[pp:]))
    last_PL: Floats = np.concatenate(ends_of_batches, axis=1)
    end_W = world.spread(last_PL[:, lane])
    for operation in details.tail:
        end_W = _after_tail(world, operation, end_W, slow_W, links_W)
    compute_W, moving_W = _busy(details, world, slow_W, slow_PC, links_W, links_PC)
    seconds = float(end_W.max())
    waiting_W: Floats = np.maximum(seconds - compute_W - moving_W, 0.0)
    return SimulatedStep(seconds, details.predicted.seconds, compute_W, moving_W, waiting_W, len(details.tasks), lanes)


def factors(values: Factors, world: int) -> Floats:
    """Return the factors of all ranks, [world]. Raises ConfigError as ``simulate`` does."""
    result = np.ones(world)
    if isinstance(values, Mapping):
        for rank, factor in values.items():
            if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or not 0 <= rank < world:
                raise ConfigError(f"a slow rank must be from 0 to {world - 1}; got {rank!r}")
            result[rank] = factor
    elif values is not None:
        result = np.array(values, dtype=np.float64)
        if result.shape != (world,):
            raise ConfigError(f"factors must have one entry for each of the {world} ranks; got shape {result.shape}")
    wrong = np.flatnonzero(~((result > 0) & (result < math.inf)))
    if len(wrong):
        raise ConfigError(f"a factor must be a finite number above 0; rank {wrong[0]} has {result[wrong[0]]}")
    return result


# ---- synchronization


@dataclass(frozen=True)
class _World:
    """Ranks as [positions, cells, ranks of a cell]. A cell is a block of consecutive ranks.

    Blocks of tp * cp ranks and of etp * ep ranks start at rank 0. A cell is the least common multiple of both sizes.
    With "fsdp", the ranks of one of its replicas are also in one cell.
    """

    parallel: ParallelConfig
    cell: int

    @classmethod
    def of(cls, model: StepModel) -> _World:
        mapping = model.placed.mapping
        p = mapping.parallel
        tied = math.lcm(p.tp * p.cp, p.etp * p.ep)
        return cls(p, math.lcm(tied, p.stage // mapping.replicas) if mapping.sharding == "fsdp" else tied)

    @property
    def size(self) -> int:
        return self.parallel.world

    @property
    def cells(self) -> int:
        """Number of cells of each position, which is also the number of pipelines."""
        return self.parallel.stage // self.cell

    def slowest(self, factor_W: Floats) -> Floats:
        """Return the largest factor of each cell, [positions, cells], from [world]."""
        result: Floats = factor_W.reshape(self.parallel.pp, self.cells, self.cell).max(axis=2)
        return result

    def spread(self, of_PC: Floats) -> Floats:
        result: Floats = np.repeat(of_PC.reshape(-1), self.cell)
        return result

    def shape(self, axis: str) -> tuple[int, int, int]:
        """Return the shape in which groups of ``axis`` lie along the middle dimension of the world."""
        p = self.parallel
        if axis == "ep":  # the group includes the ranks that share its experts
            return (p.pp * p.edp, p.ep * p.etp, 1)
        return (p.pp, p.dp * p.cp, p.tp) if axis == "dp_cp" else (p.pp, p.edp, p.ep * p.etp)

    def latest(self, axis: str, of_W: Floats) -> Floats:
        """Return the largest value in each rank's group, [world]."""
        shape = self.shape(axis)
        return np.broadcast_to(of_W.reshape(shape).max(axis=1, keepdims=True), shape).reshape(-1)


def _after_tail(world: _World, operation: TailOperation, end_W: Floats, slow_W: Floats, links_W: Floats) -> Floats:
    if not operation.axis:
        result: Floats = end_W + operation.seconds * slow_W
        return result
    return world.latest(operation.axis, end_W) + _exposed_seconds(operation, world.latest(operation.axis, links_W))


def _exposed_seconds(operation: TailOperation, links: Floats) -> Floats:
    """Return the exposed seconds of a transfer over slower links. Its hidden time does not change."""
    result: Floats = operation.seconds + (links - 1.0) * operation.total_seconds
    return np.maximum(result, 0.0)


# ---- pipelines


def _lanes_per_replay(details: StepDetails) -> int:
    return max(1, _NUMBERS // len(details.tasks))


def _end_of_last_pass(details: StepDetails, slow_PL: Floats, links_PL: Floats) -> Floats:
    """Return the end of the last pass at each position of each pipeline, [positions, lanes]."""
    order, passes = details.order, len(details.order)
    compute, waits = _pass_seconds(details, slow_PL, links_PL)
    hops = _hop_seconds(details, links_PL)
    times = replay(details.plan, np.concatenate([compute + waits, hops]))
    result = np.zeros((order.pp, slow_PL.shape[1]))
    ends = times.end[:passes]
    for rank in range(order.pp):
        result[rank] = ends[order.rank == rank].max(axis=0)
    return result


def _pass_seconds(details: StepDetails, slow_PL: Floats, links_PL: Floats) -> tuple[Floats, Floats]:
    """Return the computation of the slowest rank of a cell and the exposed transfers of each pass, [passes, lanes].

    The hidden time of a transfer does not change with slower links; all additional time is exposed.
    """
    order = details.order
    compute = details.compute[order.stage, order.kind]
    moved = details.transfers[order.stage, order.kind]
    added = details.seconds[: len(order)] - compute
    waits = added[:, None] + (links_PL[order.rank] - 1.0) * moved[:, None]
    return compute[:, None] * slow_PL[order.rank], np.maximum(waits, 0.0)


def _hop_seconds(details: StepDetails, links_PL: Floats) -> Floats:
    """Return the seconds of transfers between positions, [transfers, lanes]."""
    rank = details.order.rank
    hop = details.seconds[len(details.order) :, None]
    result: Floats = hop * np.maximum(links_PL[rank[details.sender]], links_PL[rank[details.receiver]])
    return result


def _busy(
    details: StepDetails, world: _World, slow_W: Floats, slow_PC: Floats, links_W: Floats, links_PC: Floats
) -> tuple[Floats, Floats]:
    """Return the seconds [world] in which each rank computes, and in which it only communicates."""
    order, ranks = details.order, world.parallel.stage
    compute = np.bincount(order.rank, details.compute[order.stage, order.kind], minlength=order.pp)
    compute_W: Floats = np.repeat(compute, ranks) * slow_W
    # One lane for each distinct cell: the sum over passes is the same for equal cells.
    moving_PC = np.empty_like(slow_PC)
    pairs = np.stack([slow_PC.reshape(-1), links_PC.reshape(-1)])
    factors_of_cell, column = np.unique(pairs, axis=1, return_inverse=True)
    column = column.reshape(slow_PC.shape)
    batch_size = _lanes_per_replay(details)
    for first in range(0, factors_of_cell.shape[1], batch_size):
        batch = factors_of_cell[:, first : first + batch_size]
        expanded = [np.broadcast_to(row, (order.pp, batch.shape[1])) for row in batch]
        waits = _pass_seconds(details, expanded[0], expanded[1])[1]
        total = np.stack([waits[order.rank == rank].sum(axis=0) for rank in range(order.pp)])
        in_batch = (column >= first) & (column < first + batch.shape[1])
        rows = np.nonzero(in_batch)
        moving_PC[rows] = total[rows[0], column[rows] - first]
    moving_W = world.spread(moving_PC)
    for operation in details.tail:
        if operation.axis:
            moving_W = moving_W + _exposed_seconds(operation, world.latest(operation.axis, links_W))
        else:
            compute_W = compute_W + operation.seconds * slow_W
    return compute_W, moving_W
