"""The details of a predicted step: passes, transfers between stages, and the tail after the last pass.

``timeline`` draws them and ``simulate`` distributes them over all ranks. Both reproduce the time of
``StepModel.predict``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

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
            "ep" if one.kind in ("copies", "moves") else "dp_cp" if one.family == "dense" else "edp",
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
