"""The step lines of every rank, as one table and as means of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_comm.observe import records
from moe_comm.observe.records import RankStep
from moe_comm.observe.report.lines import number, object_of, spread_lines

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_LINES, MOST_RANKS, MOST_CELLS = 200_000, 4096, 1 << 20
RANK_VALUES = ("total", "compute", "communication", "data", "checkpoint", "memory_bytes")


@dataclass(frozen=True)
class RankLines:
    """Steps of ranks, N lines in all. ranks: [R]. hosts: [R]. index_N: which of the ranks. begin_N: seconds since 1970.

    values: by ``RANK_VALUES``, [N]. sent: by kind, [R] bytes a step. waits: by kind, [R] seconds a step.
    peers: from (index of) rank to rank, bytes a step. probes: the same, seconds, to whoever measured.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    steps_N: Floats
    index_N: Ints
    begin_N: Floats
    values: Mapping[str, Floats]
    sent: Mapping[str, Floats]
    waits: Mapping[str, Floats]
    peers: Mapping[tuple[int, int], float]
    probes: Mapping[tuple[int, int], float]


def read_ranks(path: Path, notes: list[str]) -> RankLines:
    """Of the run in ``path``, at most about ``MOST_LINES``; what cannot be read is said in ``notes``."""
    folder = path / records.RANKS
    files = sorted(folder.glob("rank-*.jsonl")) if folder.is_dir() else []
    if not files:
        notes.append(f"{records.RANKS}/ is missing or empty: nothing about single ranks")
    if len(files) > MOST_RANKS:
        notes.append(f"{records.RANKS}/ has {len(files)} ranks; {MOST_RANKS} of them, evenly spread, are shown")
        files = [files[i] for i in np.linspace(0, len(files) - 1, MOST_RANKS).astype(int)]
    most = max(MOST_LINES // max(len(files), 1), 8)
    index: dict[int, int] = {}
    hosts: list[str] = []
    rows: list[Floats] = []
    sums = _Sums()
    bad = 0
    for file in files:
        own: list[list[float]] = []
        try:
            for raw in spread_lines(file, most):
                try:
                    line = records.parse(object_of(raw) or {}, RankStep)
                    if not (0 <= line.step < 2**53 and 0 <= line.rank < 2**31):
                        raise ValueError("no step or rank has that number")
                    values = [number(getattr(line, name)) for name in RANK_VALUES]
                    place = index.setdefault(line.rank, len(index))
                    if place == len(hosts):
                        hosts.append(line.host[:200])
                    own.append([number(line.step), place, number(line.begin_s), *values])
                    sums.add(line, place)
                except ValueError:
                    bad += 1
        except OSError as error:
            notes.append(f"{file.name} cannot be read: {error.strerror or error}")
        rows.append(np.array(own, dtype=np.float64).reshape(len(own), 3 + len(RANK_VALUES)))
    if bad:
        notes.append(f"{records.RANKS}/: {bad} line(s) cannot be read, and were left out")
    return _table(index, hosts, rows, sums)


def _table(index: dict[int, int], hosts: list[str], rows: list[Floats], sums: _Sums) -> RankLines:
    """Ranks in order of their number."""
    order = sorted(index)
    new = {index[rank]: place for place, rank in enumerate(order)}
    table = np.concatenate([np.zeros((0, 3 + len(RANK_VALUES))), *rows])
    renumber = np.array([new[old] for old in range(len(order))], dtype=np.int64)
    steps = np.array([max(sums.lines.get(index[rank], 0), 1) for rank in order], dtype=np.float64)

    def by_kind(sums_of: Mapping[str, Mapping[int, float]]) -> dict[str, Floats]:
        return {
            kind: np.array([of.get(index[rank], 0.0) for rank in order]) / steps for kind, of in sorted(sums_of.items())
        }

    def pairs(sums_of: Mapping[tuple[int, int], float], counts: Callable[[int, tuple[int, int]], float]) -> Any:
        known = ((pair, value) for pair, value in sums_of.items() if pair[1] in index)
        return {
            (new[own], new[index[other]]): value / max(counts(own, (own, other)), 1) for (own, other), value in known
        }

    return RankLines(
        ranks=tuple(order),
        hosts=tuple(hosts[index[rank]] for rank in order),
        steps_N=table[:, 0],
        index_N=renumber[table[:, 1].astype(np.int64)] if len(order) else np.zeros(0, dtype=np.int64),
        begin_N=table[:, 2],
        values={name: table[:, 3 + i] for i, name in enumerate(RANK_VALUES)},
        sent=by_kind(sums.sent),
        waits=by_kind(sums.waits),
        peers=pairs(sums.peers, lambda own, pair: sums.lines.get(own, 1)),
        probes={
            (source, here): s
            for (here, source), s in pairs(sums.probes, lambda own, pair: sums.probed.get(pair, 1)).items()
        },
    )


class _Sums:
    """What is added up over a rank's lines; pairs are (index of the rank, number of the other)."""

    def __init__(self) -> None:
        self.lines: dict[int, int] = {}
        self.sent: dict[str, dict[int, float]] = {}
        self.waits: dict[str, dict[int, float]] = {}
        self.peers: dict[tuple[int, int], float] = {}
        self.probes: dict[tuple[int, int], float] = {}
        self.probed: dict[tuple[int, int], int] = {}

    def add(self, line: RankStep, place: int) -> None:
        self.lines[place] = self.lines.get(place, 0) + 1
        for sums, values in ((self.sent, line.sent), (self.waits, line.waits)):
            for kind, value in values.items():
                if kind in sums or len(sums) < 16:
                    of = sums.setdefault(kind[:40], {})
                    of[place] = of.get(place, 0.0) + number(value)
        for pairs, counts, values in ((self.peers, None, line.peers), (self.probes, self.probed, line.links)):
            for name, value in values.items():
                if name.isdecimal() and len(name) < 10:
                    pair = (place, int(name))
                    if pair in pairs or len(pairs) < MOST_CELLS:
                        pairs[pair] = pairs.get(pair, 0.0) + number(value)
                        if counts is not None:
                            counts[pair] = counts.get(pair, 0) + 1
