"""Ring order: each rank's order of its peers, such that no two ranks use the same peer in the same step.

No process group is needed. A world of 8 ranks on 2 hosts, as seen by rank 6; steps from left to right:

              host 0        host 1
              0 1 2 3       4 5 6 7
                    own host        other host, starting with the peer of the same local rank
    arrivals    6   7   4   5     2   3   0   1     sources of rows: own rows, then the own host, then other hosts
    sends       6   5   4   7     2   1   0   3     destinations, in the order that matches their arrivals
    scatters    2   3   0   1     7   4   5   6     destinations of results: other hosts first, own results last

In each step the peers of all ranks are a permutation: each link carries one transfer, each rank serves one peer.

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
from moe_comm.overlap.options import at_least_one


@dataclass(frozen=True)
class Ring:
    """The ring of one rank. Hosts have consecutive ranks: host h has ranks h * L to h * L + L - 1.

    Args:
        rank: This rank.
        world: Number of ranks.
        ranks_per_host: L; None if all ranks are on one host.

    Raises:
        ConfigError: ``rank`` is out of range, or the hosts would have different numbers of ranks.
    """

    rank: int
    world: int
    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        size = self.world if self.ranks_per_host is None else self.ranks_per_host
        for name, value in (("world", self.world), ("ranks_per_host", size)):
            at_least_one(name, value)
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 0 <= self.rank < self.world:
            raise ConfigError(f"rank {self.rank!r} is outside 0..{self.world - 1}")
        if self.world % size:
            raise ConfigError(
                f"{self.world} ranks do not divide evenly over hosts of {size} ranks; a ring over hosts needs equally "
                f"many ranks on each host; use ranks_per_host=None to treat all ranks as one host"
            )

    @classmethod
    def of_hosts(cls, rank: int, hosts: Sequence[Hashable]) -> Ring:
        """Create the ring from the host name of each rank, in rank order.

        Raises:
            ConfigError: hosts have different numbers of ranks, or a host's ranks are not consecutive.
        """
        runs = [(name, len(list(run))) for name, run in groupby(hosts)]
        if len({name for name, _ in runs}) != len(runs):
            raise ConfigError(
                f"the ranks of a host must be next to each other; got hosts {list(hosts)} in rank order; number the "
                f"ranks host by host"
            )
        if len({size for _, size in runs}) > 1:
            raise ConfigError(f"a ring over hosts needs equally many ranks on each host; got {dict(runs)}")
        return cls(rank, len(hosts), runs[0][1] if runs else None)

    @property
    def host_size(self) -> int:
        """Number of ranks on one host."""
        return self.world if self.ranks_per_host is None else self.ranks_per_host

    @cached_property
    def arrivals(self) -> tuple[int, ...]:
        """Source ranks in order of arrival: this rank, the rest of its host in ring order, then the other hosts."""
        return self._walk(1)

    @cached_property
    def sends(self) -> tuple[int, ...]:
        """Destinations in order of sending: ``Ring(d, ...).arrivals[step] == rank`` for ``d = sends[step]``."""
        return self._walk(-1)

    @cached_property
    def scatters(self) -> tuple[int, ...]:
        """Destinations of results: other hosts (the slow links), then this host in ring order from rank + 1.

        Own results come last: they need no transfer and are computed while the others are in flight.
        """
        this_rank, *same_host = self.arrivals[: self.host_size]
        return (*self.arrivals[self.host_size :], *same_host, this_rank)

    @cached_property
    def distance_W(self) -> NDArray[np.int64]:
        """Step of each source rank in ``arrivals``; 0 for this rank."""
        return np.argsort(np.array(self.arrivals))

    @cached_property
    def turn_W(self) -> NDArray[np.int64]:
        """Step of each destination rank in ``scatters``; W - 1 for this rank."""
        return np.argsort(np.array(self.scatters))

    def _walk(self, sign: int) -> tuple[int, ...]:
        size = self.host_size
        hosts = self.world // size
        host, local = divmod(self.rank, size)
        return tuple(
            (host + sign * h) % hosts * size + (local + sign * step) % size
            for h in range(hosts)
            for step in range(size)
        )
