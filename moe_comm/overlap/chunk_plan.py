"""Which rows of a dispatch are sent in which chunk. Computed from row counts only; no tensor data is moved.

A chunk contains 1/C of the experts of each destination. For L local experts, the C chunks cut the list of experts at
L/C, 2 L/C, ...; a cut within an expert divides the rows of each source in that ratio. So most experts are received in
one chunk and need one GEMM, and a single expert is still cut into C chunks. Rank 1 of 3 with experts 0 and 1, in 4
chunks:

    rows_RD     expert 0                        expert 1
    from rank   0     0     1     2     2       0     1     1     2     2        own rows (1) are not sent
    chunk       0     1           0     1       3                 2     3

All ranks have the counts from the handshake, the exchange before rows move. A slot is a (token, k) pair. What a chunk
sends to one destination is a contiguous range of the slots sorted by expert. What it receives from one source is
scattered over the rows of the experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_comm.topology import ExpertPlacement

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RowRange:
    """Rows [first, end) of local expert ``expert``, as indices into the rows of this rank's experts."""

    expert: int
    first: int
    end: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.end)


@dataclass(frozen=True, eq=False)
class RowChunk:
    """One all-to-all of this rank.

    send_S: int64 positions, among the slots sorted by expert, of the rows to send, by destination.
    receive_R: int64 positions of the received rows among the rows of this rank's experts, by source.
    send_counts, receive_counts: rows to and from each rank; 0 for this rank.
    ranges: the received rows as row ranges, ascending.
    """

    send_S: Tensor
    receive_R: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    ranges: tuple[RowRange, ...]


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """All chunks of one rank, and the rows that stay on it.

    own: this rank's own rows for its experts.
    own_slots: the own rows' slots, in the slots sorted by expert. own_R: their positions among the experts' rows.
    """

    chunks: tuple[RowChunk, ...]
    own: tuple[RowRange, ...]
    own_slots: slice
    own_R: Tensor

    @cached_property
    def segments(self) -> RowSegments:
        """The chunks as segments, each in a separate group."""
        groups = tuple((chunk,) for chunk in range(len(self.chunks)))
        return RowSegments([chunk.ranges for chunk in self.chunks], self.own, groups)

    @classmethod
    def of(
        cls, rows_WE: Ints, placement: ExpertPlacement, rank: int, chunks: int, device: torch.device | None = None
    ) -> ChunkPlan:
        """Plan the chunks from the rows that each rank has for each expert.

        Args:
            chunks: Number of chunks, at least 1. Empty chunks are included, so all ranks have the same number.
        """
        offsets = placement.offsets
        rows_WL = rows_WE[:, offsets[rank] : offsets[rank + 1]]
        remote_W = np.arange(placement.world) != rank
        # ends_CLW: first row here of each (chunk, expert, source). cuts_CW: first slot to send of each (chunk, rank).
        start_LW = _starts(rows_WL.T)
        ends_CLW = start_LW + _cuts_by_source(rows_WL, chunks)
        cuts_CW = np.stack([_cuts(rows_WE[rank, lo:hi], chunks) for lo, hi in pairwise(offsets)], 1)
        cuts_CW += _starts(cuts_CW[-1])
        plan = []
        for chunk in range(chunks):
            (from_W, to_W), (first_LW, end_LW) = cuts_CW[chunk : chunk + 2], ends_CLW[chunk : chunk + 2]
            rows_LW = (end_LW - first_LW) * remote_W
            plan.append(
                RowChunk(
                    send_S=_indices(from_W, (to_W - from_W) * remote_W, device),
                    receive_R=_indices(first_LW.T, rows_LW.T, device),
                    send_counts=tuple(((to_W - from_W) * remote_W).tolist()),
                    receive_counts=tuple(rows_LW.sum(0).tolist()),
                    ranges=_row_ranges(first_LW, rows_LW),
                )
            )
        own_L1 = rows_WL[rank, :, None]
        own_slots = slice(int(cuts_CW[0, rank]), int(cuts_CW[-1, rank]))
        return cls(
            chunks=tuple(plan),
            own=_row_ranges(start_LW[:, rank, None], own_L1),
            own_slots=own_slots,
            own_R=_indices(start_LW[:, rank], own_L1[:, 0], device),
        )


def max_sent_rows(rows_WE: Ints, placement: ExpertPlacement) -> int:
    """Return the maximum over ranks of the rows that a rank sends to other ranks; the same number on every rank."""
    sums_WW = np.stack([rows_WE[:, lo:hi].sum(1) for lo, hi in pairwise(placement.offsets)], 1)
    return int((sums_WW.sum(1) - sums_WW.diagonal()).max(initial=0))


