"""Assignment of layers to pipeline stages and of stages to ranks. Needs no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from moe_comm.errors import ConfigError
from moe_comm.plan.pipeline.schedules import Style, find_schedule, stages_per_rank


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
    embedding_layers: int = 0,
    head_layers: int = 0,
) -> StagePlan:
    """Divide ``num_layers`` layers into the stages of a schedule on ``pp`` ranks.

    Args:
        num_layers: layers of the model.
        pp: pipeline degree.
        schedule: a name in ``SCHEDULES``.
        virtual: stages per rank. None: the schedule's default.
        stage_layers: number of layers of each stage, instead of an even division. Zeros are allowed.
        embedding_layers, head_layers: weight of the embedding, and of the head with the loss, as a number of layers in
            the even division. The first and the last stage get fewer layers accordingly.

    Raises:
        ConfigError: the numbers are inconsistent.
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
    if embedding_layers < 0 or head_layers < 0:
        raise ConfigError(
            f"embedding_layers and head_layers must not be negative; got {embedding_layers} and {head_layers}"
        )
    stages = pp * per_rank
    return StagePlan(pp, per_rank, style, _even_counts(num_layers, stages, embedding_layers, head_layers))


def _even_counts(num_layers: int, stages: int, embedding_layers: int, head_layers: int) -> tuple[int, ...]:
    """Return the layers of each stage so that the largest is as small as possible. Earlier stages get the remainder."""
    weight = [0] * stages
    weight[0] += embedding_layers
    weight[-1] += head_layers
    counts = [0] * stages
    for _ in range(num_layers):
        lightest = min(range(stages), key=lambda stage: counts[stage] + weight[stage])
        counts[lightest] += 1
    empty = [stage for stage in range(stages) if not counts[stage] + weight[stage]]
    if empty:
        raise ConfigError(
            f"{num_layers} layers cannot fill {stages} stages; stage {empty[0]} would be empty. Use fewer stages "
            "(pp or virtual), or allow empty stages with stage_layers"
        )
    return tuple(counts)
