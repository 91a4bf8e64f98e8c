"""The rows of one dispatch cut into chunks, each of which crosses to the experts, and back, by itself. No tensors move.

A chunk is a share of every destination's experts: C chunks of L local experts cut the list of experts at L/C, 2 L/C,
..., within an expert at that share of each source's rows. So most experts arrive whole, with one product each, and one
expert alone is cut into C parts all the same. Rank 1 of 3 with experts 0 and 1, in 4 chunks:

    rows_RD     expert 0                        expert 1
    from rank   0     0     1     2     2       0     1     1     2     2        own rows (1) do not travel
    chunk       0     1           0     1       3                 2     3

All of it follows from the counts that every rank has since the handshake. What leaves for one destination in a chunk is
a run of the slots sorted by expert; what arrives from one source is scattered over the experts' rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_comm.topology import ExpertPlacement

Words = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Rows [first, end) of the rows of this rank's experts, all of local expert ``expert``."""

    expert: int
    first: int
    end: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.end)


@dataclass(frozen=True, eq=False)
class Chunk:
    """What crosses at once.

    leaving_S: int64 places, among the slots sorted by expert, of what leaves this rank, in order of destination.
    arriving_R: int64 places among the rows of its experts of what arrives, in order of source.
    send, receive: rows to and from each rank; none to and from itself.
    pieces: what arrives as runs of rows, ascending.
    """

    leaving_S: Tensor
    arriving_R: Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, eq=False)
class Crossing:
    """All chunks of one rank, and the rows that stay on it.

    experts: the rows of each local expert that has any. own: this rank's own rows at its experts.
    own_slots: first and end of them among its slots sorted by expert; own_R: their places among its experts' rows.
    """

    chunks: tuple[Chunk, ...]
    experts: tuple[Piece, ...]
    own: tuple[Piece, ...]
    own_slots: slice
    own_R: Tensor

    @cached_property
    def parts(self) -> Parts:
        """The chunks as parts, each a group of its own."""
        groups = tuple((chunk,) for chunk in range(len(self.chunks)))
        return Parts([chunk.pieces for chunk in self.chunks], self.own, groups)

    @classmethod
    def of(
        cls, rows_WE: Words, placement: ExpertPlacement, rank: int, chunks: int, device: torch.device | None = None
    ) -> Crossing:
        """From the rows that each rank has for each expert.

        Args:
            chunks: at least 1; chunks without rows are there, too, so that all ranks have as many.
        """
        offsets = placement.offsets
        rows_WL = rows_WE[:, offsets[rank] : offsets[rank + 1]]
        away_W = np.arange(placement.world) != rank
        start_LW = _starts(rows_WL.T)
        ends_CLW = start_LW + _parts(rows_WL, chunks)
        cuts_CW = np.stack([_cuts(rows_WE[rank, lo:hi], chunks) for lo, hi in pairwise(offsets)], 1)
        cuts_CW += _starts(cuts_CW[-1])
        found = []
        for chunk in range(chunks):
            (from_W, to_W), (first_LW, end_LW) = cuts_CW[chunk : chunk + 2], ends_CLW[chunk : chunk + 2]
            rows_LW = (end_LW - first_LW) * away_W
            found.append(
                Chunk(
                    leaving_S=_ranges(from_W, (to_W - from_W) * away_W, device),
                    arriving_R=_ranges(first_LW.T, rows_LW.T, device),
                    send=tuple(((to_W - from_W) * away_W).tolist()),
                    receive=tuple(rows_LW.sum(0).tolist()),
                    pieces=_pieces(first_LW, rows_LW),
                )
            )
        own_L1 = rows_WL[rank, :, None]
        own_slots = slice(int(cuts_CW[0, rank]), int(cuts_CW[-1, rank]))
        return cls(
            chunks=tuple(found),
            experts=_pieces(start_LW[:, :1], rows_WL.sum(0)[:, None]),
            own=_pieces(start_LW[:, rank, None], own_L1),
            own_slots=own_slots,
            own_R=_ranges(start_LW[:, rank], own_L1[:, 0], device),
        )


def travelling_rows(rows_WE: Words, placement: ExpertPlacement) -> int:
    """The most rows that one rank sends to others; on every rank the same number."""
    sums_WW = np.stack([rows_WE[:, lo:hi].sum(1) for lo, hi in pairwise(placement.offsets)], 1)
    return int((sums_WW.sum(1) - sums_WW.diagonal()).max(initial=0))