def ranges_by_source(rows_WE: Ints, placement: ExpertPlacement, rank: int) -> tuple[tuple[RowRange, ...], ...]:
    """Return the row ranges of each source rank among the rows of this rank's experts."""
    rows_WL = rows_WE[:, placement.offsets[rank] : placement.offsets[rank + 1]]
    start_LW = _starts(rows_WL.T)
    return tuple(_row_ranges(start_LW[:, w, None], rows_L[:, None]) for w, rows_L in enumerate(rows_WL))


@dataclass(frozen=True, eq=False)
class RowSegments:
    """The rows of this rank's experts, by segment. A segment is the rows that complete together: one chunk, or the rows
    of one peer.

    ranges: the row ranges of each segment, ascending. own: the row ranges of this rank's own rows.
    groups: the segments in the order in which results are computed if all rows are complete. The segments of a group
        are computed together.
    """

    ranges: Sequence[tuple[RowRange, ...]]
    own: tuple[RowRange, ...]
    groups: tuple[tuple[int, ...], ...]

    def merged(self, segments: Iterable[int], own: Iterable[RowRange] = ()) -> tuple[RowRange, ...]:
        """Return the row ranges of ``segments`` and ``own``; adjacent ones are merged."""
        ranges = [*own, *(row_range for segment in segments for row_range in self.ranges[segment])]
        return _merge_adjacent(sorted(ranges, key=lambda row_range: row_range.first))


class PendingOwnRows:
    """This rank's own rows that are not computed yet."""

    def __init__(self, segments: RowSegments) -> None:
        self._own = {row_range.expert: row_range for row_range in segments.own}
        self._segments = segments

    def join(self, completed: Sequence[int]) -> tuple[RowRange, ...]:
        """Remove the own rows of the experts of the completed segments. Return both, merged into long row ranges."""
        experts = {row_range.expert for segment in completed for row_range in self._segments.ranges[segment]}
        return self._segments.merged(completed, [self._own.pop(expert) for expert in experts if expert in self._own])

    def pop(self) -> RowRange | None:
        """Remove and return the own rows of the last expert; None if none are left."""
        return self._own.popitem()[1] if self._own else None


def _cuts(rows_L: Ints, chunks: int) -> Ints:
    """Return the first row of each chunk, and the end of the last, among rows sorted by expert; [C + 1]."""
    experts = len(rows_L)
    whole_experts, remainder = np.divmod(experts * np.arange(chunks + 1), chunks)
    before = np.concatenate(([0], np.cumsum(rows_L)))
    padded = np.append(rows_L, 0)
    cuts: Ints = before[whole_experts] + padded[whole_experts] * remainder // chunks
    return cuts


def _cuts_by_source(rows_WL: Ints, chunks: int) -> Ints:
    """Return [C + 1, L, W]: the first row of each chunk, and the end of the last, within each (expert, source)."""
    experts = np.arange(rows_WL.shape[1])
    cut_C = len(experts) * np.arange(chunks + 1)
    # Position of each cut within each expert, in units of 1 / C expert.
    position_CL = np.clip(cut_C[:, None] - chunks * experts, 0, chunks)
    cuts: Ints = rows_WL.T * position_CL[:, :, None] // chunks
    return cuts


def _starts(counts: Ints) -> Ints:
    """Return the exclusive prefix sum, in the shape of ``counts``."""
    flat = counts.reshape(-1)
    starts: Ints = (np.cumsum(flat) - flat).reshape(counts.shape)
    return starts


def _row_ranges(first_LX: Ints, rows_LX: Ints) -> tuple[RowRange, ...]:
    """Return the row ranges of each local expert, ascending."""
    filled = np.nonzero(rows_LX)
    firsts, rows = first_LX[filled].tolist(), rows_LX[filled].tolist()
    ranges = zip(filled[0].tolist(), firsts, rows, strict=True)
    return _merge_adjacent(RowRange(expert, first, first + count) for expert, first, count in ranges)


def _merge_adjacent(ranges: Iterable[RowRange]) -> tuple[RowRange, ...]:
    """Merge adjacent row ranges of the same expert."""
    merged: list[RowRange] = []
    for row_range in ranges:
        if merged and merged[-1].expert == row_range.expert and merged[-1].end == row_range.first:
            merged[-1] = RowRange(row_range.expert, merged[-1].first, row_range.end)
        else:
            merged.append(row_range)
    return tuple(merged)


def _indices(first_X: Ints, rows_X: Ints, device: torch.device | None) -> Tensor:
    """Concatenate the index ranges [first, first + rows)."""
    first, rows = first_X.reshape(-1), rows_X.reshape(-1)
    return torch.from_numpy(np.arange(rows.sum()) + np.repeat(first - _starts(rows), rows)).to(device)
