"""Step records of a run as arrays with one row per step and one column per rank."""

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
"""Activities of a rank that do not wait for other ranks."""
MOST_CELLS = 1 << 22
"""Maximum size of sparse matrices, because record files are untrusted."""


@dataclass(frozen=True)
class LinkProbes:
    """N probes, sorted by step.

    at_N3: [N, 3]: step index in the window, sending rank, receiving rank. seconds_N: [N] durations.
    """

    at_N3: Ints
    seconds_N: Floats

    def between(self, first: int, end: int) -> LinkProbes:
        """Return the probes of the steps with index ``first`` to ``end`` (exclusive)."""
        low, high = np.searchsorted(self.at_N3[:, 0], (first, end))
        return LinkProbes(self.at_N3[low:high] - (first, 0, 0), self.seconds_N[low:high])

    def matrices(self) -> tuple[list[int], Floats]:
        """Return the H probing ranks, and [P, H, H] seconds from sender to receiver in P steps; NaN without a probe.

        The P steps are the last ones with probes, as many as the size limit allows.
        """
        ends, at_M = np.unique(self.at_N3[:, 1:], return_inverse=True)
        steps, index_N = np.unique(self.at_N3[:, 0], return_inverse=True)
        most = max(MOST_CELLS, 2 * len(self.seconds_N)) // max(len(ends), 1) ** 2
        if len(steps) and not most:
            raise InputError(f"the probes between {len(ends)} hosts exceed the size limit of the diagnosis")
        skipped = max(len(steps) - most, 0)
        matrices = np.full((len(steps) - skipped, len(ends), len(ends)), np.nan)
        source_N, target_N = at_M.reshape(-1, 2).T
        used = index_N >= skipped
        matrices[index_N[used] - skipped, source_N[used], target_N[used]] = self.seconds_N[used]
        return ends.tolist(), matrices


@dataclass(frozen=True)
class Window:
    """S steps of W ranks. Missing values are NaN.

    Attributes:
        ranks: [W] ranks with records.
        parts: [S, W] seconds of each of ``PARTS``.
        waits_SW: seconds in dispatch, combine and collectives.
        rows_SW: rows received by a rank's experts.
        stage: [W] pipeline stage of each rank; 0 without a pipeline.
    """

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    parts: Mapping[str, Floats]
    waits_SW: Floats
    rows_SW: Floats
    links: LinkProbes
    hosts: tuple[str, ...]
    stage: tuple[int, ...]

    @property
    def world(self) -> int:
        return int(self.waits_SW.shape[1])

    def between(self, first: int, last: int) -> Window:
        """Return the steps from ``first`` to ``last``, both included."""
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
    """Build a window from step lines in any order. If a rank has several lines of a step, the last one is used.

    Args:
        lines: the step lines.
        stage: pipeline stage of each rank of the run; (): no pipeline.
    """
    line_of = {(line.step, line.rank): line for line in lines}
    if not line_of:
        raise InputError("the run has no step records; train with observe.events=true for more than one step")
    steps = sorted({step for step, _ in line_of})
    ranks = sorted({rank for _, rank in line_of})
    if len(steps) * len(ranks) > max(MOST_CELLS, 16 * len(line_of)):
        raise CorruptFile(
            f"{len(line_of)} lines for {len(steps)} steps of {len(ranks)} ranks are not the records of a run"
        )
    row_of = {step: index for index, step in enumerate(steps)}
    column_of = {rank: index for index, rank in enumerate(ranks)}
    shape = (len(steps), len(ranks))
    parts = {name: np.full(shape, np.nan) for name in PARTS}
    waits, rows = np.full(shape, np.nan), np.full(shape, np.nan)
    hosts = ["?"] * len(ranks)
    probes = []
    for (step, rank), line in line_of.items():
        cell = row_of[step], column_of[rank]
        for name, part in parts.items():
            part[cell] = getattr(line, name)
        waits[cell], rows[cell] = line.communication, line.rows
        for peer, seconds in line.links.items():
            sender = int(peer) if peer.isascii() and peer.isdigit() and len(peer) < 10 else -1
            if sender in column_of and np.isfinite(seconds):
                probes.append((row_of[step], sender, rank, seconds))
        hosts[column_of[rank]] = line.host
    probes.sort(key=lambda probe: probe[0])
    links = LinkProbes(
        np.array([probe[:3] for probe in probes], dtype=np.int64).reshape(-1, 3),
        np.array([probe[3] for probe in probes], dtype=np.float64),
    )
    stages = tuple(stage[rank] for rank in ranks) if len(stage) == 1 + ranks[-1] else (0,) * len(ranks)
    return Window(tuple(steps), tuple(ranks), parts, waits, rows, links, tuple(hosts), stages)


def read_window(run: Path) -> Window:
    """Read all steps of the run folder ``run``."""
    stage: list[int] = []
    for attempt in records.read_lines(run / records.ATTEMPTS, Attempt):
        pp = attempt.mapping.get("pp", 1)
        # The pipeline axis is the outermost in rank order.
        stage = [rank * pp // attempt.world for rank in range(attempt.world)]
    return make_window(records.read_folder(run / records.RANKS, RankStep), stage)
