"""A predicted step taken apart: passes, transfers between stages, and what follows the last pass.

What ``timeline`` draws and ``simulate`` gives to every rank; both end when ``StepModel.predict`` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_comm.plan.arrays import Floats, Ints
from moe_comm.plan.pipeline.orders import PassOrder
from moe_comm.plan.step.operators import Pass
from moe_comm.plan.step.replay import Plan, Tasks, Times, replay
from moe_comm.plan.step.step import Step, StepModel

AfterKind = Literal["gradients", "optimizer", "weights"]


@dataclass(frozen=True)
class After:
    """Something behind the last pass of a pipeline position. axis: of the ranks that do it together, "" for alone.

    seconds: that it adds to the step. whole: that it takes; what is more than ``seconds`` ran beside passes.
    """

    name: str
    kind: AfterKind
    axis: str
    seconds: float
    whole: float


@dataclass(frozen=True)
class Parts:
    """A step in parts. Tasks are the passes of ``order`` and, behind them, the transfers between positions.

    seconds, times: of the tasks. compute: [stages, kinds of passes] seconds of products and memory passes of a
    micro-batch. moved: those of its transfers, hidden ones among them; weights: of these, the ones of sharded weights.
    sender, receiver: [transfers]; the pass that each comes from, and the one that waits for it. exposed: the receiver
    asks for them only when it has nothing else to do. after: in order; every position does it behind its own last
    pass, for as long as the busiest one, as the prediction has it.
    """

    predicted: Step
    order: PassOrder
    plan: Plan
    seconds: Floats
    times: Times
    compute: Floats
    moved: Floats
    weights: Floats
    sender: Ints
    receiver: Ints
    exposed: bool
    after: tuple[After, ...]

    @property
    def tasks(self) -> Tasks:
        return self.plan.tasks

    @property
    def last(self) -> Floats:
        """When the last pass of each position ends, [pp]."""
        found: Floats = np.zeros(self.order.pp)
        np.maximum.at(found, self.order.rank, self.times.end[: len(self.order)])
        return found


def parts_of(model: StepModel) -> Parts:
    """Takes the step of ``model`` apart."""
    predicted = model.predict()
    order, plan, seconds = model.pipeline()
    times = replay(plan, seconds)
    passes = len(order)
    busy = np.bincount(order.rank, seconds[:passes], minlength=order.pp)
    compute = np.array([_seconds(one, moves=False) for one in model.stage_passes])
    sender, receiver = _hops(plan.tasks, passes)
    return Parts(
        predicted=predicted,
        order=order,
        plan=plan,
        seconds=seconds,
        times=times,
        compute=compute,
        moved=np.array([_seconds(one, moves=True) for one in model.stage_passes]) + model.moves,
        weights=model.moves,
        sender=sender,
        receiver=receiver,
        exposed=bool((plan.tasks.stream[passes:] < 0).any()),
        after=_after(model, int(busy.argmax()), predicted, float(times.span)),
    )


def _seconds(one: Pass, *, moves: bool) -> list[float]:
    """By kind of pass: transfers, or all else; with what is hidden."""
    return [sum(each.seconds for each in kind if (each.kind == "transfer") is moves) for kind in one.kinds]


def _hops(tasks: Tasks, passes: int) -> tuple[Ints, Ints]:
    """The pass that each transfer comes from (said before any other that it waits for), and the one that takes it."""
    count = len(tasks) - passes
    sender, receiver = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    into = np.flatnonzero((tasks.after >= passes) & (tasks.before < passes))[::-1]  # of several the first is kept
    sender[tasks.after[into] - passes] = tasks.before[into]
    out = np.flatnonzero((tasks.before >= passes) & (tasks.after < passes))
    receiver[tasks.before[out] - passes] = tasks.after[out]
    return sender, receiver


def _after(model: StepModel, rank: int, predicted: Step, span: float) -> tuple[After, ...]:
    """What is behind the last pass of position ``rank``, until the step ends."""
    found = [
        After(
            name,
            _kind(name),
            "dp_cp" if name.startswith("dense") else "edp",
            moved.seconds - predicted.hidden.get(name, 0.0),
            moved.seconds,
        )
        for name, moved in model.weights.after(rank).items()
        if moved.seconds
    ]
    left = predicted.seconds - span - sum(one.seconds for one in found)
    found.append(After("optimizer", "optimizer", "", left, left))
    order = ("gradients", "optimizer", "weights")
    return tuple(sorted(found, key=lambda one: order.index(one.kind)))


def _kind(name: str) -> AfterKind:
    return "weights" if name.endswith("weights") else "gradients"
