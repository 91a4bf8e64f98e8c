"""Buddy ranks for state replicas: each rank's buddy is on another host and shares as few parallel groups as possible.

A replica must survive the failure of its owner (Gemini, SOSP 2023, places replicas on other machines). Failures are
correlated within a host, and often within a parallel group, whose ranks share switches or are replaced together
(ByteRobust, arXiv 2509.16293, section 6.3).

    hosts      A A A A  B B B B
    ranks      0 1 2 3  4 5 6 7
    tp 2       0 1 0 1  0 1 0 1
    dp 4       0 0 1 1  2 2 3 3

Rank 0 shares groups with 1 (tp) and with 2, 4, 6 (dp), so its buddy is 5 or 7.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moe_comm.errors import ConfigError
from moe_comm.topology.parallel import ParallelConfig


def buddies(config: ParallelConfig, hosts: Sequence[object]) -> tuple[int, ...] | None:
    """Return the rank that stores the replica of each rank, or None if all ranks are on one host.

    A replica is always on another host. The replicas are distributed evenly: the result is a permutation unless one
    host has more than half of all ranks. Among these assignments, the result minimizes the largest number of groups
    (over single axes: tp, cp, dp, pp, etp, ep, edp) that a rank shares with its buddy. The result is deterministic.

    Args:
        hosts: the host of each rank, as comparable and hashable values.
    """
    world = config.world
    if len(hosts) != world:
        raise ConfigError(f"buddies need the host of each of the {world} ranks; got {len(hosts)}")
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    if len(numbers) == 1:
        return None
    host_W = np.array([numbers[host] for host in hosts])
    largest = int(np.bincount(host_W).max())
    copies = max(1, -(-largest // (world - largest)))
    for shared in range(len(config.sizes) + 1):
        if (buddy_of := _match(config, host_W, shared, copies)) is not None:
            return buddy_of
    raise AssertionError("other hosts have room for the replicas of each host")


def _match(config: ParallelConfig, host_W: npt.NDArray[np.int64], shared: int, copies: int) -> tuple[int, ...] | None:
    """Assign a buddy to each rank, or return None if no assignment exists.

    A rank and its buddy share at most ``shared`` groups, and each buddy stores up to ``copies`` replicas. Uses Kuhn's
    algorithm; regular mappings rarely need an augmenting path.
    """
    world = config.world
    buddy_of: dict[int, int] = {}
    stored: list[list[int]] = [[] for _ in range(world)]  # by buddy, the ranks whose replicas it stores
    for rank in range(world):
        # Breadth-first search over alternating paths: rank, allowed buddy, a rank that buddy already stores, ...
        reached_from: dict[int, int] = {}
        free, queue = None, [rank]
        for owner in queue:
            shared_W = np.zeros(world, dtype=np.int64)
            for axis in config.sizes:
                shared_W[list(config.group_of(owner, axis))] += 1
            allowed_W = (host_W != host_W[owner]) & (shared_W <= shared)
            # Start the search after the owner, so that neighbouring ranks try different buddies first.
            order = ((np.flatnonzero(np.roll(allowed_W, -owner - 1)) + owner + 1) % world).tolist()
            free = next((buddy for buddy in order if len(stored[buddy]) < copies), None)
            if free is not None:
                reached_from[free] = owner
                break
            for buddy in order:
                if buddy not in reached_from:
                    reached_from[buddy] = owner
                    queue += stored[buddy]
        if free is None:
            return None
        while free is not None:  # augment: each rank on the path moves to the next buddy
            owner = reached_from[free]
            before = buddy_of.get(owner)
            if before is not None:
                stored[before].remove(owner)
            stored[free].append(owner)
            buddy_of[owner], free = free, before
    return tuple(buddy_of[rank] for rank in range(world))