def pieces_by_source(rows_WE: Words, placement: ExpertPlacement, rank: int) -> tuple[tuple[Piece, ...], ...]:
    """Where the rows of each rank stand among those of this rank's experts."""
    rows_WL = rows_WE[:, placement.offsets[rank] : placement.offsets[rank + 1]]
    start_LW = _starts(rows_WL.T)
    return tuple(_pieces(start_LW[:, w, None], rows_L[:, None]) for w, rows_L in enumerate(rows_WL))


@dataclass(frozen=True, eq=False)
class Parts:
    """The rows of this rank's experts as they complete, part by part.

    pieces: the row ranges of each part, ascending. own: those of this rank's own rows.
    groups: the parts, in the order in which results are computed for them where all rows are there; those of one group
        are computed together.
    """

    pieces: Sequence[tuple[Piece, ...]]
    own: tuple[Piece, ...]
    groups: tuple[tuple[int, ...], ...]

    def of(self, parts: Iterable[int], own: Iterable[Piece] = ()) -> tuple[Piece, ...]:
        """The row ranges of ``parts`` and ``own``, joined where they are neighbours."""
        pieces = [*own, *(piece for part in parts for piece in self.pieces[part])]
        return merged(sorted(pieces, key=lambda piece: piece.first))


class Board:
    """Which of this rank's own rows are not computed yet."""

    def __init__(self, parts: Parts) -> None:
        self._own = {piece.expert: piece for piece in parts.own}
        self._parts = parts

    def arrived(self, parts: Sequence[int]) -> tuple[Piece, ...]:
        """What is to be computed once ``parts`` are complete: their rows, and with them own rows of the same experts,
        in row ranges as long as possible."""
        touched = {piece.expert for part in parts for piece in self._parts.pieces[part]}
        return self._parts.of(parts, [self._own.pop(expert) for expert in touched if expert in self._own])

    def own(self) -> Piece | None:
        """Own rows of one more expert, of those whose other rows come last first; None: all are computed."""
        return self._own.popitem()[1] if self._own else None


def _cuts(rows_L: Words, chunks: int) -> Words:
    """Where each chunk begins, and the last ends, among rows that stand by expert; [C + 1]."""
    experts = len(rows_L)
    whole, share = np.divmod(experts * np.arange(chunks + 1), chunks)
    before = np.concatenate(([0], np.cumsum(rows_L)))
    padded = np.append(rows_L, 0)
    cuts: Words = before[whole] + padded[whole] * share // chunks
    return cuts


def _parts(rows_WL: Words, chunks: int) -> Words:
    """[C + 1, L, W] where each chunk begins, and the last ends, within each (expert, source)."""
    experts = np.arange(rows_WL.shape[1])
    at_C = len(experts) * np.arange(chunks + 1)
    # How far, in C-ths of an expert, each cut lies within each expert.
    reach_CL = np.clip(at_C[:, None] - chunks * experts, 0, chunks)
    parts: Words = rows_WL.T * reach_CL[:, :, None] // chunks
    return parts


def _starts(counts: Words) -> Words:
    """Sum of all counts before each."""
    flat = counts.reshape(-1)
    starts: Words = (np.cumsum(flat) - flat).reshape(counts.shape)
    return starts


def _pieces(first_LX: Words, rows_LX: Words) -> tuple[Piece, ...]:
    """Runs of rows, ascending, of each local expert."""
    filled = np.nonzero(rows_LX)
    firsts, rows = first_LX[filled].tolist(), rows_LX[filled].tolist()
    found = zip(filled[0].tolist(), firsts, rows, strict=True)
    return merged(Piece(expert, first, first + count) for expert, first, count in found)


def merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Neighbours of one expert joined."""
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].expert == piece.expert and found[-1].end == piece.first:
            found[-1] = Piece(piece.expert, found[-1].first, piece.end)
        else:
            found.append(piece)
    return tuple(found)


def _ranges(first_X: Words, rows_X: Words, device: torch.device | None) -> Tensor:
    """All numbers of all runs of ``rows`` from ``first`` on, end to end."""
    first, rows = first_X.reshape(-1), rows_X.reshape(-1)
    return torch.from_numpy(np.arange(rows.sum()) + np.repeat(first - _starts(rows), rows)).to(device)
