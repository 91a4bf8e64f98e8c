"""Some steps of a run as arrays, one row a step and one column a rank: what diagnosis and comparison look at."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_comm.errors import CorruptFile, InputError
from moe_comm.observe import records
from moe_comm.observe.records import Attempt, RankStep

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PARTS = ("compute", "data", "checkpoint")
"""What a rank does by itself; the rest of a step it waits for others, or keeps the books."""


MOST_CELLS = 1 << 22
"""Places for steps of ranks, or of links, beyond what is known of them: files are not to be trusted."""


@dataclass(frozen=True)
class Links:
    """N probes, in order of their steps. at_N3: [N, 3], the place of the step in its window, and the ranks that sent
    and received. seconds_N: what they took."""

    at_N3: Ints
    seconds_N: Floats

    def between(self, first: int, end: int) -> Links:
        """Those of the steps in places from ``first`` to before ``end``."""
        low, high = np.searchsorted(self.at_N3[:, 0], (first, end))
        return Links(self.at_N3[low:high] - (first, 0, 0), self.seconds_N[low:high])

    def matrices(self) -> tuple[list[int], Floats]:
        """The H ranks that probe or are probed, in order, and [P, H, H] seconds in each of the P steps that have
        probes, from one of them to another; NaN where not known. Of more steps than there is room for, the last.

        Raises:
            InputError: there are too many ranks.
        """
        ends, at_M = np.unique(self.at_N3[:, 1:], return_inverse=True)
        steps, place_N = np.unique(self.at_N3[:, 0], return_inverse=True)
        room = max(MOST_CELLS, 2 * len(self.seconds_N)) // max(len(ends), 1) ** 2
        if len(steps) and not room:
            raise InputError(f"probes between {len(ends)} hosts are too many to judge")
        skipped = max(len(steps) - room, 0)
        matrices = np.full((len(steps) - skipped, len(ends), len(ends)), np.nan)
        source_N, target_N = at_M.reshape(-1, 2).T
        kept = place_N >= skipped
        matrices[place_N[kept] - skipped, source_N[kept], target_N[kept]] = self.seconds_N[kept]
        return ends.tolist(), matrices


@dataclass(frozen=True)
class Window:
    """S steps of W ranks; what is not known is NaN.

    steps: [S]. ranks: [W], those that have written anything. parts: by ``PARTS``, [S, W] seconds of a rank's own work.
    waits_SW: seconds in dispatch, combine and collectives. rows_SW: that came to a rank's experts. links: probes from
    one rank to another. hosts: of each rank. stage: of each rank in the pipeline, 0 where there is none.
    """

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    parts: Mapping[str, Floats]
    waits_SW: Floats
    rows_SW: Floats
    links: Links
    hosts: tuple[str, ...]
    stage: tuple[int, ...]

    @property
    def world(self) -> int:
        return int(self.waits_SW.shape[1])

    def between(self, first: int, last: int) -> Window:
        """The steps from ``first`` to ``last``, both included."""
        low, high = bisect_left(self.steps, first), bisect_right(self.steps, last)
        chosen = slice(low, max(low, high))
        return Window(
            self.steps[chosen],
            self.ranks,
            {name: part[chosen] for name, part in self.parts.items()},
            self.waits_SW[chosen],
            self.rows_SW[chosen],
            self.links.between(chosen.start, chosen.stop),
            self.hosts,
            self.stage,
        )


def make_window(lines: Iterable[RankStep], stage: Sequence[int] = ()) -> Window:
    """From step lines in any order; of a step that was done again the later line counts.

    Raises:
        InputError: there are none. CorruptFile: nearly all ranks lack nearly all steps.
    """
    by_place = {(line.step, line.rank): line for line in lines}
    if not by_place:
        raise InputError("no step of any rank was recorded; train with observe.events=true, and for more than a step")
    steps = sorted({step for step, _ in by_place})
    ranks = sorted({rank for _, rank in by_place})
    if len(steps) * len(ranks) > max(MOST_CELLS, 16 * len(by_place)):
        raise CorruptFile(f"{len(by_place)} lines are of {len(steps)} steps of {len(ranks)} ranks: they are no run's")
    row_of = {step: index for index, step in enumerate(steps)}
    column_of = {rank: index for index, rank in enumerate(ranks)}
    shape = (len(steps), len(ranks))
    parts = {name: np.full(shape, np.nan) for name in PARTS}
    waits, rows = np.full(shape, np.nan), np.full(shape, np.nan)
    hosts = ["?"] * len(ranks)
    probes = []
    for (step, rank), line in by_place.items():
        place = row_of[step], column_of[rank]
        for name, part in parts.items():
            part[place] = getattr(line, name)
        waits[place], rows[place] = line.communication, line.rows
        for peer, seconds in line.links.items():
            if (sender := _known(peer, column_of)) is not None and np.isfinite(seconds):
                probes.append((row_of[step], sender, rank, seconds))
        hosts[column_of[rank]] = line.host
    probes.sort(key=lambda probe: probe[0])
    links = Links(
        np.array([probe[:3] for probe in probes], dtype=np.int64).reshape(-1, 3),
        np.array([probe[3] for probe in probes], dtype=np.float64),
    )
    known = tuple(stage[rank] for rank in ranks) if len(stage) == 1 + ranks[-1] else (0,) * len(ranks)
    return Window(tuple(steps), tuple(ranks), parts, waits, rows, links, tuple(hosts), known)


def _known(peer: str, column_of: Mapping[int, int]) -> int | None:
    """The rank of which ``peer`` is the number, if there is one."""
    rank = int(peer) if peer.isascii() and peer.isdigit() and len(peer) < 10 else -1
    return rank if rank in column_of else None


def read_window(run: Path) -> Window:
    """Every step of a run's folder.

    Raises:
        InputError: it has no records of ranks. CorruptFile: one is damaged.
    """
    stage: list[int] = []
    for attempt in records.read_lines(run / records.ATTEMPTS, Attempt):
        pp = attempt.mapping.get("pp", 1)
        # Pipeline stages are outermost in the order of ranks.
        stage = [rank * pp // attempt.world for rank in range(attempt.world)]
    return make_window(records.read_folder(run / records.RANKS, RankStep), stage)
