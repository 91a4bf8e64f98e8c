"""The pipeline schedules by name: what each is in torch, where it puts stages, and which numbers it can run with.

    name               stages a rank   backward       micro-batches N          source
    gpipe              1               whole          any                      arXiv 1811.06965
    1f1b               1               whole          N >= pp                  PipeDream-Flush, arXiv 2006.09503
    interleaved_1f1b   2 or more       whole          N % (N // pp) == 0       arXiv 2104.04473
    zero_bubble        1 or more       input, weight  N % (N // pp) == 0       ZB1P, arXiv 2401.10241
    zbv                2               input, weight  any                      ZB-V, arXiv 2401.10241, section 6
    dualpipev          2               both           N >= 2 * pp              DeepSeek-V3, arXiv 2412.19437

(N // pp counts as at least 1.) With whole batches of N that are a multiple of pp all of them run, dualpipev from
2 * pp on. A backward in two halves computes the input's gradient at once, since the stage before waits for it, and
the weights' when there is nothing else to do.

    loop, 2 ranks, 4 stages          v, 2 ranks, 4 stages
    rank 0:  stage 0    stage 2      rank 0:  stage 0              stage 3
    rank 1:    stage 1    stage 3    rank 1:    stage 1   stage 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moe_comm.errors import ConfigError

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"]
Style = Literal["loop", "v"]


@dataclass(frozen=True)
class Schedule:
    """What is fixed about one schedule.

    torch_name: for ``torch.distributed.pipelining.schedules.get_schedule_class``.
    style: how stages go round the ranks.
    least, most: stages a rank (``virtual``); None: no bound. usual: where the caller does not say.
    splits_backward: weight gradients are computed apart from input gradients, by ``torch.autograd.grad``, so hooks
        that wait for a parameter's gradient to be accumulated do not run.
    """

    torch_name: str
    style: Style
    least: int
    most: int | None
    usual: int
    splits_backward: bool

    @property
    def single(self) -> bool:
        """Whether torch's class takes one stage and not a list of them."""
        return self.most == 1


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule("GPipe", "loop", 1, 1, 1, False),
    "1f1b": Schedule("1F1B", "loop", 1, 1, 1, False),
    "interleaved_1f1b": Schedule("Interleaved1F1B", "loop", 2, None, 2, False),
    "zero_bubble": Schedule("InterleavedZeroBubble", "loop", 1, None, 1, True),
    "zbv": Schedule("ZBVZeroBubble", "v", 2, 2, 2, True),
    "dualpipev": Schedule("DualPipeV", "v", 2, 2, 2, True),
}


def find_schedule(name: str) -> Schedule:
    """The schedule called ``name``.

    Raises:
        ConfigError: there is none.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"schedule must be one of {', '.join(get_args(ScheduleName))}; got {name!r}")
    return SCHEDULES[name]


def can_split(name: str | None, pp: int) -> bool:
    """Whether backward passes run in two halves, unless layers are recomputed in full."""
    return pp > 1 and name is not None and find_schedule(name).splits_backward


def stages_per_rank(name: str, pp: int, virtual: int | None = None) -> int:
    """How many stages each rank holds: ``virtual``, or what is usual for the schedule; 1 without pipeline.

    Raises:
        ConfigError: the schedule cannot run with that many.
    """
    schedule = find_schedule(name)
    if pp == 1:
        if virtual not in (None, 1):
            raise ConfigError(f"virtual = {virtual} stages a rank need a pipeline; pp is 1")
        return 1
    if virtual is None:
        return schedule.usual
    if virtual < schedule.least or (schedule.most is not None and virtual > schedule.most):
        wanted = f"at least {schedule.least}" if schedule.most is None else f"exactly {schedule.least}"
        raise ConfigError(f"{name} needs {wanted} stages a rank; got virtual = {virtual}")
    return virtual


def check_micro_batches(name: str, pp: int, micro_batches: int) -> None:
    """Refuse a number of micro-batches per step that the schedule cannot run. Without pipeline any will do.

    Raises:
        ConfigError: says which numbers would do.
    """
    find_schedule(name)
    if micro_batches < 1:
        raise ConfigError(f"a step needs at least one micro-batch; got {micro_batches}")
    if pp == 1:
        return
    if name in ("1f1b", "dualpipev"):
        least = pp if name == "1f1b" else 2 * pp
        if micro_batches < least:
            raise ConfigError(
                f"{name} over pp = {pp} ranks needs at least {least} micro-batches a step; got {micro_batches}. "
                "Raise data.micro_batches, or use gpipe or zbv"
            )
    if name in ("interleaved_1f1b", "zero_bubble"):
        rounds = max(1, micro_batches // pp)
        if micro_batches % rounds:
            raise ConfigError(
                f"{name} runs micro-batches in rounds of about pp = {pp}: {micro_batches} of them make {rounds} "
                f"rounds, which must be equal; the nearest numbers that are: {_nearest(pp, micro_batches)}"
            )


def _nearest(pp: int, micro_batches: int) -> str:
    def fits(n: int) -> bool:
        return n % max(1, n // pp) == 0

    below = next(n for n in range(micro_batches, 0, -1) if fits(n))
    above = next(n for n in range(micro_batches, 2 * micro_batches + 2 * pp) if fits(n))
    return f"{below} and {above}"
