"""Packing of the tokens of a source into sequences of fixed length.

A sequence consists of segments, which are ranges of tokens of the file, followed by padding. The target of a token is
the next token.

    file        a a a . b b b b b . c c .          "." ends a document; seq_len 4
    contiguous  [a a a .][b b b b][b . c c]        joined: targets  a a . b | b b b b | . c c .
                                                   separate:        a a . - | b b b b | . - c .
    best fit    [a a a .][b b b b][c c . _][b . _ _]

"-" and padding "_" are targets that a loss ignores (``IGNORE``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moe_comm.train.data.settings import DocumentMode, PackingName
from moe_comm.train.data.tokenfile import Ints, TokenFile

IGNORE = -100
"""Target that a loss ignores."""

Segments = list[tuple[int, int]]
"""(position of the first token in the file, number of tokens) of each segment."""


@dataclass(frozen=True)
class TokenRange:
    """Tokens [start, stop) of ``file``: the training or the held-out split. A cut document counts as two."""

    file: TokenFile
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def document_starts(self, after: int, upto: int) -> Ints:
        """Return the positions p of document starts with after < p <= upto. The end of the range counts as one."""
        offsets = self.file.offsets
        positions = np.asarray(
            offsets[np.searchsorted(offsets, after, "right") : np.searchsorted(offsets, upto, "right")]
        )
        if upto >= self.stop and (not len(positions) or positions[-1] < self.stop):
            positions = np.append(positions, self.stop)
        return positions

    def bounds(self) -> Ints:
        """Return [documents + 1]: the start of each document in the range, and the end of the range."""
        return np.concatenate([[self.start], self.document_starts(self.start, self.stop)]).astype(np.int64)


@dataclass(frozen=True)
class Row:
    """One sequence of ``length`` tokens, then padding.

    Ids, targets and positions are int64 [S], documents int32 [S]. Padding has its own document.
    """

    ids_S: Ints
    targets_S: Ints
    positions_S: Ints
    documents_S: npt.NDArray[np.int32]
    length: int = 0


class Packing:
    """Sequences of ``seq_len`` tokens of a token range.

    Attributes:
        sequences: number of sequences per epoch.
        endless: there is a sequence for every number, not only for those below ``sequences``.
    """

    endless = False
    sequences = 0

    def __init__(self, token_range: TokenRange, seq_len: int, separate: bool) -> None:
        self.token_range, self.seq_len, self.separate = token_range, seq_len, separate

    def segments(self, index: int) -> Segments:
        raise NotImplementedError

    def valid_targets(self, index_N: Ints) -> Ints:
        """Return the number of targets in each sequence, without reading tokens."""
        raise NotImplementedError

    def target_after(self, segments: Segments, number: int) -> int:
        """Return the position of the target of the last token of a segment at the end of a document; -1 for none."""
        raise NotImplementedError


class Contiguous(Packing):
    """The stream of documents, cut every ``seq_len`` tokens. The last sequence is padded.

    In an epoch, every token except the first is a target exactly once. If documents are separate, their first tokens
    are no targets.
    """

    def __init__(self, token_range: TokenRange, seq_len: int, separate: bool) -> None:
        super().__init__(token_range, seq_len, separate)
        self.sequences = max(0, -(-(len(token_range) - 1) // seq_len))

    def _starts(self, index_N: Ints) -> Ints:
        return self.token_range.start + index_N * self.seq_len

    def segments(self, index: int) -> Segments:
        start = int(self._starts(np.array([index]))[0])
        return [(start, min(self.seq_len, self.token_range.stop - 1 - start))]

    def valid_targets(self, index_N: Ints) -> Ints:
        start_N = self._starts(index_N)
        stop_N = np.minimum(start_N + self.seq_len, self.token_range.stop - 1)
        lengths = stop_N - start_N
        if not self.separate:
            return lengths
        offsets = self.token_range.file.offsets
        document_starts = np.searchsorted(offsets, stop_N, "right") - np.searchsorted(offsets, start_N, "right")
        result: Ints = lengths - document_starts
        return result

    def target_after(self, segments: Segments, number: int) -> int:
        return -1 if self.separate else sum(segments[number])


class RandomWindows(Contiguous):
    """Windows at random positions, which depend on ``key`` and the number of the sequence. There is no padding. An
    epoch has the number of windows that fit into the range; tokens can occur several times in it or not at all."""

    endless = True

    def __init__(self, token_range: TokenRange, seq_len: int, separate: bool, key: tuple[int, ...]) -> None:
        super().__init__(token_range, seq_len, separate)
        self._key = key
        self.sequences = max(0, (len(token_range) - 1) // seq_len)

    def _starts(self, index_N: Ints) -> Ints:
        rngs = [np.random.default_rng((*self._key, int(index))) for index in index_N]
        last = len(self.token_range) - self.seq_len
        return self.token_range.start + np.array([rng.integers(last) for rng in rngs], np.int64)


class BestFit(Packing):
    """Best-fit packing of whole documents (Ding et al., arXiv 2404.10830).

    Documents are placed by decreasing length, each in the fullest sequence with enough room. Longer documents are cut
    into full sequences and a rest. In an epoch, every token is an input exactly once. The index takes 12 bytes per
    document, and a few microseconds to compute.
    """

    def __init__(self, token_range: TokenRange, seq_len: int, separate: bool) -> None:
        super().__init__(token_range, seq_len, separate)
        starts, lengths = self._pieces()
        rows = self._fill(lengths)
        order = np.argsort(rows, kind="stable")  # within a sequence: longest first, in order of placement
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
        """Return the number of tokens except those at the end of a document without a next target."""
        segments = self.segments(index)
        total = sum(length for _, length in segments)
        ends = segments if self.separate else segments[-1:]
        return total - sum(len(self.token_range.document_starts(at + n - 1, at + n)) for at, n in ends)

    def _pieces(self) -> tuple[Ints, Ints]:
        """Return starts and lengths of all documents, cut to at most ``seq_len``, in order of decreasing length."""
        bounds = self.token_range.bounds()
        sizes = np.diff(bounds)
        parts = -(-sizes // self.seq_len)
        document = np.repeat(np.arange(len(sizes)), parts)
        part = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
        starts = bounds[document] + part * self.seq_len
        lengths = np.minimum(bounds[document + 1] - starts, self.seq_len)
        order = np.argsort(-lengths, kind="stable")
        return starts[order], lengths[order]

    def _fill(self, lengths: Ints) -> Ints:
        """Return the sequence of each part. Bit r of ``free`` is set if some sequence has room for exactly r tokens."""
        rows = np.empty(len(lengths), np.int64)
        open_rows: list[list[int]] = [[] for _ in range(self.seq_len + 1)]
        free, num_rows = 0, 0
        for part, length in enumerate(lengths.tolist()):
            fitting = free >> length
            if fitting:
                space = length + (fitting & -fitting).bit_length() - 1  # the smallest space that fits
                row = open_rows[space].pop()
                if not open_rows[space]:
                    free &= ~(1 << space)
            else:
                space, row = self.seq_len, num_rows
                num_rows += 1
            rows[part] = row
            if space > length:
                open_rows[space - length].append(row)
                free |= 1 << (space - length)
        return rows


def make_packing(
    kind: PackingName, tokens: TokenRange, seq_len: int, mode: DocumentMode, key: tuple[int, ...]
) -> Packing:
    """Return the packing of ``kind``. ``key`` is the seed of random positions."""
    separate = mode == "separate"
    if kind == "random":
        return RandomWindows(tokens, seq_len, separate, key)
    return (Contiguous if kind == "contiguous" else BestFit)(tokens, seq_len, separate)


class DocumentRun(NamedTuple):
    """Tokens of one document in one sequence.

    start: position of the first token in the file. closed: the document ends here, so that the last token has no
    target if documents are separate.
    """

    start: int
    length: int
    closed: bool


def document_runs(packing: Packing, index: int) -> list[DocumentRun]:
    """Return the documents of sequence ``index`` in order, without reading tokens; none for -1."""
    runs = []
    for start, length in packing.segments(index) if index >= 0 else []:
        ends = packing.token_range.document_starts(start, start + length).tolist()
        open_end = [] if ends and ends[-1] == start + length else [start + length]
        for end in (*ends, *open_end):
            runs.append(DocumentRun(start, end - start, not (open_end and end == open_end[0])))
            start = end
    return runs


def read_run(packing: Packing, run: DocumentRun, begin: int, size: int) -> tuple[Ints, Ints]:
    """Return ids and targets [size] of the tokens of ``run`` from ``begin``, with separate documents."""
    start, stop = run.start + begin, run.start + begin + size
    tokens = packing.token_range.file.read(start, min(stop + 1, packing.token_range.stop))
    targets = np.full(size, IGNORE, np.int64)
    targets[: len(tokens) - 1] = tokens[1:]
    if run.closed and begin + size == run.length:
        targets[-1] = IGNORE
    return tokens[:size].astype(np.int64), targets


def read_row(packing: Packing, index: int) -> Row:
    """Return sequence ``index`` of ``packing``; only padding for -1."""
    seq_len, token_range = packing.seq_len, packing.token_range
    row = Row(
        np.full(seq_len, token_range.file.end_of_text, np.int64),
        np.full(seq_len, IGNORE, np.int64),
        np.arange(seq_len),
        np.zeros(seq_len, np.int32),
    )
    segments = packing.segments(index) if index >= 0 else []
    breaks = [np.zeros(1, np.int64)]  # positions in the row at which a document or the padding starts
    at = 0
    for number, (start, length) in enumerate(segments):
        stop = start + length
        tokens = token_range.file.read(start, min(stop + 1, token_range.stop))
        row.ids_S[at : at + length] = tokens[:length]
        row.targets_S[at : at + len(tokens) - 1] = tokens[1:]
        starts = token_range.document_starts(start, stop) - start
        if len(starts) and starts[-1] == length:
            target = packing.target_after(segments, number)
            row.targets_S[at + length - 1] = token_range.file.read(target, target + 1)[0] if target >= 0 else IGNORE
            starts = starts[:-1]
        if packing.separate:
            row.targets_S[at + starts - 1] = IGNORE
        at += length
        breaks += [at - length + starts, np.array([at])]
    if packing.separate:
        positions = np.concatenate(breaks)
        is_start = np.zeros(seq_len + 1, bool)
        is_start[positions] = True
        row.documents_S[:] = is_start[:seq_len].cumsum() - 1
        document_starts = np.flatnonzero(is_start[:seq_len])
        row.positions_S[:] -= document_starts[row.documents_S]
    return replace(row, length=at)
