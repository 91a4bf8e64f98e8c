"""Some steps of a run as arrays, one row a step and one column a rank: what diagnosis and comparison look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_comm.errors import InputError
from moe_comm.observe import records
from moe_comm.observe.records import Attempt, RankStep

Floats = NDArray[np.float64]
PARTS = ("compute", "data", "checkpoint")
"""What a rank does by itself; the rest of a step it waits for others, or keeps the books."""


@dataclass(frozen=True)
class Window:
    """S steps of W ranks; what is not known is NaN.

    steps: [S]. parts: by ``PARTS``, [S, W] seconds of a rank's own work. waits_SW: seconds in dispatch, combine and
    collectives. rows_SW: that came to a rank's experts. links_SWW: seconds of a probe from one rank to another.
    hosts: of each rank. stage: of each rank in the pipeline, 0 where there is none.
    """

    steps: tuple[int, ...]
    parts: Mapping[str, Floats]
    waits_SW: Floats
    rows_SW: Floats
    links_SWW: Floats
    hosts: tuple[str, ...]
    stage: tuple[int, ...]

    @property
    def world(self) -> int:
        return int(self.waits_SW.shape[1])

    def between(self, first: int, last: int) -> Window:
        """The steps from ``first`` to ``last``, both included."""
        chosen = [index for index, step in enumerate(self.steps) if first <= step <= last]
        return Window(
            tuple(self.steps[index] for index in chosen),
            {name: part[chosen] for name, part in self.parts.items()},
            self.waits_SW[chosen],
            self.rows_SW[chosen],
            self.links_SWW[chosen],
            self.hosts,
            self.stage,
        )


def make_window(lines: Iterable[RankStep], stage: Sequence[int] = ()) -> Window:
    """From step lines in any order; of a step that was done again the later line counts.

    Raises:
        InputError: there are none.
    """
    by_place = {(line.step, line.rank): line for line in lines}
    if not by_place:
        raise InputError("no step of any rank was recorded; train with observe.events=true, and for more than a step")
    steps = sorted({step for step, _ in by_place})
    world = 1 + max(rank for _, rank in by_place)
    row_of = {step: index for index, step in enumerate(steps)}
    shape = (len(steps), world)
    parts = {name: np.full(shape, np.nan) for name in PARTS}
    waits, rows = np.full(shape, np.nan), np.full(shape, np.nan)
    links = np.full((*shape, world), np.nan)
    hosts = ["?"] * world
    for (step, rank), line in by_place.items():
        place = row_of[step], rank
        for name, part in parts.items():
            part[place] = getattr(line, name)
        waits[place], rows[place] = line.communication, line.rows
        for peer, seconds in line.links.items():
            if peer.isdigit() and int(peer) < world:
                links[row_of[step], int(peer), rank] = seconds
        hosts[rank] = line.host
    known = tuple(stage) if len(stage) == world else (0,) * world
    return Window(tuple(steps), parts, waits, rows, links, tuple(hosts), known)


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
