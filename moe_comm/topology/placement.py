"""Rank arithmetic: which rank owns which experts. Needs no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from moe_comm.errors import ConfigError


@dataclass(frozen=True)
class ExpertPlacement:
    """Contiguous ranges of global expert ids, one per rank of the expert-parallel group.

    ``experts_per_rank[r]`` is how many experts rank ``r`` holds; zero is allowed, and sizes may differ:

        7 experts on 3 ranks, balanced:   rank 0: 0 1 2   rank 1: 3 4   rank 2: 5 6
    """

    experts_per_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.experts_per_rank or min(self.experts_per_rank) < 0 or sum(self.experts_per_rank) < 1:
            raise ConfigError(
                f"experts_per_rank must name at least one rank and one expert, and no negative count; "
                f"got {self.experts_per_rank}"
            )

    @classmethod
    def balanced(cls, num_experts: int, world: int) -> ExpertPlacement:
        """Spread ``num_experts`` over ``world`` ranks; the first ``num_experts % world`` ranks hold one more."""
        if num_experts < 1 or world < 1:
            raise ConfigError(f"need at least one expert and one rank; got num_experts={num_experts}, world={world}")
        base, extra = divmod(num_experts, world)
        return cls(tuple(base + (r < extra) for r in range(world)))

    @classmethod
    def of(cls, num_experts: int, world: int, experts_per_rank: Sequence[int] | None = None) -> ExpertPlacement:
        """Balanced, or the given sizes after checking that they fit ``num_experts`` and ``world``."""
        if experts_per_rank is None:
            return cls.balanced(num_experts, world)
        if len(experts_per_rank) != world or sum(experts_per_rank) != num_experts:
            raise ConfigError(
                f"experts_per_rank must hold {world} counts that add up to {num_experts}; "
                f"got {list(experts_per_rank)} ({len(experts_per_rank)} counts, sum {sum(experts_per_rank)})"
            )
        return cls(tuple(experts_per_rank))

    @property
    def num_experts(self) -> int:
        return sum(self.experts_per_rank)

    @property
    def world(self) -> int:
        return len(self.experts_per_rank)

    @property
    def offsets(self) -> tuple[int, ...]:
        """``world + 1`` ids; rank ``r`` owns ``range(offsets[r], offsets[r + 1])``."""
        return (0, *accumulate(self.experts_per_rank))

    def sliced(self, parts: int) -> ExpertPlacement:
        """Where slices of experts stand when ``parts`` ranks, next to each other, share what one rank here holds.

        A slice counts as an expert of its own. Three experts on two ranks, in two parts each:

            rank             0        1        2        3          4 = 2 * 2 ranks
            slices         0 1      2 3        4        5          ids in the result
            of experts     0a 1a    0b 1b      2a       2b         first half a, second half b
        """
        return ExpertPlacement(tuple(count for count in self.experts_per_rank for _ in range(parts)))

    def slice_ids(self, parts: int) -> list[list[int]]:
        """For each expert, the ids of its ``parts`` slices in ``sliced(parts)``."""
        ids = []
        for start, count in zip(self.offsets, self.experts_per_rank, strict=False):
            ids += [[parts * start + part * count + e for part in range(parts)] for e in range(count)]
        return ids

    def local_range(self, rank: int) -> range:
        """Global ids of the experts that ``rank`` holds."""
        offsets = self.offsets
        return range(offsets[rank], offsets[rank + 1])

    def owner(self, expert: int) -> int:
        """The rank that holds ``expert``."""
        if not 0 <= expert < self.num_experts:
            raise ConfigError(f"expert id {expert} is outside 0..{self.num_experts - 1}")
        return next(r for r in range(self.world) if expert < self.offsets[r + 1])
