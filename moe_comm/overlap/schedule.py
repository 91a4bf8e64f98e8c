"""In which order tiles are computed, which flags each waits for, and which it raises. No tensors, no process group.

A GEMM is cut into tiles of rows. Beside it runs the communication that brings its rows, or takes its results away:

    producer              flags                 consumer
    rows from rank 2  ──▶ [2] raised ─────────▶ tiles that touch rows of rank 2        gather_order, dispatch_order
    tiles of rank 2   ──▶ [2] counted to full ▶ rank 2 takes its results               scatter_order, combine_order

Rows stand as dispatch puts them: by (expert, source rank, token, slot). Rank 1 of 4, one expert, tiles of 4 rows:

    row        0   1 │ 2   3   4 │ 5   6   7 │ 8   9
    from rank  0   0 │ 1   1   1 │ 2   2   2 │ 3   3
    arrives    last  │ at once   │ 2nd       │ 3rd             ring from rank 1: 1 2 3 0

    plain cut  ╰──── A ────╯╰──── B ─────╯╰─ C ─╯              order B C A, but A keeps two own rows waiting for rank 0
    our cut    ╰ A ╯╰──── B ─────╯╰───── C ─────╯              order B C A, as many tiles

In the order of rows a rank would begin with A, and wait for the last arrival before it computes anything.
Sources: Flux (arXiv 2406.06858) for gather and scatter, COMET (2502.19811) for the stage of a tile and for columns
first in combine, UniEP (2604.19241) for flags per (expert, rank).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moe_comm.errors import InputError
from moe_comm.overlap.options import at_least_one
from moe_comm.overlap.ring import Ring
from moe_comm.overlap.tiles import Cut, Ints, Ragged, Tiles, chunk_rows


@dataclass(frozen=True)
class Tile:
    """Rows ``first_row`` to ``end_row - 1`` of one local expert, and one slice of the columns of the result.

    ranks: whose rows these are, ascending: they come from there (dispatch, gather) or go there (combine, scatter).
    stage: when it can begin, or what it serves; tiles are ordered by it.
    needs: flags that must be up before the tile is read. signals: counters that go up by one once it is written.
    """

    expert: int
    first_row: int
    end_row: int
    column_slice: int
    stage: int
    ranks: tuple[int, ...]
    needs: tuple[int, ...]
    signals: tuple[int, ...]

    @property
    def rows(self) -> range:
        return range(self.first_row, self.end_row)


@dataclass(frozen=True, eq=False)
class Schedule:
    """N tiles in the order of their computation; arrays for kernels, ``schedule[i]`` for readers.

    expert_N, first_row_N, end_row_N, slice_N, stage_N: int64 [N]; the fields of ``Tile``.
    ranks, needs, signals: the same as lists. num_flags: flags, or counters, that they are out of.
    """

    expert_N: Ints
    first_row_N: Ints
    end_row_N: Ints
    slice_N: Ints
    stage_N: Ints
    ranks: Ragged
    needs: Ragged
    signals: Ragged
    num_flags: int

    def __len__(self) -> int:
        return len(self.expert_N)

    def __getitem__(self, index: int) -> Tile:
        fields = (self.expert_N, self.first_row_N, self.end_row_N, self.slice_N, self.stage_N)
        at = range(len(self))[index]
        expert, first, end, column_slice, stage = (int(field[at]) for field in fields)
        return Tile(expert, first, end, column_slice, stage, self.ranks[at], self.needs[at], self.signals[at])

    def __iter__(self) -> Iterator[Tile]:
        return (self[index] for index in range(len(self)))

    @property
    def rows_N(self) -> Ints:
        """Rows of each tile."""
        return self.end_row_N - self.first_row_N

    def expected_F(self) -> Ints:
        """For each counter how many tiles signal it: full at that value. 0 where there is nothing to wait for."""
        return np.bincount(self.signals.values, minlength=self.num_flags)


def dispatch_order(rows_EW: ArrayLike, ring: Ring, cut: Cut, *, flags_per_expert: bool = False) -> Schedule:
    """Dispatch + grouped GEMM: a tile's stage is the ring distance of the *latest* rank whose rows it holds (COMET).

    Tiles are sorted by (stage, expert, row). Rank 1 of 4, two experts, tiles of 4 rows:

        from rank    0   1   2   3
        expert 0     2   3   3   2        rows 0-1 │ 2-4 │ 5-7 │ 8-9
        expert 1     0   4   1   0        rows        10-13 │ 14

        stage 0      expert 1 rows 10-13      ranks 1         can begin at once
        stage 1      expert 0 rows  2-5       ranks 1 2
                     expert 1 row  14         ranks 2
        stage 2      expert 0 rows  6-9       ranks 2 3
        stage 3      expert 0 rows  0-1       ranks 0

    For one worker that goes in order: where rows arrive round the ring, no other order of these tiles ends earlier; and
    over all orders of arrival the worst wait is no longer than any other's (own rows are there, and go first).

    Args:
        rows_EW: [E, W] whole numbers, rows of each local expert from each source rank. Or rows_EWC [E, W, C], where
            each source sends its tokens in C chunks: a flag for each (source, chunk), chunks of a source in order.
        flags_per_expert: a flag for each (expert, source) as in UniEP, number ``expert * W + source``; else for each
            source, number ``source``. With chunks, W * C in place of W, and ``source * C + chunk`` of the source.

    Raises:
        InputError: rows_EW has another shape or dtype, or counts below zero.
    """
    rows_EWC = _counts(rows_EW, ring, (2, 3))
    chunks = rows_EWC.shape[2]
    stage_F = (ring.distance_W[:, None] * chunks + np.arange(chunks)).reshape(-1)
    tiles = Tiles.of(rows_EWC, stage_F, cut)
    flags = tiles.flags
    num_flags = stage_F.size
    if flags_per_expert:
        flags = Ragged(flags.offsets, flags.values + tiles.expert_N[flags.owners()] * num_flags)
        num_flags *= rows_EWC.shape[0]
    stage_N = tiles.flags.extreme(np.maximum, stage_F).astype(np.int64)
    order_N = np.argsort(stage_N, kind="stable")
    return _schedule(tiles, order_N, np.zeros_like(stage_N), stage_N[order_N], num_flags, needs=flags.take(order_N))


def row_order(rows_EW: ArrayLike, ring: Ring, cut: Cut) -> Schedule:
    """The order without overlap, to compare with: tiles as ``dispatch_order`` cuts them, in the order of rows."""
    staged = dispatch_order(rows_EW, ring, cut)
    order_N = np.argsort(staged.first_row_N, kind="stable")
    return Schedule(
        expert_N=staged.expert_N[order_N],
        first_row_N=staged.first_row_N[order_N],
        end_row_N=staged.end_row_N[order_N],
        slice_N=staged.slice_N,
        stage_N=staged.stage_N[order_N],
        ranks=staged.ranks.take(order_N),
        needs=staged.needs.take(order_N),
        signals=staged.signals,
        num_flags=staged.num_flags,
    )


def gather_order(rows_W: ArrayLike, ring: Ring, cut: Cut, chunks: int = 1) -> Schedule:
    """All-gather + GEMM: tiles of the own shard first, then shard after shard round the ring (Flux).

    Rank 2 of 4, shards of 4 rows, tiles of 2, two chunks a shard; a flag rises when its chunk has been copied:

        shard            0         1         2         3
        rows           0-1 2-3   4-5 6-7   8-9  ·    ·   ·
        flag            0   1     2   3     4   5    6   7
        order of tiles  4   5     6   7     0   1    2   3      ring from rank 2: 2 3 0 1

    Args:
        rows_W: [W] rows of each rank's shard; they may differ, and be zero.
        chunks: parts in which a shard travels, cut as ``chunk_rows`` does; flag ``source * chunks + chunk``.

    Raises:
        InputError: rows_W has another shape or dtype, or counts below zero. ConfigError: chunks below one.
    """
    rows_WC = chunk_rows(_counts(rows_W, ring, (1,))[0, :, 0], chunks, cut.tile_rows)
    return dispatch_order(rows_WC[None], ring, cut)


def combine_order(rows_EW: ArrayLike, ring: Ring, cut: Cut, slices: int = 1) -> Schedule:
    """Grouped GEMM + combine: all experts' tiles for the first slice of columns, then for the second, ... (COMET).

    A token's K results are in different experts. By rows, the first sum could begin only when nearly all experts are
    done; by columns, it begins after one slice of ``slices``:

                 slice 0       slice 1       slice 2
        expert 0  1  2  3       7  8  9     13 14 15         numbers: order of tiles
        expert 1  4  5  6      10 11 12     16 17 18
                           │
                           └─ the sums of slice 0 travel while slice 1 is computed

    Within a slice, tiles go by the turn of the *first* destination they serve, in the order of ``ring.scatters``: other
    hosts first, own rows last, and every rank at another destination. 4 ranks with as many rows for each:

        step        0     1     2     3
        rank 0      1     2     3     0        a column is a permutation: no destination has two writers
        rank 1      2     3     0     1
        rank 2      3     0     1     2
        rank 3      0     1     2     3

    Args:
        rows_EW: [E, W] whole numbers, rows of each local expert that go back to each rank.
        slices: parts of the columns; ``column_slices`` gives their bounds. Tiles signal counter
            ``slice * W + destination``, which is full at ``expected_F()[counter]``.

    Raises:
        InputError: rows_EW has another shape or dtype, or counts below zero. ConfigError: slices below one.
    """
    at_least_one("slices", slices)
    return _outgoing(_counts(rows_EW, ring, (2,)), ring, cut, slices)


def scatter_order(rows_W: ArrayLike, ring: Ring, cut: Cut, chunks: int = 1) -> Schedule:
    """GEMM + reduce-scatter: the rows of rank + 1 first, own rows last, so that ranks write to different ones (Flux).

    4 ranks with shards of one tile: the table in ``combine_order``. With hosts, other hosts' rows come first.

    Args:
        rows_W: [W] rows of each destination's shard; they may differ, and be zero.
        chunks: parts in which a shard travels, cut as ``chunk_rows`` does; counter ``destination * chunks + chunk``.

    Raises:
        InputError: rows_W has another shape or dtype, or counts below zero. ConfigError: chunks below one.
    """
    rows_WC = chunk_rows(_counts(rows_W, ring, (1,))[0, :, 0], chunks, cut.tile_rows)
    return _outgoing(rows_WC[None], ring, cut, 1)


def _outgoing(rows_EWC: Ints, ring: Ring, cut: Cut, slices: int) -> Schedule:
    """Tiles as producers of what leaves. A tile with rows for several ranks is due when the first of them is."""
    chunks = rows_EWC.shape[2]
    turn_F = (ring.turn_W[:, None] * chunks + np.arange(chunks)).reshape(-1)
    tiles = Tiles.of(rows_EWC, turn_F, cut)
    turn_N = tiles.flags.extreme(np.minimum, turn_F).astype(np.int64)
    order_N = np.argsort(turn_N, kind="stable")
    slice_N = np.repeat(np.arange(slices), len(order_N))
    all_N = np.tile(order_N, slices)
    signals = tiles.flags.take(all_N)
    signals = Ragged(signals.offsets, signals.values + slice_N[signals.owners()] * turn_F.size)
    stage_N = turn_N[all_N] + slice_N * turn_F.size
    return _schedule(tiles, all_N, slice_N, stage_N, slices * turn_F.size, signals=signals)


def _schedule(
    tiles: Tiles,
    order_N: Ints,
    slice_N: Ints,
    stage_N: Ints,
    num_flags: int,
    needs: Ragged | None = None,
    signals: Ragged | None = None,
) -> Schedule:
    """``tiles`` in ``order_N``; the other arguments are in that order already."""
    return Schedule(
        expert_N=tiles.expert_N[order_N],
        first_row_N=tiles.first_row_N[order_N],
        end_row_N=tiles.end_row_N[order_N],
        slice_N=slice_N,
        stage_N=stage_N,
        ranks=tiles.ranks.take(order_N),
        needs=Ragged.empty(len(order_N)) if needs is None else needs,
        signals=Ragged.empty(len(order_N)) if signals is None else signals,
        num_flags=num_flags,
    )


def _counts(rows: ArrayLike, ring: Ring, dims: tuple[int, ...]) -> Ints:
    """Checked, as [E, W, C]."""
    given = np.asarray(rows)
    named = " or ".join({1: "[W]", 2: "[E, W]", 3: "[E, W, C]"}[dim] for dim in dims)
    ranks = given.shape[min(1, given.ndim - 1)] if given.ndim in dims else -1
    if ranks != ring.world or given.dtype.kind not in "iu":
        raise InputError(
            f"rows must be whole numbers of shape {named} with W = {ring.world} ranks; got shape {given.shape}, "
            f"{given.dtype}"
        )
    if given.size and given.min() < 0:
        raise InputError(f"rows must not be negative; got {given.min()}")
    shape = {1: (1, ring.world, 1), 2: (*given.shape, 1), 3: given.shape}[given.ndim]
    if not shape[-1]:
        raise InputError(f"rows must have at least one chunk of each source; got shape {given.shape}")
    return given.astype(np.int64).reshape(shape)
