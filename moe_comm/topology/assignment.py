"""Assignment of experts to ranks with a fixed number of experts per rank, so that the busiest rank has few rows."""

from __future__ import annotations

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
    """Return homes of the experts: the best found by exchanges, then one that is ``within`` it and moves fewer experts.

    All unnecessary moves are undone.
    """
    found, limit = list[Assignment](), 0
    for _ in range(2):
        found.append(Assignment(loads_E, list(old_E), len(room)))
        found[-1].improve(limit)
        found[-1].move_back(old_E, max(*found[-1].totals, limit))
        limit = within(max(found[0].totals))
    return [one.home_E for one in found]


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

    def improve(self, enough: int = 0) -> None:
        """Exchange experts of the busiest rank while it has more than ``enough`` rows and exchanges reduce them.

        It exchanges one expert for one, or else two for two.
        """
        for _ in range(4 * len(self.home_E)):
            busy = max(range(len(self.totals)), key=lambda rank: (self.totals[rank], -rank))
            if self.totals[busy] <= enough:
                return
            candidates = (min(self._exchanges(busy, count), default=None) for count in (1, 2))
            best = next((one for one in candidates if one is not None), None)
            if best is None:
                return
            for ours, theirs in zip(best[1], best[2], strict=True):
                self._exchange(ours, theirs)

    def _exchanges(self, busy: int, count: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Yield (rows of the busier rank afterwards, our experts, the others) of exchanges of ``count`` experts of the
        busiest rank that reduce them; none if there are too many pairs."""
        high, loads_E = self.totals[busy], self.loads_E
        ours = [(sum(map(loads_E.__getitem__, some)), some) for some in combinations(self.experts[busy], count)]
        if count > 1 and len(ours) ** 2 * len(self.totals) > PAIRS:
            return
        for rank, low in enumerate(self.totals):
            for theirs in combinations(self.experts[rank], count) if low < high else ():
                rows = sum(map(loads_E.__getitem__, theirs))
                for most, some in ours:
                    less = most - rows
                    if 0 < less < high - low:
                        yield max(high - less, low + less), some, theirs

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
