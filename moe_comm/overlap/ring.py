"""Ring order: each rank's order of its peers, such that no two ranks use the same peer in the same step.

    rank        0           1           2           3
    arrivals    0 1 2 3     1 2 3 0     2 3 0 1     3 0 1 2     sources of rows: own rows first
    scatters    1 2 3 0     2 3 0 1     3 0 1 2     0 1 2 3     destinations of results: own results last

In each step the peers of all ranks are a permutation: each link carries one transfer, each rank serves one peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Ring:
    """The ring of ``rank`` among ``world`` ranks."""

    rank: int
    world: int

    @cached_property
    def arrivals(self) -> tuple[int, ...]:
        """Source ranks in order of arrival, from this rank on."""
        return (*range(self.rank, self.world), *range(self.rank))

    @cached_property
    def scatters(self) -> tuple[int, ...]:
        """Destinations of results, from rank + 1 on.

        Own results come last: they need no transfer and are computed while the others are in flight.
        """
        return (*self.arrivals[1:], self.rank)
