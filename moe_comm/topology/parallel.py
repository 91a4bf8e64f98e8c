"""How attention and experts share the same ranks (MoE Parallel Folding, arXiv 2504.14960). Needs no process group.

Every rank has a place on two grids over one world. Fastest axis first:

    attention   tp, cp, dp, pp        expert   etp, ep, edp, pp        tp * cp * dp == etp * ep * edp

    8 ranks, tp 2, cp 2, dp 2 | ep 8           8 ranks, pp 2, tp 2, dp 2 | ep 2, etp 2
    rank      0 1 2 3 4 5 6 7                  rank      0 1 2 3 4 5 6 7
    tp        0 1 0 1 0 1 0 1                  tp        0 1 0 1 0 1 0 1
    cp        0 0 1 1 0 0 1 1                  dp        0 0 1 1 0 0 1 1
    dp        0 0 0 0 1 1 1 1                  etp       0 1 0 1 0 1 0 1
    ep        0 1 2 3 4 5 6 7                  ep        0 0 1 1 0 0 1 1
                                               pp        0 0 0 0 1 1 1 1

pp is outermost on both sides, so a pipeline stage is the same set of ranks for both. (The paper's listing puts it
second; the two sides' pipeline groups then coincide only where tp * cp == ep * etp.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from moe_comm.errors import ConfigError

ATTENTION_AXES = ("tp", "cp", "dp", "pp")
"""Fastest first."""
EXPERT_AXES = ("etp", "ep", "edp", "pp")
"""Fastest first."""


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism. ``edp``, the number of copies of each expert, follows from the others.

    tp: tensor parallel, with sequence parallelism. cp: context parallel. dp: data parallel. pp: pipeline stages.
    ep: ranks that share one set of experts. etp: ranks that share one expert.
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
        """Fit ``world`` ranks: ``dp`` None takes what tp, cp and pp leave, ``ep`` None what etp leaves of a stage.

        Raises:
            ConfigError: the degrees do not multiply to ``world``, or do not divide each other.
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

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world(self) -> int:
        return self.stage * self.pp

    @property
    def edp(self) -> int:
        """Copies of each expert."""
        return self.stage // (self.ep * self.etp)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Size of each of the seven axes."""
        return {axis: getattr(self, axis) for axis in dict.fromkeys((*ATTENTION_AXES, *EXPERT_AXES))}

    def size(self, *axes: str) -> int:
        """Ranks in a group over ``axes``."""
        return math.prod(self.sizes[axis] for axis in axes)

    def place(self, rank: int) -> Mapping[str, int]:
        """Coordinate of ``rank`` on each of the seven axes."""
        if not 0 <= rank < self.world:
            raise ConfigError(f"rank {rank} is outside 0..{self.world - 1}")
        place = {}
        for side in (ATTENTION_AXES, EXPERT_AXES):
            rest = rank
            for axis in side:
                rest, place[axis] = divmod(rest, self.sizes[axis])
        return place

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """The world cut into groups whose ranks differ only on ``axes`` (all of one side), in order of rank.

        Position within a group follows the coordinates on ``axes``, fastest axis first.
        """
        side = _side(axes)
        offsets = self._combinations(side, [axis for axis in side if axis in axes])
        firsts = self._combinations(side, [axis for axis in side if axis not in axes])
        return [tuple(first + offset for offset in offsets) for first in firsts]

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The one of ``groups(*axes)`` that ``rank`` is in, computed alone."""
        side = _side(axes)
        place, strides = self.place(rank), self._strides(side)
        first = rank - sum(place[axis] * strides[axis] for axis in set(axes))
        return tuple(first + offset for offset in self._combinations(side, [axis for axis in side if axis in axes]))

    def _strides(self, side: tuple[str, ...]) -> Mapping[str, int]:
        """How far apart neighbours on each axis are."""
        strides, stride = {}, 1
        for axis in side:
            strides[axis] = stride
            stride *= self.sizes[axis]
        return strides

    def _combinations(self, side: tuple[str, ...], axes: list[str]) -> list[int]:
        """The ranks at 0 on all axes of ``side`` but ``axes``, which are in its order; ascending."""
        strides = self._strides(side)
        ranks = [0]
        for axis in axes:
            steps = range(0, self.sizes[axis] * strides[axis], strides[axis])
            ranks = [step + rank for step in steps for rank in ranks]
        return ranks

    def __str__(self) -> str:
        shown = [f"{axis} {size}" for axis, size in self.sizes.items() if size > 1]
        return ", ".join(shown) or "one rank"


def _side(axes: tuple[str, ...]) -> tuple[str, ...]:
    for side in (ATTENTION_AXES, EXPERT_AXES):
        if set(axes) <= set(side):
            return side
    raise ConfigError(f"a group is over axes of one side, {ATTENTION_AXES} or {EXPERT_AXES}; got {axes}")
