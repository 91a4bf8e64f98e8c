"""Cuts rows into tiles, and lists the ranks whose rows each tile holds. All functions work on whole numpy arrays.

512 local experts with rows of 64 ranks have 32768 segments and are cut in milliseconds; there are no loops over rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_comm.errors import ConfigError
from moe_comm.overlap.options import at_least_one

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Cut:
    """How rows are cut into tiles. A tile never holds rows of two experts.

    Args:
        tile_rows: Maximum number of rows of a tile.
        extra_tiles: Fraction of additional tiles that an expert may get to avoid tiles with rows of several ranks: 0
            cuts between ranks only if that needs no additional tile, 0.25 allows a quarter more, ``math.inf`` always
            cuts. Three cuts are tried, from fine to coarse: between all ranks; only where the ring order wraps around,
            between the rows that are received last and first; no cut between ranks.
    """

    tile_rows: int
    extra_tiles: float = 0.0

    def __post_init__(self) -> None:
        at_least_one("tile_rows", self.tile_rows)
        if not self.extra_tiles >= 0:
            raise ConfigError(f"extra_tiles must be a fraction of at least 0; got {self.extra_tiles!r}")


@dataclass(frozen=True, eq=False)
class Ragged:
    """N lists of integers, concatenated: list i is ``values[offsets[i]:offsets[i + 1]]``."""

    offsets: Ints
    values: Ints

    @classmethod
    def of_counts(cls, counts_N: Ints, values: Ints) -> Ragged:
        return cls(np.concatenate(([0], np.cumsum(counts_N))), values)

    @classmethod
    def empty(cls, num: int) -> Ragged:
        return cls(np.zeros(num + 1, np.int64), np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(self.values[self.offsets[index] : self.offsets[index + 1]].tolist())

    def take(self, order_N: Ints) -> Ragged:
        """Return the lists in another order."""
        counts_N = np.diff(self.offsets)[order_N]
        return Ragged.of_counts(counts_N, self.values[_spans(self.offsets[order_N], counts_N)])

    def owners(self) -> Ints:
        """Return the index of the list of each value."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def extreme(self, ufunc: np.ufunc, keys_F: NDArray[np.generic]) -> NDArray[np.generic]:
        """Reduce ``keys_F[values]`` of each list with ``np.maximum`` or ``np.minimum``; 0 for an empty list."""
        result = np.zeros(len(self), keys_F.dtype)
        nonempty = np.flatnonzero(np.diff(self.offsets))
        if len(nonempty):  # empty lists have no values, so the others are contiguous
            result[nonempty] = ufunc.reduceat(keys_F[self.values], self.offsets[nonempty])
        return result


@dataclass(frozen=True, eq=False)
class RowTiles:
    """Tiles in row order. ``flags``: the (rank, chunk) pairs whose rows each tile holds; ``ranks``: the ranks."""

    expert_N: Ints
    first_row_N: Ints
    end_row_N: Ints
    flags: Ragged
    ranks: Ragged

    @classmethod
    def of(cls, rows_EWC: Ints, stage_F: Ints, cut: Cut) -> RowTiles:
        """Cut rows in the order (expert, rank, chunk). ``stage_F``: step of each (rank, chunk), all different.

        In array names, P is the number of row ranges between two forced cuts.
        """
        rows_EF = rows_EWC.reshape(-1, stage_F.size)
        begins_EF = _begins(rows_EF, stage_F, cut)
        range_starts = np.flatnonzero(begins_EF)
        starts = _starts(rows_EF.reshape(-1))
        rows_P = np.add.reduceat(rows_EF.reshape(-1), range_starts) if len(range_starts) else np.zeros(0, np.int64)
        tiles_P = -(-rows_P // cut.tile_rows)
        range_N = np.repeat(np.arange(len(range_starts)), tiles_P)
        first_P = starts[range_starts]
        first_N = _spans(np.zeros_like(tiles_P), tiles_P) * cut.tile_rows + first_P[range_N]
        end_N = np.minimum(first_N + cut.tile_rows, (first_P + rows_P)[range_N])
        flags, ranks = (_touched(first_N, end_N, rows) for rows in (rows_EF, rows_EWC.sum(2)))
        return cls(range_starts[range_N] // stage_F.size, first_N, end_N, flags, ranks)


def _begins(rows_EF: Ints, stage_F: Ints, cut: Cut) -> NDArray[np.bool_]:
    """Return where tiles must start: for each expert, the finest of three cuts that its tile limit allows."""
    num_experts, num_flags = rows_EF.shape
    jumps = np.append(True, stage_F[1:] != stage_F[:-1] + 1)
    begins_EF = np.zeros((num_experts, num_flags), bool)
    begins_EF[:, 0] = True
    # Multiplied, not added: at 0.25, an expert with three tiles gets no additional one, an expert with four gets one.
    max_E = -(-rows_EF.sum(1) // cut.tile_rows) * (1 + cut.extra_tiles) if np.isfinite(cut.extra_tiles) else np.inf
    for begins_F in (jumps, np.ones(num_flags, bool)):
        rows_EP = np.add.reduceat(rows_EF, np.flatnonzero(begins_F), axis=1)
        begins_EF[(-(-rows_EP // cut.tile_rows)).sum(1) <= max_E] = begins_F
    return begins_EF


def chunk_rows(rows_W: ArrayLike, chunks: int, align: int = 1) -> Ints:
    """Return the rows of each chunk of each shard, int64 [W, chunks]: even, and cut at multiples of ``align``.

    If a shard has fewer than ``chunks`` blocks of ``align`` rows, some of its chunks are empty.
    """
    at_least_one("chunks", chunks)
    at_least_one("align", align)
    rows_W = np.asarray(rows_W, np.int64)
    blocks_W = -(-rows_W // align)
    ends = np.minimum(blocks_W[:, None] * np.arange(chunks + 1) // chunks * align, rows_W[:, None])
    rows_WC: Ints = np.diff(ends, axis=1)
    return rows_WC


def _touched(first_N: Ints, end_N: Ints, rows_EX: Ints) -> Ragged:
    """Return which columns of ``rows_EX`` have rows in each tile. Rows are ordered by (expert, column)."""
    nonempty = np.flatnonzero(rows_EX)
    ends = np.cumsum(rows_EX.reshape(-1))[nonempty]
    low_N = np.searchsorted(ends, first_N, side="right")
    high_N = np.searchsorted(ends, end_N, side="left") + 1
    return Ragged.of_counts(high_N - low_N, nonempty[_spans(low_N, high_N - low_N)] % rows_EX.shape[1])


def _starts(counts: Ints) -> Ints:
    """Return the exclusive prefix sum."""
    return np.cumsum(counts) - counts


def _spans(first_N: Ints, counts_N: Ints) -> Ints:
    """Concatenate the ranges [first, first + count)."""
    spans: Ints = np.arange(counts_N.sum()) + np.repeat(first_N - _starts(counts_N), counts_N)
    return spans
