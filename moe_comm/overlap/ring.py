"""Who is served when: each rank's order of its peers, such that no two ranks ever meet at the same one.

Needs no process group. A world of 8 ranks on 2 hosts, as rank 6 sees it; steps go from left to right:

              host 0        host 1
              0 1 2 3       4 5 6 7
                    own host        other host, from the peer of the same place
    arrivals    6   7   4   5     2   3   0   1     from whom rows come: near ones first, own ones are there already
    sends       6   5   4   7     2   1   0   3     to whom to send, so that they arrive there in that order
    scatters    2   3   0   1     7   4   5   6     to whom results go: far ones first, own ones need no way at all

In every step the peers of all ranks are a permutation: each link carries one transfer, each rank serves one peer.

    arrivals, step 1:   0 ◀ 1   1 ◀ 2   2 ◀ 3   3 ◀ 0     4 ◀ 5   5 ◀ 6   6 ◀ 7   7 ◀ 4
    arrivals, step 5:   0 ◀ 5   1 ◀ 6   2 ◀ 7   3 ◀ 4     4 ◀ 1   5 ◀ 2   6 ◀ 3   7 ◀ 0
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from moe_comm.errors import ConfigError


@dataclass(frozen=True)
class Ring:
    """A rank's place among ranks that stand on hosts in order: host h has ranks h * L to h * L + L - 1.

    Args:
        ranks_per_host: L; None where all ranks are on one host.

    Raises:
        ConfigError: no such rank, or the hosts would be of unequal size.
    """

    rank: int
    world: int
    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        size = self.world if self.ranks_per_host is None else self.ranks_per_host
        for name, value in (("world", self.world), ("ranks_per_host", size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1; got {value!r}")
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 0 <= self.rank < self.world:
            raise ConfigError(f"rank {self.rank!r} is outside 0..{self.world - 1}")
        if self.world % size:
            raise ConfigError(
                f"{self.world} ranks cannot stand on hosts of {size} ranks each: a ring over hosts needs hosts of "
                f"equal size; use as many ranks on every host, or ranks_per_host=None to treat all as one host"
            )

    @classmethod
    def of_hosts(cls, rank: int, hosts: Sequence[Hashable]) -> Ring:
        """From the name of every rank's host, in order of rank.

        Raises:
            ConfigError: hosts of unequal size, or a host's ranks are not next to each other.
        """
        runs = [(name, len(list(run))) for name, run in groupby(hosts)]
        if len({name for name, _ in runs}) != len(runs):
            raise ConfigError(
                f"the ranks of a host must be next to each other; got hosts {list(hosts)} in order of rank; start "
                f"ranks host after host"
            )
        if len({size for _, size in runs}) > 1:
            raise ConfigError(f"a ring over hosts needs as many ranks on every host; got {dict(runs)}")
        return cls(rank, len(hosts), runs[0][1] if runs else None)

    @property
    def host_size(self) -> int:
        """Ranks of one host."""
        return self.world if self.ranks_per_host is None else self.ranks_per_host

    @cached_property
    def arrivals(self) -> tuple[int, ...]:
        """Source ranks in order of arrival: own, the rest of the own host round the ring, then host after host."""
        return self._walk(1)

    @cached_property
    def sends(self) -> tuple[int, ...]:
        """Destinations in the order of sending: ``Ring(d, ...).arrivals[step] == rank`` for ``d = sends[step]``."""
        return self._walk(-1)

    @cached_property
    def scatters(self) -> tuple[int, ...]:
        """Destinations of results: the other hosts, which are slow to reach, then rank + 1 and on round the own host.

        Own results come last, for they are in place once computed and hide what still travels.
        """
        own, *near = self.arrivals[: self.host_size]
        return (*self.arrivals[self.host_size :], *near, own)

    @cached_property
    def distance_W(self) -> NDArray[np.int64]:
        """For each source rank its step in ``arrivals``; 0 for the own."""
        return np.argsort(np.array(self.arrivals))

    @cached_property
    def turn_W(self) -> NDArray[np.int64]:
        """For each destination rank its step in ``scatters``; W - 1 for the own."""
        return np.argsort(np.array(self.scatters))

    def _walk(self, way: int) -> tuple[int, ...]:
        size = self.host_size
        hosts = self.world // size
        host, place = divmod(self.rank, size)
        return tuple(
            (host + way * h) % hosts * size + (place + way * step) % size for h in range(hosts) for step in range(size)
        )


def ring_order(rank: int, world: int, ranks_per_host: int | None = None) -> tuple[int, ...]:
    """Source ranks in order of arrival at ``rank``; see ``Ring.arrivals``. Rank 6 of 2 x 4: 6 7 4 5 2 3 0 1."""
    return Ring(rank, world, ranks_per_host).arrivals
