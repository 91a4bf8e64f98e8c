"""How the tokens of one source become sequences of fixed length.

A sequence is one or more segments, each a run of tokens of the file; the rest of it is padding. The target of a token
is the token after it.

    file        a a a . b b b b b . c c .          "." ends a document; seq_len 4
    contiguous  [a a a .][b b b b][b . c c]        joined: targets  a a . b | b b b b | . c c .
                                                   separate:        a a . - | b b b b | . - c .
    best fit    [a a a .][b b b b][c c . _][b . _ _]

"-" and padding "_" are targets that no loss counts (``IGNORE``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moe_comm.train.data.settings import DocumentMode
from moe_comm.train.data.settings import Packing as Kind
from moe_comm.train.data.tokenfile import Ints, TokenFile

IGNORE = -100
"""Targets that no loss counts."""

Segments = list[tuple[int, int]]
"""(place of the first token in the file, tokens)."""


@dataclass(frozen=True)
class View:
    """Tokens [start, stop) of ``file``: the part for training or the held-out one. A document cut by it is two."""

    file: TokenFile
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def document_starts(self, after: int, upto: int) -> Ints:
        """Places p with after < p <= upto where a document starts, in order; the view's end counts as one."""
        offsets = self.file.offsets
        places = np.asarray(offsets[np.searchsorted(offsets, after, "right") : np.searchsorted(offsets, upto, "right")])
        if upto >= self.stop and (not len(places) or places[-1] < self.stop):
            places = np.append(places, self.stop)
        return places

    def bounds(self) -> Ints:
        """Where each document of the view starts, and its end: [documents + 1]."""
        return np.concatenate([[self.start], self.document_starts(self.start, self.stop)]).astype(np.int64)


@dataclass(frozen=True)
class Row:
    """One sequence as arrays [S]: ids, targets, positions int64; documents int32 (padding is a document of its own)."""

    ids_S: Ints
    targets_S: Ints
    positions_S: Ints
    documents_S: npt.NDArray[np.int32]


class Packing(Protocol):
    """Sequences of ``seq_len`` tokens over a view.

    endless: there is a sequence for every number; otherwise for those below ``sequences``, which make an epoch.
    """

    view: View
    seq_len: int
    separate: bool
    sequences: int
    endless: bool

    def segments(self, index: int) -> Segments: ...
    def valid_targets(self, index_N: Ints) -> Ints:
        """Targets that count, of each sequence, without reading a token."""
        ...

    def target_after(self, segments: Segments, number: int) -> int:
        """Place of the target of the last token of segment ``number``, where a document ends there; -1 for none."""
        ...


