"""Which rank keeps a copy of whose state: one on another host that shares no parallel group with the owner.

hosts      A A A A  B B B B          what fails together, so that a copy there would be lost with the original:
ranks      0 1 2 3  4 5 6 7          a host; and often the ranks of a group, which share switches, or are replaced
tp 2       0 1 0 1  0 1 0 1          together when one of them fails (ByteRobust, arXiv 2509.16293, section 6.3;
dp 4       0 0 1 1  2 2 3 3          Gemini, SOSP 2023, places copies on other machines)

rank 0 is in groups with 1 (tp), 2, 4, 6 (dp): kept by 5 or 7
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_comm.errors import ConfigError
from moe_comm.topology.parallel import ATTENTION_AXES, EXPERT_AXES, ParallelConfig

AXES = tuple(dict.fromkeys((*ATTENTION_AXES, *EXPERT_AXES)))


def buddies(config: ParallelConfig, hosts: Sequence[object]) -> tuple[int, ...] | None:
    """For every rank the one that keeps its copy; None on a single host, where a copy would be lost with the original.

    Always on another host. No rank keeps more than it must: one copy, so that this is a permutation, unless one host
    has more than half of all ranks. Among all ways to do that, one in which the most groups (over single axes: tp, cp,
    dp, pp, etp, ep, edp) that any rank shares with its keeper are the fewest: none where that is possible. The same on
    every rank that computes it.

    Args:
        hosts: of each rank, anything that can be compared and hashed.

    Raises:
        ConfigError: not one host a rank.
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
    groups_AW = _groups(config)
    for shared in range(len(groups_AW) + 1):
        if (found := _match(host_W, groups_AW, shared, copies)) is not None:
            return found
    raise AssertionError("other hosts have room for the copies of every host")


def shared_groups(config: ParallelConfig, first: int, second: int) -> int:
    """How many groups over a single axis two ranks are both in."""
    return int((_groups(config)[:, first] == _groups(config)[:, second]).sum())


def _groups(config: ParallelConfig) -> npt.NDArray[np.int64]:
    """[axes, W]: the number of each rank's group over each axis on which there is more than one rank."""
    rows = []
    for axis in AXES:
        if config.size(axis) > 1:
            row = np.empty(config.world, dtype=np.int64)
            for number, ranks in enumerate(config.groups(axis)):
                row[list(ranks)] = number
            rows.append(row)
    return np.stack(rows) if rows else np.empty((0, config.world), dtype=np.int64)


def _match(
    host_W: npt.NDArray[Any], groups_AW: npt.NDArray[np.int64], shared: int, copies: int
) -> tuple[int, ...] | None:
    """A keeper for every rank that shares at most ``shared`` groups with it, each taking up to ``copies``; None: there
    is none. Kuhn's augmenting paths, which on a regular mapping are rarely needed."""
    world = len(host_W)
    kept: list[list[int]] = [[] for _ in range(world)]
    full_W = np.zeros(world, dtype=bool)

    def allowed(rank: int) -> npt.NDArray[np.bool_]:
        result: npt.NDArray[np.bool_] = (host_W != host_W[rank]) & (
            (groups_AW == groups_AW[:, rank : rank + 1]).sum(0) <= shared
        )
        return result

    def put(rank: int) -> bool:
        # From rank to the keepers it may have, and from each to the ranks it could hand on: breadth first.
        came_from: dict[int, int] = {}
        asked_by: dict[int, int] = {}
        seen_W = np.zeros(world, dtype=bool)
        queue = [rank]
        for owner in queue:
            choice_W = allowed(owner) & ~seen_W
            # Beginning behind the owner, so that neighbours find different ones.
            order = (np.flatnonzero(np.roll(choice_W, -owner - 1)) + owner + 1) % world
            free = order[~full_W[order]]
            if len(free):
                keeper, mover = int(free[0]), owner
                while mover != rank:
                    before = came_from[mover]
                    kept[before].remove(mover)
                    kept[keeper].append(mover)
                    full_W[keeper] = len(kept[keeper]) >= copies
                    keeper, mover = before, asked_by[before]
                kept[keeper].append(mover)
                full_W[keeper] = len(kept[keeper]) >= copies
                return True
            for one in order.tolist():
                seen_W[one] = True
                asked_by[one] = owner
                for other in kept[one]:
                    came_from[other] = one
                    queue.append(other)
        return False

    for rank in range(world):
        if not put(rank):
            return None
    found = [0] * world
    for keeper, owners in enumerate(kept):
        for owner in owners:
            found[owner] = keeper
    return tuple(found)
