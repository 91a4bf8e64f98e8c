"""Read lines of large or corrupted files in bounded memory: all of them, or an even sample."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_comm.observe import records
from moe_comm.observe.records import RankStep
from moe_comm.runtime.untrusted import MAX_LINE, lines_of, open_regular

PROBE_BYTES = 1 << 18


def spread_lines(path: Path, most: int) -> Iterator[bytes]:
    """Yield about ``most`` evenly sampled complete lines of a file, including the first and last, or all if there are
    fewer. A last line without newline is skipped.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(PROBE_BYTES)
        length = len(head) / max(head.count(b"\n"), 1)
        if size <= most * length:
            yield from all_lines(path)
            return
        if os.lseek(file.fileno(), 0, os.SEEK_HOLE) < size:  # no writer leaves holes, so do not sample them
            yield from itertools.islice(all_lines(path), most)
            return
        reached = 0
        for number in range(most):
            offset = int(max(size - 1.5 * length, 0) * number / max(most - 1, 1))
            if offset < reached:
                continue
            file.seek(offset)
            if offset > reached:
                file.readline(MAX_LINE)
            raw = file.readline(MAX_LINE)
            reached = file.tell()
            if raw.endswith(b"\n"):
                yield raw


def all_lines(path: Path) -> Iterator[bytes]:
    """Yield all complete lines of a file."""
    return (raw for raw in lines_of(path) if raw.endswith(b"\n"))


def object_of(raw: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if there is none."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number(value: object) -> float:
    """Return a JSON number as a float; NaN for other values and for integers beyond the range of floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_LINES, MOST_RANKS, MOST_CELLS = 200_000, 4096, 1 << 20
RANK_VALUES = ("total", "compute", "communication", "data", "checkpoint", "memory_bytes")


@dataclass(frozen=True)
class RankLines:
    """N step lines of R ranks.

    index_N: rank index of each line. begin_N: beginning of the step in seconds since 1970. values: [N] values of each
    of ``RANK_VALUES``. sent, waits: [R] bytes and seconds per step by kind. peers, probes: bytes per step and probe
    seconds by (sending, receiving) rank index.
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
    """Read at most about ``MOST_LINES`` lines of the run folder ``path``; append problems to ``notes``."""
    folder = path / records.RANKS
    files = sorted(folder.glob("rank-*.jsonl")) if folder.is_dir() else []
    if not files:
        notes.append(f"{records.RANKS}/ is missing or empty: no data of single ranks")
    if len(files) > MOST_RANKS:
        notes.append(f"{records.RANKS}/ has {len(files)} ranks; {MOST_RANKS} evenly sampled ranks are shown")
        files = [files[i] for i in np.linspace(0, len(files) - 1, MOST_RANKS).astype(int)]
    most = max(MOST_LINES // max(len(files), 1), 8)
    index: dict[int, int] = {}
    hosts: list[str] = []
    rows: list[Floats] = []
    sums = _Sums()
    bad = 0
    for file in files:
        file_rows: list[list[float]] = []
        try:
            for raw in spread_lines(file, most):
                try:
                    line = records.parse(object_of(raw) or {}, RankStep)
                    if not (0 <= line.step < 2**53 and 0 <= line.rank < 2**31):
                        raise ValueError("the step or rank is out of range")
                    values = [number(getattr(line, name)) for name in RANK_VALUES]
                    position = index.setdefault(line.rank, len(index))
                    if position == len(hosts):
                        hosts.append(line.host[:200])
                    file_rows.append([number(line.step), position, number(line.begin_s), *values])
                    sums.add(line, position)
                except ValueError:
                    bad += 1
        except OSError as error:
            notes.append(f"{file.name} cannot be read: {error.strerror or error}")
        rows.append(np.array(file_rows, dtype=np.float64).reshape(len(file_rows), 3 + len(RANK_VALUES)))
    if bad:
        notes.append(f"{records.RANKS}/: skipped {bad} invalid line(s)")
    return _table(index, hosts, rows, sums)


def _table(index: dict[int, int], hosts: list[str], rows: list[Floats], sums: _Sums) -> RankLines:
    """Build the table with ranks in rank order."""
    order = sorted(index)
    new_index = {index[rank]: position for position, rank in enumerate(order)}
    table = np.concatenate([np.zeros((0, 3 + len(RANK_VALUES))), *rows])
    renumber = np.array([new_index[old] for old in range(len(order))], dtype=np.int64)
    steps = np.array([max(sums.lines.get(index[rank], 0), 1) for rank in order], dtype=np.float64)

    def by_kind(sums_of: Mapping[str, Mapping[int, float]]) -> dict[str, Floats]:
        return {
            kind: np.array([sum_of_rank.get(index[rank], 0.0) for rank in order]) / steps
            for kind, sum_of_rank in sorted(sums_of.items())
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
        peers={
            (new_index[position], new_index[index[peer]]): nbytes / max(sums.lines[position], 1)
            for (position, peer), nbytes in sums.peers.items()
            if peer in index
        },
        probes={
            (new_index[index[peer]], new_index[position]): seconds / max(sums.probed[position, peer], 1)
            for (position, peer), seconds in sums.probes.items()
            if peer in index
        },
    )


class _Sums:
    """Sums over the lines of ranks; pairs are (index of the rank, number of the peer)."""

    def __init__(self) -> None:
        self.lines: Counter[int] = Counter()
        self.sent: dict[str, dict[int, float]] = {}
        self.waits: dict[str, dict[int, float]] = {}
        self.peers: dict[tuple[int, int], float] = defaultdict(float)
        self.probes: dict[tuple[int, int], float] = defaultdict(float)
        self.probed: Counter[tuple[int, int]] = Counter()

    def add(self, line: RankStep, position: int) -> None:
        self.lines[position] += 1
        for sums, values in ((self.sent, line.sent), (self.waits, line.waits)):
            for kind, value in values.items():
                if kind in sums or len(sums) < 16:
                    sums.setdefault(kind[:40], defaultdict(float))[position] += number(value)
        for pairs, values in ((self.peers, line.peers), (self.probes, line.links)):
            for name, value in values.items():
                if name.isdecimal() and len(name) < 10:
                    pair = (position, int(name))
                    if pair in pairs or len(pairs) < MOST_CELLS:
                        pairs[pair] += number(value)
                        self.probed[pair] += pairs is self.probes
