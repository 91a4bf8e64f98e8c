"""Ranks of each document: the least work on the slowest rank.

    4 ranks, work     document 12 on all ranks      3 3 3 3
                      6 on ranks 0 and 1            6 6 3 3
                      3, 2, 1 on one rank each      6 6 6 6

A document runs on an aligned group of 1, 2, 4, .. ranks, or on all ranks. All numbers are integers and ties go to the
lower index, so that every rank finds the same result from the lengths alone, without a message or a time limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from moe_comm.layers.transformer.lengths.cost import LengthCost

CLOSE_PERCENT = 2
"""The search ends when the slowest rank has at most this much more work than the mean."""
SHARES = (1, 2, 4)
"""Attempts: a document gets so many ranks that each has at most 1, 1/2, 1/4 of the mean work."""
MOVES, CANDIDATES = 12000, 12
"""Moves that the search tries, times the ranks; and documents that it considers: the longest of the slowest rank."""
CAPACITY = 1.5
"""Maximum tokens of a rank, relative to an even distribution."""


@dataclass(frozen=True)
class Assignment:
    """Ranks of documents.

    Attributes:
        ranks: ranks of each document.
        loads: work of each rank, without transfers.
    """

    ranks: tuple[tuple[int, ...], ...]
    loads: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Work of the slowest rank divided by the mean; 1 without documents."""
        return max(self.loads) * len(self.loads) / max(sum(self.loads), 1) if any(self.loads) else 1.0


def group_sizes(world: int) -> list[int]:
    """Return the numbers of ranks that a document can run on, ascending."""
    sizes = [1]
    while sizes[-1] * 2 <= world:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == world else [*sizes, world]


def solve(lengths: Sequence[int], world: int, cost: LengthCost, capacity: int | None = None) -> Assignment:
    """Assign documents to ``world`` ranks.

    Args:
        lengths: tokens of each document.
        capacity: maximum tokens of a rank. None: ``CAPACITY`` times an even distribution. If no attempt fits, every
            document runs on all ranks.
    """
    if capacity is None:
        capacity = int(CAPACITY * sum(lengths) / world) + 1
    return _Problem(lengths, world, cost, capacity).search()


