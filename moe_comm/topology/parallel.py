"""How attention and experts share the same ranks (MoE Parallel Folding, arXiv 2504.14960). Needs no process group.

Each rank has coordinates on two grids over the same world. Fastest axis first:

    attention   tp, cp, dp, pp        expert   etp, ep, edp, pp        tp * cp * dp == etp * ep * edp

    8 ranks, tp 2, cp 2, dp 2 | ep 8           8 ranks, pp 2, tp 2, dp 2 | ep 2, etp 2
    rank      0 1 2 3 4 5 6 7                  rank      0 1 2 3 4 5 6 7
    tp        0 1 0 1 0 1 0 1                  tp        0 1 0 1 0 1 0 1
    cp        0 0 1 1 0 0 1 1                  dp        0 0 1 1 0 0 1 1
    dp        0 0 0 0 1 1 1 1                  etp       0 1 0 1 0 1 0 1
    ep        0 1 2 3 4 5 6 7                  ep        0 0 1 1 0 0 1 1
                                               pp        0 0 0 0 1 1 1 1

pp is outermost on both grids, so a pipeline stage is the same set of ranks on both. (In the paper pp is the second axis
from the outside. Then the pipeline groups of the two grids are equal only if tp * cp == ep * etp.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

from moe_comm.errors import ConfigError

ATTENTION_AXES = ("tp", "cp", "dp", "pp")
"""Axes of the attention grid, fastest first."""
EXPERT_AXES = ("etp", "ep", "edp", "pp")
"""Axes of the expert grid, fastest first."""
ShardingMode = Literal["replicate", "zero1", "fsdp"]
"""How the ranks that hold the same parameters share weights, gradients and optimizer state."""


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism. ``edp``, the number of replicas of each expert, follows from the other degrees.

    Args:
        tp: tensor parallel, with sequence parallelism.
        cp: context parallel.
        dp: data parallel.
        pp: pipeline stages.
        ep: expert parallel: ranks among which the experts of a layer are divided.
        etp: expert tensor parallel: ranks among which each expert is divided.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for axis, size in asdict(self).items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{axis} must be a whole number of at least 1; got {size!r}")
        if self.stage % (self.etp * self.ep):
            raise ConfigError(
                f"etp * ep = {self.etp} * {self.ep} = {self.etp * self.ep} must divide the ranks of a pipeline stage, "
                f"tp * cp * dp = {self.tp} * {self.cp} * {self.dp} = {self.stage}"
            )

    @classmethod
    def of(
        cls,
        world: int,
        *,
        tp: int = 1,
        cp: int = 1,
        dp: int | None = None,
        pp: int = 1,
        ep: int | None = None,
        etp: int = 1,
    ) -> ParallelConfig:
        """Return the configuration for ``world`` ranks.

        Args:
            world: number of ranks.
            tp, cp, pp, etp: degrees.
            dp: None: ``world`` divided by tp * cp * pp.
            ep: None: the ranks of a pipeline stage divided by etp.

        Raises:
            ConfigError: the product of the degrees is not ``world``, or a degree does not divide the ranks it applies
                to.
        """
        model = tp * cp * pp
        if dp is None:
            if model < 1 or world % model:
                raise ConfigError(f"tp * cp * pp = {tp} * {cp} * {pp} = {model} must divide the {world} ranks")
            dp = world // model
        if model * dp != world:
            raise ConfigError(
                f"tp * cp * dp * pp = {tp} * {cp} * {dp} * {pp} = {model * dp}, but there are {world} ranks"
            )
        if ep is None:
            if etp < 1 or (tp * cp * dp) % etp:
                raise ConfigError(f"etp = {etp} must divide the ranks of a pipeline stage, {tp * cp * dp}")
            ep = tp * cp * dp // etp
        return cls(tp, cp, dp, pp, ep, etp)

    def check_replicas(self, replicas: int) -> None:
        """Check that FSDP can divide the ranks that share parameters into ``replicas`` blocks.

        Raises:
            ConfigError: ``replicas`` does not divide cp x dp, or edp unless that is 1.
        """
        sizes = {"cp x dp": self.size("cp", "dp"), "edp": self.edp}
        if replicas < 1 or sizes["cp x dp"] % replicas or (self.edp > 1 and self.edp % replicas):
            raise ConfigError(
                f"replicas of FSDP's shards (dp_replicate) must divide cp x dp, and edp unless it is 1; "
                f"got {replicas} and {sizes}"
            )

    @property
    def stage(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world(self) -> int:
        """Number of ranks of the mapping."""
        return self.stage * self.pp

    @property
    def edp(self) -> int:
        """Number of replicas of each expert."""
        return self.stage // (self.ep * self.etp)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Size of each of the seven axes."""
        return {axis: getattr(self, axis) for axis in dict.fromkeys((*ATTENTION_AXES, *EXPERT_AXES))}

    def size(self, *axes: str) -> int:
        """Return the number of ranks in a group over ``axes``."""
        return math.prod(self.sizes[axis] for axis in axes)

    def place(self, rank: int) -> Mapping[str, int]:
        """Return the coordinate of ``rank`` on each of the seven axes.

        Raises:
            ConfigError: ``rank`` is out of range.
        """
        if not 0 <= rank < self.world:
            raise ConfigError(f"rank {rank} is outside 0..{self.world - 1}")
        place = {}
        for grid in (ATTENTION_AXES, EXPERT_AXES):
            rest = rank
            for axis in grid:
                rest, place[axis] = divmod(rest, self.sizes[axis])
        return place

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return all groups whose ranks differ only on ``axes``, in order of their first rank.

        Ranks within a group are ordered by their coordinates on ``axes``, fastest axis first.

        Args:
            axes: axes of one grid.
        """
        others = [axis for axis in _grid_of(axes) if axis not in axes]
        offsets = self.group_of(0, *axes)
        return [tuple(first + offset for offset in offsets) for first in self.group_of(0, *others)]

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the group of ``groups(*axes)`` that contains ``rank``, without computing the others."""
        place, ranks, stride = self.place(rank), [0], 1
        for axis in _grid_of(axes):
            steps = range(self.sizes[axis]) if axis in axes else (place[axis],)
            ranks = [step * stride + one for step in steps for one in ranks]
            stride *= self.sizes[axis]
        return tuple(ranks)

    def __str__(self) -> str:
        shown = [f"{axis} {size}" for axis, size in self.sizes.items() if size > 1]
        return ", ".join(shown) or "one rank"


def _grid_of(axes: tuple[str, ...]) -> tuple[str, ...]:
    for grid in (ATTENTION_AXES, EXPERT_AXES):
        if set(axes) <= set(grid):
            return grid
    raise ConfigError(f"the axes of a group must all be in {ATTENTION_AXES} or all in {EXPERT_AXES}; got {axes}")
