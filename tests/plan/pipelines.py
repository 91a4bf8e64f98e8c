"""What ranks of a pipeline hold and how long they wait, worked out pass by pass."""

from __future__ import annotations

import numpy as np

from moe_comm.plan.arrays import Floats
from moe_comm.plan.pipeline.orders import PassOrder
from moe_comm.plan.step.replay import ReplayTimes


def peak_held(order: PassOrder, held: Floats, for_weight: Floats | None = None) -> Floats:
    """The most that each rank holds at once of what forward passes leave for backward ones: float64 [pp].

    Args:
        held: [stages]; what a micro-batch's forward pass leaves, bytes say (ones: micro-batches in flight).
        for_weight: [stages]; what of it is still there between the two halves of a split backward; None: all.
    """
    kept = held if for_weight is None else for_weight
    per_kind = np.stack([held, -held, kept - held, -kept])
    now = np.cumsum(per_kind[order.kind, order.stage])
    first = np.searchsorted(order.rank, np.arange(order.pp))
    # Each rank ends with nothing held, so what others add up to before it is rounding at most.
    result: Floats = np.maximum.reduceat(now, first) - np.concatenate([[0.0], now[first[1:] - 1]])
    return result


def idle(order: PassOrder, times: ReplayTimes) -> Floats:
    """The share of the step that each rank runs no pass (bubble and waiting for transfers): float64 [pp]."""
    passes = slice(0, len(order))
    busy = np.bincount(order.rank, times.end[passes] - times.begin[passes], minlength=order.pp)
    result: Floats = 1.0 - busy / float(times.span)
    return result
