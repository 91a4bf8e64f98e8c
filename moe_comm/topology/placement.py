"""Expert placement: the experts that each rank holds. Needs no process group."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from moe_comm.errors import ConfigError


@dataclass(frozen=True)
class ExpertPlacement:
    """Contiguous ranges of global expert ids, one per rank of the expert-parallel group.

        7 experts on 3 ranks, balanced:   rank 0: 0 1 2   rank 1: 3 4   rank 2: 5 6

    Args:
        experts_per_rank: number of experts of each rank; zero is allowed, and the numbers may differ.
    """

    experts_per_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.experts_per_rank or min(self.experts_per_rank) < 0 or sum(self.experts_per_rank) < 1:
            raise ConfigError(
                "experts_per_rank must have at least one rank, at least one expert and no negative count; "
                f"got {self.experts_per_rank}"
            )

    @classmethod
    def balanced(cls, num_experts: int, world: int) -> ExpertPlacement:
        """Divide ``num_experts`` evenly over ``world`` ranks; the first ``num_experts % world`` ranks hold one more."""
        if num_experts < 1 or world < 1:
            raise ConfigError(f"num_experts and world must be at least 1; got num_experts={num_experts}, world={world}")
        base, extra = divmod(num_experts, world)
        return cls(tuple(base + (r < extra) for r in range(world)))

    @classmethod
    def of(cls, num_experts: int, world: int, experts_per_rank: Sequence[int] | None = None) -> ExpertPlacement:
        """Return the placement with ``experts_per_rank``, or a balanced one if that is None.

        Raises:
            ConfigError: ``experts_per_rank`` does not fit ``num_experts`` and ``world``.
        """
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
        """Number of experts of all ranks."""
        return sum(self.experts_per_rank)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.experts_per_rank)

    @property
    def offsets(self) -> tuple[int, ...]:
        """``world + 1`` ids; rank ``r`` holds ``range(offsets[r], offsets[r + 1])``."""
        return (0, *accumulate(self.experts_per_rank))

    def sliced(self, parts: int) -> ExpertPlacement:
        """Return the placement of expert slices, where ``parts`` adjacent ranks divide the experts of one rank of this
        placement.

        Each slice has an id of its own. Three experts on two ranks, in two slices each:

            rank             0        1        2        3          4 = 2 * 2 ranks
            slice ids        0 1      2 3      4        5
            slices           0a 1a    0b 1b    2a       2b         first half a, second half b
        """
        return ExpertPlacement(tuple(count for count in self.experts_per_rank for _ in range(parts)))

    def slice_ids(self, parts: int) -> list[list[int]]:
        """Return the ids in ``sliced(parts)`` of the ``parts`` slices of each expert."""
        ids = []
        for start, count in zip(self.offsets, self.experts_per_rank, strict=False):
            ids += [[parts * start + part * count + e for part in range(parts)] for e in range(count)]
        return ids

    def local_range(self, rank: int) -> range:
        """Return the global ids of the experts that ``rank`` holds."""
        offsets = self.offsets
        return range(offsets[rank], offsets[rank + 1])

    def owner(self, expert: int) -> int:
        """Return the rank that holds ``expert``."""
        if not 0 <= expert < self.num_experts:
            raise ConfigError(f"expert id {expert} is outside 0..{self.num_experts - 1}")
        return bisect_right(self.offsets, expert) - 1
