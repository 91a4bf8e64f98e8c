"""Assignment of experts to ranks with a fixed number of experts per rank, so that the busiest rank has few rows."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import combinations

Loads = Sequence[int]
"""Rows of each expert in a step."""
PAIRS = 20_000
"""Maximum number of exchanges of two experts for two that one improvement tries."""
SLACK = 50
"""A busiest rank with up to 1 / SLACK more rows than the best is accepted if fewer experts move."""


def within(rows: int) -> int:
    """Return the number of rows of the busiest rank that is accepted instead of ``rows`` if fewer experts move."""
    return rows + rows // SLACK


def homes_near(loads_E: Loads, old_E: Sequence[int], room: Sequence[int]) -> list[list[int]]:
    """Return homes of the experts: the best found, then some that are ``within`` it and move fewer experts.

    The best is the better one of two improved assignments: ``old_E``, and a new greedy one. The others are ``old_E``
    with only the necessary exchanges, and the best with all unnecessary moves undone.
    """
    starts = []
    for start_E in (list(old_E), _greedy(loads_E, old_E, room)):
        improved = Assignment(loads_E, start_E, len(room))
        improved.improve()
        starts.append(_renamed(improved.home_E, old_E, room))
    best = min(max(Assignment(loads_E, home_E, len(room)).totals) for home_E in starts)
    results = []
    for limit in (best, within(best)):
        near = Assignment(loads_E, list(old_E), len(room))
        near.improve(limit)
        for one in (near, *(Assignment(loads_E, list(home_E), len(room)) for home_E in starts)):
            if max(one.totals) <= limit:
                one.move_back(old_E, limit)
                results.append(one)
    return [one.home_E for one in sorted(results, key=lambda one: (max(one.totals), one.moved(old_E)))]


def _greedy(loads_E: Loads, old_E: Sequence[int], room: Sequence[int]) -> list[int]:
    """Assign experts by descending load to the least loaded rank with room; ties: the old home, then the id."""
    left, totals = list(room), [0] * len(room)
    home_E = [0] * len(loads_E)
    ranks = [(0, rank) for rank in range(len(room)) if room[rank]]
    heapq.heapify(ranks)
    for expert in sorted(range(len(loads_E)), key=lambda one: (-loads_E[one], one)):
        # An entry of a rank whose total has grown or that is full is outdated.
        while ranks[0][0] != totals[ranks[0][1]] or not left[ranks[0][1]]:
            heapq.heappop(ranks)
        rank = old_E[expert] if left[old_E[expert]] and totals[old_E[expert]] == ranks[0][0] else ranks[0][1]
        home_E[expert] = rank
        totals[rank] += loads_E[expert]
        left[rank] -= 1
        if left[rank]:
            heapq.heappush(ranks, (totals[rank], rank))
    return home_E


class Assignment:
    """Homes of the experts, and the rows of each rank.

    Args:
        loads_E: rows of each expert.
        home_E: rank of each expert. Changed in place.
    """

    def __init__(self, loads_E: Loads, home_E: list[int], world: int) -> None:
        self.loads_E, self.home_E = loads_E, home_E
        self.totals = [0] * world
        self.experts: list[list[int]] = [[] for _ in range(world)]
        for expert, rank in enumerate(home_E):
            self.totals[rank] += loads_E[expert]
            self.experts[rank].append(expert)

    def moved(self, old_E: Sequence[int]) -> int:
        """Return the number of experts whose home is not that of ``old_E``."""
        return sum(a != b for a, b in zip(self.home_E, old_E, strict=True))

    def improve(self, enough: int = 0) -> None:
        """Exchange experts of the busiest rank while it has more than ``enough`` rows and exchanges reduce them.

        It exchanges one expert for one, or else two for two.
        """
        for _ in range(4 * len(self.home_E)):
            busy = max(range(len(self.totals)), key=lambda rank: (self.totals[rank], -rank))
            if self.totals[busy] <= enough:
                return
            candidates = (min(find(busy), default=None) for find in (self._single, self._double))
            best = next((one for one in candidates if one is not None), None)
            if best is None:
                return
            for ours, theirs in zip(best[1], best[2], strict=True):
                self._exchange(ours, theirs)

    def _single(self, busy: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Yield (rows of the busier rank afterwards, our expert, the other expert) of exchanges that reduce them."""
        high, loads_E = self.totals[busy], self.loads_E
        for rank, low in enumerate(self.totals):
            for ours in self.experts[busy] if low < high else ():
                most = loads_E[ours]
                for theirs in self.experts[rank]:
                    less = most - loads_E[theirs]
                    if 0 < less < high - low:
                        yield max(high - less, low + less), (ours,), (theirs,)

    def _double(self, busy: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Yield exchanges of two experts for two, in the form of ``_single``; none if there are too many."""
        high, loads_E = self.totals[busy], self.loads_E
        ours = [(loads_E[a] + loads_E[b], (a, b)) for a, b in combinations(self.experts[busy], 2)]
        if len(ours) ** 2 * len(self.totals) > PAIRS:
            return
        for rank, low in enumerate(self.totals):
            for theirs in combinations(self.experts[rank], 2) if low < high else ():
                rows = loads_E[theirs[0]] + loads_E[theirs[1]]
                for most, pair in ours:
                    less = most - rows
                    if 0 < less < high - low:
                        yield max(high - less, low + less), pair, theirs

    def _exchange(self, a: int, b: int) -> None:
        ranks = self.home_E[a], self.home_E[b]
        for expert, source, target in ((a, *ranks), (b, *reversed(ranks))):
            self.experts[source].remove(expert)
            self.experts[target].append(expert)
            self.totals[source] -= self.loads_E[expert]
            self.totals[target] += self.loads_E[expert]
            self.home_E[expert] = target

    def move_back(self, old_E: Sequence[int], limit: int) -> None:
        """Undo moves: exchange experts back while no rank gets more than ``limit`` rows."""
        again = True
        while again:
            again = False
            for expert, old in enumerate(old_E):
                now = self.home_E[expert]
                if now == old:
                    continue
                for other in self.experts[old]:
                    less = self.loads_E[other] - self.loads_E[expert]
                    fits = self.totals[old] - less <= limit and self.totals[now] + less <= limit
                    if fits and old_E[other] != old:
                        self._exchange(expert, other)
                        again = True
                        break


def _renamed(home_E: Sequence[int], old_E: Sequence[int], room: Sequence[int]) -> list[int]:
    """Give each set of experts to the rank that held the most of them, among ranks with as many experts."""
    common: dict[tuple[int, int], int] = {}
    for pair in zip(home_E, old_E, strict=True):
        if room[pair[0]] == room[pair[1]]:
            common[pair] = common.get(pair, 0) + 1
    name: dict[int, int] = {}
    free = dict.fromkeys(range(len(room)))
    for now, old in sorted(common, key=lambda pair: (-common[pair], pair)):
        if now not in name and old in free:
            name[now] = old
            del free[old]
    for now in set(range(len(room))) - set(name):
        name[now] = next(rank for rank in free if room[rank] == room[now])
        del free[name[now]]
    return [name[rank] for rank in home_E]