class Contiguous:
    """The stream of documents, cut every ``seq_len`` tokens. The last sequence may be short and is padded, so that an
    epoch has every token but the first as a target exactly once (those that start a document not, if separate)."""

    endless = False

    def __init__(self, view: View, seq_len: int, separate: bool) -> None:
        self.view, self.seq_len, self.separate = view, seq_len, separate
        self.sequences = max(0, -(-(len(view) - 1) // seq_len))

    def segments(self, index: int) -> Segments:
        start = self.view.start + index * self.seq_len
        return [(start, min(self.seq_len, self.view.stop - 1 - start))]

    def valid_targets(self, index_N: Ints) -> Ints:
        start_N = self.view.start + index_N * self.seq_len
        stop_N = np.minimum(start_N + self.seq_len, self.view.stop - 1)
        return _window_targets(self.view, start_N, stop_N, self.separate)

    def target_after(self, segments: Segments, number: int) -> int:
        return -1 if self.separate else sum(segments[number])


class RandomWindows:
    """Windows at places drawn anew for every number, from ``key`` and the number alone. Nothing is padded; an epoch,
    as far as one can speak of it, is as many sequences as contiguous ones would be."""

    endless = True

    def __init__(self, view: View, seq_len: int, separate: bool, key: tuple[int, ...]) -> None:
        self.view, self.seq_len, self.separate, self._key = view, seq_len, separate, key
        self.sequences = max(0, (len(view) - 1) // seq_len)

    def _start(self, index: int) -> int:
        rng = np.random.default_rng((*self._key, index))
        return self.view.start + int(rng.integers(len(self.view) - self.seq_len))

    def segments(self, index: int) -> Segments:
        return [(self._start(index), self.seq_len)]

    def valid_targets(self, index_N: Ints) -> Ints:
        start_N = np.array([self._start(int(index)) for index in index_N], np.int64)
        return _window_targets(self.view, start_N, start_N + self.seq_len, self.separate)

    def target_after(self, segments: Segments, number: int) -> int:
        return -1 if self.separate else sum(segments[number])


class BestFit:
    """Whole documents, each in the fullest sequence that still has room for it, the longest first; documents longer
    than a sequence are cut into full ones and a rest (Ding et al., arXiv 2404.10830). An epoch has every token as an
    input exactly once. Its index takes 12 bytes of memory a document and some microseconds to make."""

    endless = False

    def __init__(self, view: View, seq_len: int, separate: bool) -> None:
        self.view, self.seq_len, self.separate = view, seq_len, separate
        starts, lengths = self._pieces()
        rows = self._fill(lengths)
        order = np.argsort(rows, kind="stable")  # within a sequence: longest first, as they were put there
        self._starts, self._lengths = starts[order], lengths[order].astype(np.int32)
        self.sequences = int(rows.max()) + 1 if len(rows) else 0
        self._rows = np.searchsorted(rows[order], np.arange(self.sequences + 1))

    def segments(self, index: int) -> Segments:
        part = slice(self._rows[index], self._rows[index + 1])
        return list(zip(self._starts[part].tolist(), self._lengths[part].tolist(), strict=True))

    def valid_targets(self, index_N: Ints) -> Ints:
        return np.array([self._count(int(index)) for index in index_N], np.int64)

    def target_after(self, segments: Segments, number: int) -> int:
        if self.separate or number + 1 == len(segments):
            return -1
        return segments[number + 1][0]

    def _count(self, index: int) -> int:
        """All tokens but those behind which a document ends and no target follows. A segment never goes past one."""
        segments = self.segments(index)
        total = sum(length for _, length in segments)
        ends = segments if self.separate else segments[-1:]
        return total - sum(len(self.view.document_starts(at + n - 1, at + n)) for at, n in ends)

    def _pieces(self) -> tuple[Ints, Ints]:
        """Starts and lengths of all documents, those longer than a sequence in parts; the longest first."""
        bounds = self.view.bounds()
        sizes = np.diff(bounds)
        parts = -(-sizes // self.seq_len)
        document = np.repeat(np.arange(len(sizes)), parts)
        part = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
        starts = bounds[document] + part * self.seq_len
        lengths = np.minimum(bounds[document + 1] - starts, self.seq_len)
        order = np.argsort(-lengths, kind="stable")
        return starts[order], lengths[order]

    def _fill(self, lengths: Ints) -> Ints:
        """The sequence of each piece. ``room`` has bit r set where some sequence has room for exactly r tokens."""
        rows = np.empty(len(lengths), np.int64)
        open_rows: list[list[int]] = [[] for _ in range(self.seq_len + 1)]
        room, made = 0, 0
        for piece, length in enumerate(lengths.tolist()):
            fitting = room >> length
            if fitting:
                left = length + (fitting & -fitting).bit_length() - 1
                row = open_rows[left].pop()
                if not open_rows[left]:
                    room &= ~(1 << left)
            else:
                left, row = self.seq_len, made
                made += 1
            rows[piece] = row
            if left > length:
                open_rows[left - length].append(row)
                room |= 1 << (left - length)
        return rows


def make_packing(kind: Kind, view: View, seq_len: int, mode: DocumentMode, key: tuple[int, ...]) -> Packing:
    """``key``: what random places are drawn from."""
    separate = mode == "separate"
    if kind == "random":
        return RandomWindows(view, seq_len, separate, key)
    return (Contiguous if kind == "contiguous" else BestFit)(view, seq_len, separate)


def read_row(packing: Packing, index: int) -> Row:
    """Sequence ``index`` of ``packing``; -1: padding alone.

    Raises:
        CorruptFile: the tokens do not match their checksum.
    """
    seq_len, view = packing.seq_len, packing.view
    row = _padding(seq_len, view.file.end_of_text)
    segments = packing.segments(index) if index >= 0 else []
    breaks = [np.zeros(1, np.int64)]
    at = 0
    for number, (start, length) in enumerate(segments):
        stop = start + length
        tokens = view.file.read(start, min(stop + 1, view.stop))
        row.ids_S[at : at + length] = tokens[:length]
        row.targets_S[at : at + len(tokens) - 1] = tokens[1:]
        new = view.document_starts(start, stop) - start
        if len(new) and new[-1] == length:
            target = packing.target_after(segments, number)
            row.targets_S[at + length - 1] = view.file.read(target, target + 1)[0] if target >= 0 else IGNORE
            new = new[:-1]
        if packing.separate:
            row.targets_S[at + new - 1] = IGNORE
        at += length
        breaks += [at - length + new, np.array([at])]
    if packing.separate:
        places = np.concatenate(breaks)
        marks = np.zeros(seq_len + 1, bool)
        marks[places] = True
        row.documents_S[:] = marks[:seq_len].cumsum() - 1
        first = np.flatnonzero(marks[:seq_len])
        row.positions_S[:] -= first[row.documents_S]
    return row


def _padding(seq_len: int, end_of_text: int) -> Row:
    return Row(
        np.full(seq_len, end_of_text, np.int64),
        np.full(seq_len, IGNORE, np.int64),
        np.arange(seq_len),
        np.zeros(seq_len, np.int32),
    )


def _window_targets(view: View, start_N: Ints, stop_N: Ints, separate: bool) -> Ints:
    """Targets of the tokens [start, stop) of a stream: all of them, or those that do not start a document."""
    lengths = stop_N - start_N
    if not separate:
        return lengths
    offsets = view.file.offsets
    starts = np.searchsorted(offsets, stop_N, "right") - np.searchsorted(offsets, start_N, "right")
    result: Ints = lengths - starts
    return result