class _Problem:
    """Greedy placements with several numbers of ranks per document, each improved by moves of single documents."""

    def __init__(self, lengths: Sequence[int], world: int, cost: LengthCost, capacity: int) -> None:
        self.lengths, self.world, self.capacity = lengths, world, capacity
        self.sizes = group_sizes(world)
        self.groups = [tuple(range(at, at + size)) for size in self.sizes for at in range(0, world - size + 1, size)]
        self.work = work = [cost.work(length) for length in lengths]
        # Work of each rank of a document with transfers, by number of ranks and document.
        self.shared = {
            size: [-(-alone // size) + extra for alone, extra in zip(work, cost.exposed(lengths, size), strict=True)]
            for size in self.sizes
        }
        self.mean = max(sum(work) // world, 1)
        self.order = sorted(range(len(lengths)), key=lambda document: (-work[document], document))
        self.budget = MOVES // world

    def search(self) -> Assignment:
        best: _Placement | None = None
        # With transfers, a document on any number of ranks can take longer than the mean.
        least = max((self._least(document)[0] for document in self.order[:CANDIDATES]), default=0)
        for share in SHARES:
            limit = max(self.mean, least) if share == 1 else self.mean // share
            placement = self._place([self._size(document, limit) for document in range(len(self.lengths))])
            if placement is not None:
                self._improve(placement)
                if best is None or max(placement.loads) < max(best.loads):
                    best = placement
                if max(best.loads) * 100 <= self.mean * (100 + CLOSE_PERCENT):
                    break
        if best is None:
            best = _Placement(self)
            for document in self.order:
                best.put(document, self.groups[-1])
        return Assignment(tuple(best.ranks), tuple(self._loads(best.ranks)))

    def _loads(self, ranks: Sequence[tuple[int, ...]]) -> list[int]:
        loads = [0] * self.world
        for work, own in zip(self.work, ranks, strict=True):
            for rank in own:
                loads[rank] -= -work // len(own)
        return loads

    def _least(self, document: int) -> tuple[int, int]:
        """Return the least work of a document on each of its ranks, and their number."""
        fitting = [size for size in self.sizes if self.lengths[document] <= self.capacity * size] or self.sizes[-1:]
        return min((self.shared[size][document], size) for size in fitting)

    def _size(self, document: int, limit: int) -> int:
        """Return the smallest number of ranks that have at most the work ``limit`` each, or the least."""
        for size in self.sizes:
            if self.shared[size][document] <= limit and self.lengths[document] <= self.capacity * size:
                return size
        return self._least(document)[1]

    def _place(self, sizes: Sequence[int]) -> _Placement | None:
        """Place documents, longest first, on the ranks with the least resulting work; None if they do not fit."""
        placement = _Placement(self)
        loads, tokens = placement.loads, placement.tokens
        alone = []
        for document in self.order:
            size = sizes[document]
            if size == 1:
                alone.append(document)
                continue
            starts = range(0, self.world - size + 1, size)
            start = min(starts, key=lambda start: (max(loads[start : start + size]), start))
            placement.put(document, tuple(range(start, start + size)))
        if max(tokens) > self.capacity:
            return None
        heap = [(load, rank) for rank, load in enumerate(loads)]
        heapify(heap)
        for document in alone:
            full = []
            while heap and tokens[heap[0][1]] + self.lengths[document] > self.capacity:
                full.append(heappop(heap))
            if not heap:
                return None
            rank = heappop(heap)[1]
            placement.put(document, (rank,))
            for item in (*full, (loads[rank], rank)):
                heappush(heap, item)
        return placement

    def _improve(self, placement: _Placement) -> None:
        """Move documents of the slowest rank to other ranks, or swap them, while that lowers the sum of powers."""
        while self.budget > 0 and max(placement.loads) * 100 > self.mean * (100 + CLOSE_PERCENT):
            slowest = placement.loads.index(max(placement.loads))
            candidates = [document for document in self.order if slowest in placement.ranks[document]][:CANDIDATES]
            moves: list[tuple[tuple[int, tuple[int, ...]], ...]] = [
                ((document, group),) for document in candidates for group in self.groups
            ]
            moves += [
                ((document, placement.ranks[other]), (other, placement.ranks[document]))
                for document in candidates
                for other in self.order[:: max(1, len(self.order) // CANDIDATES)]
                if placement.ranks[other] != placement.ranks[document]
            ]
            best: tuple[tuple[int, tuple[int, ...]], ...] | None = None
            lowest = placement.power()
            for move in moves:
                self.budget -= 1
                old = tuple((document, placement.ranks[document]) for document, _ in move)
                placement.move(move)
                if max(placement.tokens) <= self.capacity and (power := placement.power()) < lowest:
                    best, lowest = move, power
                placement.move(old)
            if best is None:
                return
            placement.move(best)


class _Placement:
    """Ranks of the documents so far, and work and tokens of each rank."""

    def __init__(self, problem: _Problem) -> None:
        self._problem = problem
        self.loads, self.tokens = [0] * problem.world, [0] * problem.world
        self.ranks: list[tuple[int, ...]] = [()] * len(problem.lengths)

    def put(self, document: int, ranks: tuple[int, ...], sign: int = 1) -> None:
        """Add a document, or remove it (sign -1)."""
        work = sign * self._problem.shared[len(ranks)][document]
        held = sign * -(-self._problem.lengths[document] // len(ranks))
        self.ranks[document] = ranks
        for rank in ranks:
            self.loads[rank] += work
            self.tokens[rank] += held

    def move(self, move: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Move each document of ``move`` to its new ranks."""
        for document, ranks in move:
            self.put(document, self.ranks[document], -1)
            self.put(document, ranks)

    def power(self) -> int:
        """Return a number that decreases with the largest loads, also while several ranks share the largest."""
        unit = self._problem.mean
        return sum((1024 * load // unit) ** 8 for load in self.loads)
