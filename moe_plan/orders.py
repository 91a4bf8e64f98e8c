"""Pipeline schedules as arrays: the order of the passes on each rank.

The orders equal those of ``torch.distributed.pipelining`` for the trainer's schedules
(``moe_comm.topology.pipeline`` has their names, limits and sources). They are computed for all ranks at once and
without a process group. 1f1b over 3 ranks, 4 micro-batches, with forward F and backward B of equal length:

    rank 0   F0 F1 F2       B0 F3 B1    B2    B3
    rank 1      F0 F1    B0 F2 B1 F3 B2    B3
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3

``moe_plan.step.replay`` computes the times of the passes from their durations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moe_comm.errors import ConfigError
from moe_comm.topology.pipeline import StagePlan, check_micro_batches, find_schedule, stages_per_rank
from moe_plan.arrays import Ints


class PassKind(IntEnum):
    """Kind of a pass. ``INPUT`` and ``WEIGHT`` are the halves of a split ``BACKWARD``."""

    FORWARD = 0
    BACKWARD = 1
    INPUT = 2
    WEIGHT = 3

    @property
    def letter(self) -> str:
        """The letter in torch's schedules: F, B, I, W."""
        return "FBIW"[self]


F, B, I, W = PassKind


@dataclass(frozen=True)
class PassOrder:
    """All passes of a step, by rank, and in order of execution within a rank. Arrays [passes].

    rank: the pipeline coordinate. kind: a ``PassKind``. stage: 0 to pp * virtual - 1. micro: the micro-batch.
    """

    pp: int
    virtual: int
    micro_batches: int
    rank: Ints
    kind: Ints
    stage: Ints
    micro: Ints

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def stages(self) -> int:
        return self.pp * self.virtual


@lru_cache(maxsize=256)
def pass_order(schedule: str, pp: int, micro_batches: int, virtual: int | None = None) -> PassOrder:
    """Return the order of the passes of a schedule. With pp = 1, micro-batches run one after another.

    The arrays are shared between callers and read-only.

    Args:
        virtual: stages per rank. None: the schedule's default.
    """
    if pp < 1:
        raise ConfigError(f"pp must be at least 1; got {pp}")
    virtual = stages_per_rank(schedule, pp, virtual)
    check_micro_batches(schedule, pp, micro_batches)
    make = _sequential if pp == 1 else _MAKERS[schedule]
    arrays = make(pp, virtual, micro_batches)
    for array in arrays:
        array.setflags(write=False)
    return PassOrder(pp, virtual, micro_batches, *arrays)


# ---- the orders. Each maker returns (rank, kind, stage, micro).

_Arrays = tuple[Ints, Ints, Ints, Ints]


def _sequential(pp: int, virtual: int, micro_batches: int) -> _Arrays:
    """One stage: forward and backward of each micro-batch."""
    zero = np.zeros(2 * micro_batches, dtype=np.int64)
    return zero, np.tile(np.array([F, B]), micro_batches), zero.copy(), np.repeat(np.arange(micro_batches), 2)


