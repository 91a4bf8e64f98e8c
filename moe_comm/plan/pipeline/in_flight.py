"""How many micro-batches wait on a pipeline rank for their backward when it holds the most."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from moe_comm.plan.arrays import Ints
from moe_comm.plan.pipeline.orders import pass_order
from moe_comm.plan.pipeline.schedules import check_micro_batches
from moe_comm.plan.pipeline.stages import StagePlan

Moment = tuple[tuple[int, ...], tuple[int, ...]]
"""Of each of a rank's stages, how many micro-batches are in flight, and how many of them wait for the weights' half."""
_IN_FLIGHT, _WAITING = np.array([1, -1, 0, -1]), np.array([0, 0, 1, -1])
"""By ``PassKind``: of which there are so many more after a pass."""
_FULL = 4
"""Groups of ``pp`` micro-batches with which a pipeline holds as much as with more."""


@lru_cache(maxsize=4096)
def moments(schedule: str, pp: int, virtual: int, micro_batches: int) -> tuple[tuple[Moment, ...], ...]:
    """By rank, when it may hold the most: of several moments, none has both more in flight and more waiting. The first
    one has the most in flight.

    Raises:
        ConfigError: the schedule cannot run with these numbers.
    """
    check_micro_batches(schedule, pp, micro_batches)
    if pp == 1:
        return ((((1,) * virtual, (0,) * virtual),),)
    if schedule == "gpipe":
        return ((((micro_batches,), (0,)),),) * pp
    few = _FULL * pp if micro_batches > _FULL * pp and not micro_batches % pp else micro_batches
    order = pass_order(schedule, pp, few, virtual)
    plan = StagePlan(pp, virtual, order.style, (0,) * order.stages)
    found = []
    for rank in range(pp):
        mine = order.rank == rank
        here = order.stage[mine] == np.array(plan.stages_of(rank))[:, None]
        flying = np.cumsum(here * _IN_FLIGHT[order.kind[mine]], axis=1)
        waiting = np.cumsum(here * _WAITING[order.kind[mine]], axis=1)
        if rank == 0:
            waiting[0] = 0
        found.append(_largest(flying, waiting))
    return tuple(found)


def _largest(flying: Ints, waiting: Ints) -> tuple[Moment, ...]:
    """Of [stages, passes]."""
    both = flying.sum(0), waiting.sum(0)
    best: list[Moment] = []
    most = -1
    for at in np.lexsort((-both[1], -both[0])).tolist():
        if both[1][at] > most:
            most = int(both[1][at])
            best.append((tuple(flying[:, at].tolist()), tuple(waiting[:, at].tolist())))
    return tuple(best)
