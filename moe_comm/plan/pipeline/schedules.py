"""Pipeline schedules by name: their class in torch, the placement of stages, and the numbers that they support.

    name               stages a rank   backward       micro-batches N          source
    gpipe              1               whole          any                      arXiv 1811.06965
    1f1b               1               whole          N >= pp                  PipeDream-Flush, arXiv 2006.09503
    interleaved_1f1b   2 or more       whole          N % (N // pp) == 0       arXiv 2104.04473
    zero_bubble        1 or more       input, weight  N % (N // pp) == 0       ZB1P, arXiv 2401.10241
    zbv                2               input, weight  any                      ZB-V, arXiv 2401.10241, section 6
    dualpipev          2               both           N >= 2 * pp              DeepSeek-V3, arXiv 2412.19437

(N // pp counts as at least 1.) All schedules support multiples of pp, dualpipev from 2 * pp. A backward pass in two
halves computes the input gradient at once, because the previous stage waits for it, and the weight gradients when the
rank is idle.

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
class PipelineSchedule:
    """Properties of a schedule.

    torch_name: for ``torch.distributed.pipelining.schedules.get_schedule_class``.
    style: placement of stages on ranks.
    least, most: supported stages per rank (``virtual``); None: no bound. usual: the default.
    splits_backward: weight gradients are computed separately from input gradients, by ``torch.autograd.grad``. Hooks
        that wait for the accumulation of a parameter's gradient do not run.
    pairs_passes: the schedule has pairs of a forward and a backward pass of different micro-batches.
    """

    torch_name: str
    style: Style
    least: int
    most: int | None
    usual: int
    splits_backward: bool
    pairs_passes: bool = False

    @property
    def single(self) -> bool:
        """Whether torch's class takes one stage instead of a list of stages."""
        return self.most == 1


SCHEDULES: dict[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule("GPipe", "loop", 1, 1, 1, False),
    "1f1b": PipelineSchedule("1F1B", "loop", 1, 1, 1, False),
    "interleaved_1f1b": PipelineSchedule("Interleaved1F1B", "loop", 2, None, 2, False),
    "zero_bubble": PipelineSchedule("InterleavedZeroBubble", "loop", 1, None, 1, True),
    "zbv": PipelineSchedule("ZBVZeroBubble", "v", 2, 2, 2, True),
    "dualpipev": PipelineSchedule("DualPipeV", "v", 2, 2, 2, True, pairs_passes=True),
}


def find_schedule(name: str) -> PipelineSchedule:
    """Return the schedule with this name. Raises ConfigError if there is none."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule must be one of {', '.join(get_args(ScheduleName))}; got {name!r}")
    return SCHEDULES[name]


def can_split(name: str | None, pp: int) -> bool:
    """Return whether backward passes run in two halves, unless layers are recomputed in full."""
    return pp > 1 and name is not None and find_schedule(name).splits_backward


def stages_per_rank(name: str, pp: int, virtual: int | None = None) -> int:
    """Return the number of stages per rank: ``virtual``, the schedule's default (None), or 1 without a pipeline.

    Raises:
        ConfigError: the schedule does not support this number.
    """
    schedule = find_schedule(name)
    if pp == 1:
        if virtual not in (None, 1):
            raise ConfigError(f"virtual = {virtual} stages per rank need a pipeline, but pp is 1")
        return 1
    if virtual is None:
        return schedule.usual
    if virtual < schedule.least or (schedule.most is not None and virtual > schedule.most):
        supported = f"at least {schedule.least}" if schedule.most is None else f"exactly {schedule.least}"
        raise ConfigError(f"{name} needs {supported} stages per rank; got virtual = {virtual}")
    return virtual


def check_micro_batches(name: str, pp: int, micro_batches: int, *, interleave: bool = False) -> None:
    """Raise ConfigError, with supported numbers, if the schedule does not support a number of micro-batches per step.

    Without a pipeline, all numbers are supported. With ``interleave``, micro-batches run in pairs, and a schedule
    treats a pair as one micro-batch.
    """
    find_schedule(name)
    if interleave:
        pairs, odd = divmod(micro_batches, 2)
        if odd:
            raise ConfigError(f"interleaved micro-batches run in pairs: their number must be even; got {micro_batches}")
        try:
            check_micro_batches(name, pp, pairs)
        except ConfigError as error:
            raise ConfigError(f"{micro_batches} interleaved micro-batches count as {pairs}: {error}") from None
        return
    if micro_batches < 1:
        raise ConfigError(f"a step needs at least one micro-batch; got {micro_batches}")
    if pp == 1:
        return
    if name in ("1f1b", "dualpipev"):
        least = pp if name == "1f1b" else 2 * pp
        if micro_batches < least:
            raise ConfigError(
                f"{name} over pp = {pp} ranks needs at least {least} micro-batches per step; got {micro_batches}. "
                "Raise data.micro_batches, or use gpipe or zbv"
            )
    if name in ("interleaved_1f1b", "zero_bubble"):
        rounds = max(1, micro_batches // pp)
        if micro_batches % rounds:
            raise ConfigError(
                f"{name} runs micro-batches in rounds of about pp = {pp}: {micro_batches} of them make {rounds} "
                f"rounds, which must be equal; the nearest supported numbers are {_nearest(pp, micro_batches)}"
            )


def _nearest(pp: int, micro_batches: int) -> str:
    def fits(n: int) -> bool:
        return n % max(1, n // pp) == 0

    below = next(n for n in range(micro_batches, 0, -1) if fits(n))
    above = next(n for n in range(micro_batches, 2 * micro_batches + 2 * pp) if fits(n))
    return f"{below} and {above}"
