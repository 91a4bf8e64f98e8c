"""Pipeline schedules by name, and the assignment of layers to stages and of stages to ranks.

A schedule has a class in torch, a placement of stages, and numbers of stages and micro-batches that it supports:

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

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
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
    """Return the number of stages per rank: ``virtual``, the schedule's default (None), or 1 without a pipeline."""
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


@dataclass(frozen=True)
class StagePlan:
    """The layers of a model divided into ``pp * virtual`` stages, and the stages assigned to ``pp`` ranks.

    The first stage also holds the embedding, the last one the final norm, the head and the loss.

    counts: number of layers of each stage; zero is allowed.
    style: "loop": stage s is on rank s % pp. "v": rank r holds stages r and 2 * pp - 1 - r, so the first and the last
        stage share a rank.
    """

    pp: int
    virtual: int
    style: Style
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.pp < 1 or self.virtual < 1:
            raise ConfigError(f"pp and virtual must be at least 1; got {self.pp} and {self.virtual}")
        if self.style == "v" and self.virtual != 2:
            raise ConfigError(f"a V schedule needs 2 stages per rank; got virtual = {self.virtual}")
        if len(self.counts) != self.num_stages:
            raise ConfigError(
                f"stage_layers must have one count per stage, pp * virtual = {self.pp} * {self.virtual} = "
                f"{self.num_stages}; got {len(self.counts)} counts {self.counts}"
            )
        if min(self.counts) < 0:
            raise ConfigError(f"stage_layers must not be negative; got {self.counts}")

    @property
    def num_stages(self) -> int:
        return self.pp * self.virtual

    @property
    def num_layers(self) -> int:
        return sum(self.counts)

    def layers_of(self, stage: int) -> range:
        """Return the global indices of the layers of ``stage``."""
        self._check_stage(stage)
        offsets = (0, *accumulate(self.counts))
        return range(offsets[stage], offsets[stage + 1])

    def rank_of(self, stage: int) -> int:
        """Return the pipeline coordinate of the rank that holds ``stage``."""
        self._check_stage(stage)
        if self.style == "v":
            return min(stage, self.num_stages - 1 - stage)
        return stage % self.pp

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of the rank with pipeline coordinate ``rank``, in order."""
        if not 0 <= rank < self.pp:
            raise ConfigError(f"pipeline rank {rank} is outside 0..{self.pp - 1}")
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def is_first(self, stage: int) -> bool:
        """Return whether ``stage`` holds the embedding."""
        return stage == 0

    def is_last(self, stage: int) -> bool:
        """Return whether ``stage`` holds the head."""
        return stage == self.num_stages - 1

    @property
    def last_rank(self) -> int:
        """Pipeline coordinate of the rank that holds the head and computes the loss."""
        return self.rank_of(self.num_stages - 1)

    def __str__(self) -> str:
        lines = []
        for rank in range(self.pp):
            held = []
            for stage in self.stages_of(rank):
                layers = self.layers_of(stage)
                parts = ["embedding"] if self.is_first(stage) else []
                parts += [f"layers {layers.start}..{layers.stop - 1}" if layers else "no layers"]
                parts += ["head"] if self.is_last(stage) else []
                held.append(f"stage {stage} ({', '.join(parts)})")
            lines.append(f"pp {rank}: {', '.join(held)}")
        return "\n".join(lines)

    def _check_stage(self, stage: int) -> None:
        if not 0 <= stage < self.num_stages:
            raise ConfigError(f"stage {stage} is outside 0..{self.num_stages - 1}")


def plan_stages(
    num_layers: int,
    pp: int = 1,
    schedule: str = "1f1b",
    *,
    virtual: int | None = None,
    stage_layers: Sequence[int] | None = None,
) -> StagePlan:
    """Divide ``num_layers`` layers into the stages of a schedule on ``pp`` ranks.

    Args:
        schedule: a name in ``SCHEDULES``.
        virtual: stages per rank. None: the schedule's default.
        stage_layers: number of layers of each stage, instead of an even division. Zeros are allowed.
    """
    per_rank = stages_per_rank(schedule, pp, virtual)
    style: Style = find_schedule(schedule).style if pp > 1 else "loop"
    if num_layers < 1:
        raise ConfigError(f"a model needs at least one layer; got {num_layers}")
    if stage_layers is not None:
        plan = StagePlan(pp, per_rank, style, tuple(stage_layers))
        if plan.num_layers != num_layers:
            raise ConfigError(
                f"stage_layers {plan.counts} add up to {plan.num_layers}, but the model has {num_layers} layers"
            )
        return plan
    stages = pp * per_rank
    if num_layers < stages:
        raise ConfigError(
            f"{num_layers} layers cannot fill {stages} stages; stage {num_layers} would be empty. Use fewer stages "
            "(pp or virtual), or allow empty stages with stage_layers"
        )
    base, extra = divmod(num_layers, stages)
    return StagePlan(pp, per_rank, style, tuple(base + (stage < extra) for stage in range(stages)))