def _one_forward_one_backward(pp: int, virtual: int, micro_batches: int, early: Ints, *, split: bool) -> _Arrays:
    """Run some forwards, then alternate between one forward and one backward, then run the remaining backwards.

    Each round of micro-batches runs through a rank's stages: forwards from the first stage, backwards from the last.
    early: [pp]; forwards of a rank before its first backward, in addition to those of its stages before the last.
    split: backward k computes input gradients. Weight gradients of k follow input gradients of k + rank, the rest are
        at the end.
    """
    number = virtual * micro_batches  # forwards of a rank; also its backwards
    round_size = micro_batches // max(1, micro_batches // pp)
    warm = np.minimum((virtual - 1) * round_size + early, number)[:, None]
    k = np.arange(number)[None, :]
    forward_at = np.where(k < warm, k, 2 * k - warm)
    backward_at = np.where(k < number - warm, warm + 2 * k + 1, number + k)
    local_stage = (k // round_size) % virtual
    micro = k // (round_size * virtual) * round_size + k % round_size
    rank = np.arange(pp)[:, None]

    shape = (pp, number)
    positions = [2 * forward_at, 2 * backward_at]
    kinds = [F, I if split else B]
    stages = [local_stage * pp + rank, (virtual - 1 - local_stage) * pp + rank]
    if split:
        follows = np.minimum(k + rank, number - 1)
        weight_at = 2 * np.take_along_axis(backward_at, follows, axis=1) + 1
        positions.append(np.where(k + rank < number, weight_at, 4 * number + k))
        kinds.append(W)
        stages.append(stages[1])
    position = np.concatenate([np.broadcast_to(a, shape) for a in positions], axis=1)
    sort = np.argsort(position, axis=1, kind="stable")
    stage = np.concatenate([np.broadcast_to(s, shape) for s in stages], axis=1)
    kind = np.repeat(np.array(kinds, dtype=np.int64), number)
    all_micro = np.tile(micro[0], len(kinds))
    total = len(kinds) * number
    return (
        np.repeat(np.arange(pp), total),
        kind[sort].ravel(),
        np.take_along_axis(stage, sort, axis=1).ravel(),
        all_micro[sort].ravel(),
    )


# Codes of passes of a rank in a V schedule: 2 * kind + index of the rank's stage. For example, f0 is a forward of the
# first stage and b1 a complete backward of the second. With dualpipev, weight passes take their stage from a queue.
_f0, _f1, _b0, _b1, _i0, _i1, _w0, _w1 = range(8)


def _zbv(pp: int, virtual: int, micro_batches: int) -> _Arrays:
    """Build the schedule for at least the micro-batches that fill the pipeline, then drop those in excess."""
    built = max(2 * pp - 1, micro_batches)
    codes = []
    for rank in range(pp):
        filled = 2 * pp - rank - 1  # forwards of the first stage before the stable phase
        codes.append(
            [_f0] * (2 * (pp - rank) - 1)
            + [_f1, _f0] * rank
            + [_f1, _i1, _w1] * (pp - rank)
            + [_f0, _i0, _w0, _f1, _i1, _w1] * (built - filled)
            + [_i0, _w0, _f1, _i1, _w1] * (filled - pp)
            + [_i0, _i1] * rank
            + [_i0, _w0] * (pp - rank)
            + [_w1] * rank
            + [_w0] * rank
        )
    rank_, kind, stage, micro = _v_ranks(pp, codes)
    keep = micro < micro_batches
    return rank_[keep], kind[keep], stage[keep], micro[keep]


def _dualpipev(pp: int, virtual: int, micro_batches: int) -> _Arrays:
    """Build the eight phases of DeepSeek's DualPipeV."""
    codes = []
    for rank in range(pp):
        after = pp - rank - 1
        steady = micro_batches - 2 * pp + rank + 1
        ends = [_b1, _b0] * (rank + 1)  # the second half of these defers weight gradients
        ends[rank + 1 :] = [_i1 if code == _b1 else _i0 for code in ends[rank + 1 :]]
        alone = [_f0] * (2 * after) + [_f0, _f1] * (rank + 1) + [_i1, _w0, _f1] * after
        paired = [_f0, _b1, _f1, _b0] * steady
        tail = [_b1, _f1, _b0] * after + ends + [_w0, _i0] * after + [_w0] * (rank + 1)
        codes.append(alone + paired + tail)
    return _v_ranks(pp, codes, queued=True)


def _v_ranks(pp: int, codes: list[list[int]], *, queued: bool = False) -> _Arrays:
    parts = [_v_rank(rank, pp, np.array(code), queued=queued) for rank, code in enumerate(codes)]
    rank_, kind, stage, micro = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return rank_, kind, stage, micro


def _v_rank(rank: int, pp: int, code: Ints, *, queued: bool) -> _Arrays:
    """Return a rank's passes from their codes. The n-th pass of a kind and stage runs micro-batch n.

    queued: each weight pass belongs to the oldest input pass, of either stage, that has no weight pass yet.
    """
    kind, is_second = code // 2, code % 2
    micro = np.empty_like(code)
    numbered: list[NDArray[np.bool_]] = []
    for of_second in (0, 1):
        in_stage = is_second == of_second
        numbered += [in_stage & (kind == F), in_stage & ((kind == B) | (kind == I))]
        if not queued:
            numbered.append(in_stage & (kind == W))
    for mask in numbered:
        micro[mask] = np.arange(mask.sum())
    if queued:
        weights, inputs = kind == W, kind == I
        is_second[weights], micro[weights] = is_second[inputs], micro[inputs]
    stage = np.where(is_second == 0, rank, 2 * pp - 1 - rank)
    return np.full(len(code), rank), kind, stage, micro


_MAKERS: dict[str, Callable[[int, int, int], _Arrays]] = {
    "gpipe": lambda pp, v, n: _one_forward_one_backward(pp, 1, n, np.full(pp, n), split=False),
    "1f1b": lambda pp, v, n: _one_forward_one_backward(pp, 1, n, pp - 1 - np.arange(pp), split=False),
    "interleaved_1f1b": lambda pp, v, n: _one_forward_one_backward(pp, v, n, 2 * (pp - 1 - np.arange(pp)), split=False),
    "zero_bubble": lambda pp, v, n: _one_forward_one_backward(pp, v, n, pp - 1 - np.arange(pp), split=True),
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}


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
    """
    check_micro_batches(schedule, pp, micro_batches)
    if pp == 1:
        return ((((1,) * virtual, (0,) * virtual),),)
    if schedule == "gpipe":
        return ((((micro_batches,), (0,)),),) * pp
    enough = _FULL * pp if micro_batches > _FULL * pp and not micro_batches % pp else micro_batches
    order = pass_order(schedule, pp, enough, virtual)
    plan = StagePlan(pp, virtual, find_schedule(schedule).style, (0,) * order.stages)
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
