"""How many micro-batches wait on a pipeline rank for their backward when it holds the most."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from moe_comm.plan.arrays import Ints
from moe_comm.plan.pipeline.orders import pass_order
from moe_comm.plan.pipeline.stages import StagePlan

Moment = tuple[tuple[int, ...], tuple[int, ...]]
"""Of each of a rank's stages, how many micro-batches are in flight, and how many of them wait for the weights' half."""
_IN_FLIGHT, _WAITING = np.array([1, -1, 0, -1]), np.array([0, 0, 1, -1])
"""By ``PassKind``: of which there are so many more after a pass."""
_FULL = 4
"""Groups of ``pp`` micro-batches with which a pipeline holds as much as with more."""


@lru_cache(maxsize=4096)
def moments(schedule: str, pp: int, virtual: int, micro_batches: int) -> tuple[tuple[Moment, ...], ...]:
    """By rank, when it may hold the most: of several moments, none has both more in flight and more waiting.

    Raises:
        ConfigError: the schedule cannot run with these numbers.
    """
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


def in_flight(schedule: str, pp: int, virtual: int, rank: int, micro_batches: int) -> tuple[int, ...]:
    """For each stage of pipeline rank ``rank``, how many micro-batches wait there for their backward.

    When the rank holds the most, as torch orders the schedules; a split backward is over with the weights' half.
    """
    if pp == 1:
        return (1,) * virtual
    # Rounds, in which each of a rank's stages in turn takes as many micro-batches.
    per_round = micro_batches // max(1, micro_batches // pp)
    behind = pp - 1 - rank
    held = {
        "gpipe": (micro_batches,),
        "1f1b": (behind + 1,),
        "interleaved_1f1b": _rounds(virtual, per_round, (virtual - 1) * per_round + 2 * behind + 1, 2 * behind + 1),
        "zero_bubble": _rounds(virtual, per_round, (virtual - 1) * per_round + pp, per_round),
        "zbv": (2 * pp - 1 - rank, rank + 1),
        "dualpipev": (2 * pp - rank, rank + 1),
    }[schedule]
    return tuple(min(micro_batches, count) for count in held)


def _rounds(virtual: int, per_round: int, total: int, last: int) -> tuple[int, ...]:
    """A round in each stage, up to ``last`` in the last one, and what is left of ``total`` in the first."""
    later = [per_round] * (virtual - 2) + [min(per_round, last)] * (virtual > 1)
    return (total - sum(later), *later)
