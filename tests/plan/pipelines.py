"""Memory peaks and idle times of pipeline ranks, computed pass by pass as a reference for the planner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moe_plan.arrays import Floats
from moe_plan.orders import PassOrder
from moe_plan.step.pipeline import pipeline_tasks
from moe_plan.step.replay import ReplayTimes, TaskGraph


def timed_tasks(
    order: PassOrder,
    forward: float = 1.0,
    input: float = 1.0,
    weight: float = 1.0,
    *,
    transfer: float = 0.0,
    exposed: bool = False,
) -> TaskGraph:
    """Return the tasks of a step whose passes take these seconds. A complete backward takes ``input + weight``."""
    tasks = pipeline_tasks(order, exposed=exposed)
    seconds = np.array([forward, input + weight, input, weight])[order.kind]
    return replace(tasks, duration=np.concatenate([seconds, np.full(len(tasks) - len(order), transfer)]))


def peak_held(order: PassOrder, held: Floats, for_weight: Floats | None = None) -> Floats:
    """Return the peak of the activations that each rank holds for backward passes, float64 [pp].

    Args:
        held: [stages]; bytes that the forward pass of a micro-batch saves (ones count micro-batches in flight).
        for_weight: [stages]; bytes that remain between the two halves of a split backward. None: all.
    """
    kept = held if for_weight is None else for_weight
    per_kind = np.stack([held, -held, kept - held, -kept])
    now = np.cumsum(per_kind[order.kind, order.stage])
    first = np.searchsorted(order.rank, np.arange(order.pp))
    # Ranks are concatenated. Each rank ends at zero up to rounding; the remainder of the ranks before it is subtracted.
    result: Floats = np.maximum.reduceat(now, first) - np.concatenate([[0.0], now[first[1:] - 1]])
    return result


def idle(order: PassOrder, times: ReplayTimes) -> Floats:
    """Return the fraction of the step in which each rank runs no pass (bubble and waits), float64 [pp]."""
    passes = slice(0, len(order))
    busy = np.bincount(order.rank, times.end[passes] - times.begin[passes], minlength=order.pp)
    result: Floats = 1.0 - busy / float(times.span)
    return result
