"""Peak numbers of micro-batches that a pipeline rank holds between their forward and backward passes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from moe_comm.plan.arrays import Ints
from moe_comm.plan.pipeline.orders import pass_order
from moe_comm.plan.pipeline.schedules import check_micro_batches
from moe_comm.plan.pipeline.stages import StagePlan

InFlight = tuple[tuple[int, ...], tuple[int, ...]]
"""For each stage of a rank: micro-batches in flight, and micro-batches between the halves of their backward."""
_IN_FLIGHT, _BETWEEN_HALVES = np.array([1, -1, 0, -1]), np.array([0, 0, 1, -1])
"""Change of both numbers after a pass, by ``PassKind``."""
_FULL = 4
"""Number of groups of ``pp`` micro-batches after which the peak does not grow."""


@lru_cache(maxsize=4096)
def in_flight_peaks(schedule: str, pp: int, virtual: int, micro_batches: int) -> tuple[tuple[InFlight, ...], ...]:
    """Return the possible peaks of each rank.

    Two numbers vary over a step: micro-batches in flight (from forward to the end of backward), and those of them
    between the two halves of a split backward. A moment is a peak if no other moment has more of both. The first peak
    has the most in flight.

    Raises:
        ConfigError: the schedule does not support these numbers.
    """
    check_micro_batches(schedule, pp, micro_batches)
    if pp == 1:
        return ((((1,) * virtual, (0,) * virtual),),)
    if schedule == "gpipe":
        return ((((micro_batches,), (0,)),),) * pp
    enough = _FULL * pp if micro_batches > _FULL * pp and not micro_batches % pp else micro_batches
    order = pass_order(schedule, pp, enough, virtual)
    plan = StagePlan(pp, virtual, order.style, (0,) * order.stages)
    peaks = []
    for rank in range(pp):
        on_rank = order.rank == rank
        in_stage = order.stage[on_rank] == np.array(plan.stages_of(rank))[:, None]
        in_flight = np.cumsum(in_stage * _IN_FLIGHT[order.kind[on_rank]], axis=1)
        between = np.cumsum(in_stage * _BETWEEN_HALVES[order.kind[on_rank]], axis=1)
        if rank == 0:
            between[0] = 0
        peaks.append(_peaks(in_flight, between))
    return tuple(peaks)


def _peaks(in_flight: Ints, between: Ints) -> tuple[InFlight, ...]:
    """Return the peaks of two arrays [stages, passes]."""
    totals = in_flight.sum(0), between.sum(0)
    peaks: list[InFlight] = []
    most_between = -1
    for moment in np.lexsort((-totals[1], -totals[0])).tolist():
        if totals[1][moment] > most_between:
            most_between = int(totals[1][moment])
            peaks.append((tuple(in_flight[:, moment].tolist()), tuple(between[:, moment].tolist())))
    return tuple(peaks)
