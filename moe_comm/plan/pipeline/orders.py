"""Pipeline schedules as arrays: which pass each rank runs after which.

The orders are those that ``torch.distributed.pipelining`` runs for the trainer's schedules
(``moe_comm.plan.pipeline.schedules`` has their names, limits and sources), for all ranks at once and without a
process group. 1f1b over 3 ranks, 4 micro-batches; F forward, B backward, here of equal length:

    rank 0   F0 F1 F2       B0 F3 B1    B2    B3
    rank 1      F0 F1    B0 F2 B1 F3 B2    B3
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3

Orders say what comes after what on a rank; when, ``moe_comm.plan.step.replay`` finds out from durations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moe_comm.errors import ConfigError
from moe_comm.plan.arrays import Ints
from moe_comm.plan.pipeline.schedules import Style, check_micro_batches, find_schedule, stages_per_rank
from moe_comm.plan.pipeline.stages import StagePlan


class PassKind(IntEnum):
    """What a pass computes. ``INPUT`` and ``WEIGHT`` are the halves of a split ``BACKWARD``."""

    FORWARD = 0
    BACKWARD = 1
    INPUT = 2
    WEIGHT = 3

    @property
    def letter(self) -> str:
        """As torch writes it in its schedules: F, B, I, W."""
        return "FBIW"[self]


F, B, I, W = PassKind


@dataclass(frozen=True)
class PassOrder:
    """Every pass of a step, by rank and, within a rank, in the order in which it runs them. Arrays [passes].

    rank: the pipeline coordinate. kind: a ``PassKind``. stage: 0 to pp * virtual - 1. micro: the micro-batch.
    pair: -1, or a number that two passes on a rank share, a forward and a whole backward that are meant to overlap
        (dualpipev).
    """

    schedule: str
    pp: int
    virtual: int
    micro_batches: int
    style: Style
    rank: Ints
    kind: Ints
    stage: Ints
    micro: Ints
    pair: Ints

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def stages(self) -> int:
        return self.pp * self.virtual

    def stage_rank(self) -> Ints:
        """The rank of each stage, [stages]."""
        plan = StagePlan(self.pp, self.virtual, self.style, (0,) * self.stages)
        return np.array([plan.rank_of(stage) for stage in range(self.stages)], dtype=np.int64)

    def of_rank(self, rank: int) -> list[tuple[PassKind, int, int]]:
        """(kind, stage, micro-batch) of the passes of a rank, in order."""
        mine = self.rank == rank
        found = zip(self.kind[mine].tolist(), self.stage[mine].tolist(), self.micro[mine].tolist(), strict=True)
        return [(PassKind(kind), stage, micro) for kind, stage, micro in found]


@lru_cache(maxsize=256)
def pass_order(schedule: str, pp: int, micro_batches: int, virtual: int | None = None) -> PassOrder:
    """The order of passes of a schedule of ``moe_comm.train.pipeline``; with pp = 1 micro-batches one after another.

    Its arrays are shared between callers and cannot be written to.

    Args:
        virtual: stages a rank; None: what is usual for the schedule.

    Raises:
        ConfigError: the schedule cannot run with these numbers.
    """
    if pp < 1:
        raise ConfigError(f"pp must be at least 1; got {pp}")
    virtual = stages_per_rank(schedule, pp, virtual)
    check_micro_batches(schedule, pp, micro_batches)
    style = find_schedule(schedule).style if pp > 1 else "loop"
    make = _in_turns if pp == 1 else _MAKERS[schedule]
    arrays = make(pp, virtual, micro_batches)
    for array in arrays:
        array.setflags(write=False)
    return PassOrder(schedule, pp, virtual, micro_batches, style, *arrays)


# ---- the orders. Each maker gives (rank, kind, stage, micro, pair).

_Arrays = tuple[Ints, Ints, Ints, Ints, Ints]


def _in_turns(pp: int, virtual: int, micro_batches: int) -> _Arrays:
    """One stage: forward and backward of a micro-batch, then of the next."""
    zero = np.zeros(2 * micro_batches, dtype=np.int64)
    return zero, np.tile(np.array([F, B]), micro_batches), zero.copy(), np.repeat(np.arange(micro_batches), 2), zero - 1


def _gpipe(pp: int, virtual: int, micro_batches: int) -> _Arrays:
    return _one_by_one(pp, 1, micro_batches, np.full(pp, micro_batches), split=False)


def _1f1b(pp: int, virtual: int, micro_batches: int) -> _Arrays:
    return _one_by_one(pp, 1, micro_batches, pp - 1 - np.arange(pp), split=False)


def _interleaved_1f1b(pp: int, virtual: int, micro_batches: int) -> _Arrays:
    return _one_by_one(pp, virtual, micro_batches, 2 * (pp - 1 - np.arange(pp)), split=False)


def _zero_bubble(pp: int, virtual: int, micro_batches: int) -> _Arrays:
    return _one_by_one(pp, virtual, micro_batches, pp - 1 - np.arange(pp), split=True)


def _one_by_one(pp: int, virtual: int, micro_batches: int, early: Ints, *, split: bool) -> _Arrays:
    """Some forwards, then one forward and one backward in turn, then the backwards that are left.

    Rounds of micro-batches go through a rank's stages: forwards from the first stage, backwards from the last.
    early: [pp]; forwards before the first backward, beyond those that bring the last stage its first micro-batch.
    split: backward k is an input's; the weights' of k comes behind input's k + rank, the rest at the end.
    """
    number = virtual * micro_batches
    a_round = micro_batches // max(1, micro_batches // pp)
    warm = np.minimum((virtual - 1) * a_round + early, number)[:, None]
    k = np.arange(number)[None, :]
    forward_at = np.where(k < warm, k, 2 * k - warm)
    backward_at = np.where(k < number - warm, warm + 2 * k + 1, number + k)
    held = (k // a_round) % virtual
    micro = k // (a_round * virtual) * a_round + k % a_round
    rank = np.arange(pp)[:, None]

    shape = (pp, number)
    at = [2 * forward_at, 2 * backward_at]
    kinds = [F, I if split else B]
    stages = [held * pp + rank, (virtual - 1 - held) * pp + rank]
    if split:
        behind = np.minimum(k + rank, number - 1)
        weight_at = 2 * np.take_along_axis(backward_at, behind, axis=1) + 1
        at.append(np.where(k + rank < number, weight_at, 4 * number + k))
        kinds.append(W)
        stages.append(stages[1])
    place = np.concatenate([np.broadcast_to(a, shape) for a in at], axis=1)
    sort = np.argsort(place, axis=1, kind="stable")
    stage = np.concatenate([np.broadcast_to(s, shape) for s in stages], axis=1)
    kind = np.repeat(np.array(kinds, dtype=np.int64), number)
    all_micro = np.tile(micro[0], len(kinds))
    total = len(kinds) * number
    return (
        np.repeat(np.arange(pp), total),
        kind[sort].ravel(),
        np.take_along_axis(stage, sort, axis=1).ravel(),
        all_micro[sort].ravel(),
        np.full(pp * total, -1, dtype=np.int64),
    )


# A pass of a V's rank: 2 * kind + which of its two stages (0: on the way down, 1: on the way back). Below, f0 is a
# forward of the first, b1 a whole backward of the second, and so on; weights of dualpipev take theirs from a queue.
_f0, _f1, _b0, _b1, _i0, _i1, _w0, _w1 = range(8)


def _zbv(pp: int, virtual: int, micro_batches: int) -> _Arrays:
    """A V for as many micro-batches as fill it at least; what is too many of them is left out."""
    most = max(2 * pp - 1, micro_batches)
    codes = []
    for rank in range(pp):
        filled = 2 * pp - rank - 1  # forwards of the first stage before the stable phase
        codes.append(
            [_f0] * (2 * (pp - rank) - 1)
            + [_f1, _f0] * rank
            + [_f1, _i1, _w1] * (pp - rank)
            + [_f0, _i0, _w0, _f1, _i1, _w1] * (most - filled)
            + [_i0, _w0, _f1, _i1, _w1] * (filled - pp)
            + [_i0, _i1] * rank
            + [_i0, _w0] * (pp - rank)
            + [_w1] * rank
            + [_w0] * rank
        )
    parts = [_v_rank(rank, pp, np.array(code), np.full(len(code), -1)) for rank, code in enumerate(codes)]
    rank_, kind, stage, micro, pair = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    wanted = micro < micro_batches
    return rank_[wanted], kind[wanted], stage[wanted], micro[wanted], pair[wanted]


def _dualpipev(pp: int, virtual: int, micro_batches: int) -> _Arrays:
    """The eight phases of DeepSeek's DualPipeV; pairs are a forward of one stage and a backward of the other."""
    parts = []
    for rank in range(pp):
        after = pp - rank - 1
        steady = micro_batches - 2 * pp + rank + 1
        begins_alone = rank == pp - 1
        ends = [_b1, _b0] * (rank + 1)  # of these the second half leaves the weights for later
        ends[rank + 1 :] = [_i1 if code == _b1 else _i0 for code in ends[rank + 1 :]]
        alone = [_f0] * (2 * after) + [_f0, _f1] * (rank + 1) + [_i1, _w0, _f1] * after
        paired = [_f0, _b1, _f1, _b0] * steady
        tail = [_b1, _f1, _b0] * after + ends + [_w0, _i0] * after + [_w0] * (rank + 1)
        code = np.array(alone + paired + tail)
        pair = np.full(len(code), -1)
        start = len(alone) + (2 if begins_alone else 0)
        pair[start : len(alone) + 4 * steady] = np.arange(len(alone) + 4 * steady - start) // 2
        first = len(alone) + 4 * steady
        for place in range(after):
            pair[first + 3 * place + 1 : first + 3 * place + 3] = 2 * steady + place
        parts.append(_v_rank(rank, pp, code, pair, queued=True))
    rank_, kind, stage, micro, pair_ = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return rank_, kind, stage, micro, pair_


def _v_rank(rank: int, pp: int, code: Ints, pair: Ints, *, queued: bool = False) -> _Arrays:
    """A rank's passes from their codes: the n-th of a kind and stage is of micro-batch n.

    queued: each weights' pass takes the oldest input's one that has none yet, of either stage.
    """
    kind, second = code // 2, code % 2
    micro = np.empty_like(code)
    counted: list[NDArray[np.bool_]] = []
    for of_second in (0, 1):
        mine = second == of_second
        counted += [mine & (kind == F), mine & ((kind == B) | (kind == I))]
        if not queued:
            counted.append(mine & (kind == W))
    for mask in counted:
        micro[mask] = np.arange(mask.sum())
    if queued:
        weights, inputs = kind == W, kind == I
        second[weights], micro[weights] = second[inputs], micro[inputs]
    stage = np.where(second == 0, rank, 2 * pp - 1 - rank)
    return np.full(len(code), rank), kind, stage, micro, pair


_MAKERS: dict[str, Callable[[int, int, int], _Arrays]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved_1f1b": _interleaved_1f1b,
    "zero_bubble": _zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
