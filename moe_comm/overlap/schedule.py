"""Tile schedules: the order of tiles, the flags that each tile waits for, and the flags that it raises.

A GEMM is cut into tiles of rows. Communication runs concurrently: it delivers the rows, or sends the results:

    producer              flags                 consumer
    rows from rank 2  ──▶ [2] raised ─────────▶ tiles with rows of rank 2              gather_order, dispatch_order
    tiles of rank 2   ──▶ [2] counted to full ▶ rank 2 reads its results               scatter_order

Rows have dispatch's order: (expert, source rank, token, slot). Rank 1 of 4, one expert, tiles of 4 rows:

    row        0   1 │ 2   3   4 │ 5   6   7 │ 8   9
    from rank  0   0 │ 1   1   1 │ 2   2   2 │ 3   3
    received   last  │ own rows  │ 1st       │ 2nd             ring from rank 1: 1 2 3 0

    plain cut  ╰──── A ────╯╰──── B ─────╯╰─ C ─╯              order B C A, but two own rows in A wait for rank 0
    this cut   ╰ A ╯╰──── B ─────╯╰───── C ─────╯              order B C A, same number of tiles

In row order, a rank would start with A and wait for the last rows before it computes anything. Sources: Flux (arXiv
2406.06858) for gather and scatter, COMET (2502.19811) for the stage of a tile, UniEP (2604.19241) for flags per
(expert, rank).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moe_comm.errors import InputError
from moe_comm.overlap.ring import Ring
from moe_comm.overlap.tiles import Cut, Ints, Ragged, RowTiles, chunk_rows


@dataclass(frozen=True)
class ScheduledTile:
    """Rows ``first_row`` to ``end_row - 1`` of one local expert.

    ranks: source ranks (dispatch, gather) or destination ranks (scatter) of the rows, ascending.
    stage: position of the source or destination in the ring; tiles are sorted by it.
    needs: flags that must be raised before the tile is read. signals: counters to increment after it is written.
    """

    expert: int
    first_row: int
    end_row: int
    stage: int
    ranks: tuple[int, ...]
    needs: tuple[int, ...]
    signals: tuple[int, ...]

    @property
    def rows(self) -> range:
        return range(self.first_row, self.end_row)


@dataclass(frozen=True, eq=False)
class TileSchedule:
    """N tiles in order of execution. The arrays are for kernels; ``schedule[i]`` is a ``ScheduledTile``.

    expert_N, first_row_N, end_row_N, stage_N: int64 [N], the fields of ``ScheduledTile``.
    ranks, needs, signals: the same as ragged lists. num_flags: total number of flags or counters.
    """

    expert_N: Ints
    first_row_N: Ints
    end_row_N: Ints
    stage_N: Ints
    ranks: Ragged
    needs: Ragged
    signals: Ragged
    num_flags: int

    def __len__(self) -> int:
        return len(self.expert_N)

    def __getitem__(self, index: int) -> ScheduledTile:
        fields = (self.expert_N, self.first_row_N, self.end_row_N, self.stage_N)
        position = range(len(self))[index]
        expert, first, end, stage = (int(field[position]) for field in fields)
        ranks, needs, signals = (lists[position] for lists in (self.ranks, self.needs, self.signals))
        return ScheduledTile(expert, first, end, stage, ranks, needs, signals)

    def __iter__(self) -> Iterator[ScheduledTile]:
        return (self[index] for index in range(len(self)))

    @property
    def rows_N(self) -> Ints:
        """Rows of each tile."""
        return self.end_row_N - self.first_row_N

    def expected_F(self) -> Ints:
        """Return the final value of each counter: the number of tiles that signal it."""
        return np.bincount(self.signals.values, minlength=self.num_flags)


def dispatch_order(rows_EW: ArrayLike, ring: Ring, cut: Cut, *, flags_per_expert: bool = False) -> TileSchedule:
    """Schedule dispatch + grouped GEMM: tiles by the ring distance of the *latest* rank whose rows they hold (COMET).

    Tiles are sorted by (stage, expert, row). Rank 1 of 4, two experts, tiles of 4 rows:

        from rank    0   1   2   3
        expert 0     2   3   3   2        rows 0-1 │ 2-4 │ 5-7 │ 8-9
        expert 1     0   4   1   0        rows        10-13 │ 14

        stage 0      expert 1 rows 10-13      ranks 1         needs no transfer
        stage 1      expert 0 rows  2-5       ranks 1 2
                     expert 1 row  14         ranks 2
        stage 2      expert 0 rows  6-9       ranks 2 3
        stage 3      expert 0 rows  0-1       ranks 0

    If one worker executes the tiles in order and rows are received in ring order, no other order of these tiles ends
    earlier. Over all orders of receipt, the worst wait is no longer than that of any other order.

    Args:
        rows_EW: [E, W] integers, rows of each local expert from each source rank. Or rows_EWC [E, W, C] if each source
            sends its tokens in C chunks: there is one flag for each (source, chunk), and chunks are sent in order.
        flags_per_expert: One flag for each (expert, source), as in UniEP, with number ``expert * W + source``. If
            False, one flag for each source, with number ``source``. With chunks, W * C replaces W, and
            ``source * C + chunk`` replaces the source.

    Raises:
        InputError: rows_EW has another shape or dtype, or negative counts.
    """
    rows_EWC = _counts(rows_EW, ring, (2, 3))
    chunks = rows_EWC.shape[2]
    stage_F = (ring.distance_W[:, None] * chunks + np.arange(chunks)).reshape(-1)
    tiles = RowTiles.of(rows_EWC, stage_F, cut)
    flags = tiles.flags
    num_flags = stage_F.size
    if flags_per_expert:
        flags = Ragged(flags.offsets, flags.values + tiles.expert_N[flags.owners()] * num_flags)
        num_flags *= rows_EWC.shape[0]
    stage_N = tiles.flags.extreme(np.maximum, stage_F).astype(np.int64)
    order_N = np.argsort(stage_N, kind="stable")
    return _schedule(tiles, order_N, stage_N[order_N], num_flags, needs=flags.take(order_N))


def row_order(rows_EW: ArrayLike, ring: Ring, cut: Cut) -> TileSchedule:
    """Return the tiles of ``dispatch_order`` in row order, as a baseline without overlap."""
    staged = dispatch_order(rows_EW, ring, cut)
    order_N = np.argsort(staged.first_row_N, kind="stable")
    return TileSchedule(
        expert_N=staged.expert_N[order_N],
        first_row_N=staged.first_row_N[order_N],
        end_row_N=staged.end_row_N[order_N],
        stage_N=staged.stage_N[order_N],
        ranks=staged.ranks.take(order_N),
        needs=staged.needs.take(order_N),
        signals=staged.signals,
        num_flags=staged.num_flags,
    )


def gather_order(rows_W: ArrayLike, ring: Ring, cut: Cut, chunks: int = 1) -> TileSchedule:
    """Schedule all-gather + GEMM: tiles of the own shard first, then the other shards in ring order (Flux).

    Rank 2 of 4, shards of 4 rows, tiles of 2, two chunks per shard. A flag is raised when its chunk has been copied:

        shard            0         1         2         3
        rows           0-1 2-3   4-5 6-7   8-9  ·    ·   ·
        flag            0   1     2   3     4   5    6   7
        order of tiles  4   5     6   7     0   1    2   3      ring from rank 2: 2 3 0 1

    Args:
        rows_W: [W] rows of each rank's shard; they may differ, and be zero.
        chunks: Chunks of a shard, cut as by ``chunk_rows``; flag ``source * chunks + chunk``.

    Raises:
        InputError: rows_W has another shape or dtype, or negative counts.
        ConfigError: ``chunks`` is below one.
    """
    rows_WC = chunk_rows(_counts(rows_W, ring, (1,))[0, :, 0], chunks, cut.tile_rows)
    return dispatch_order(rows_WC[None], ring, cut)


def scatter_order(rows_W: ArrayLike, ring: Ring, cut: Cut, chunks: int = 1) -> TileSchedule:
    """Schedule GEMM + reduce-scatter: the rows of rank + 1 first, own rows last, so that ranks write to different ones.

    With several hosts, the rows of other hosts come first (Flux). 4 ranks with shards of one tile:

        step        0     1     2     3
        rank 0      1     2     3     0        a column is a permutation: no destination has two writers
        rank 1      2     3     0     1
        rank 2      3     0     1     2
        rank 3      0     1     2     3

    Args:
        rows_W: [W] rows of each destination's shard; they may differ, and be zero.
        chunks: Chunks of a shard, cut as by ``chunk_rows``; counter ``destination * chunks + chunk``.

    Raises:
        InputError: rows_W has another shape or dtype, or negative counts.
        ConfigError: ``chunks`` is below one.
    """
    rows_WC = chunk_rows(_counts(rows_W, ring, (1,))[0, :, 0], chunks, cut.tile_rows)
    step_F = (ring.turn_W[:, None] * chunks + np.arange(chunks)).reshape(-1)
    tiles = RowTiles.of(rows_WC[None], step_F, cut)
    # A tile with rows for several ranks is sorted by the first of them.
    step_N = tiles.flags.extreme(np.minimum, step_F).astype(np.int64)
    order_N = np.argsort(step_N, kind="stable")
    return _schedule(tiles, order_N, step_N[order_N], step_F.size, signals=tiles.flags.take(order_N))


def _schedule(
    tiles: RowTiles,
    order_N: Ints,
    stage_N: Ints,
    num_flags: int,
    needs: Ragged | None = None,
    signals: Ragged | None = None,
) -> TileSchedule:
    """Return ``tiles`` in ``order_N``. The other arguments are in that order already."""
    return TileSchedule(
        expert_N=tiles.expert_N[order_N],
        first_row_N=tiles.first_row_N[order_N],
        end_row_N=tiles.end_row_N[order_N],
        stage_N=stage_N,
        ranks=tiles.ranks.take(order_N),
        needs=Ragged.empty(len(order_N)) if needs is None else needs,
        signals=Ragged.empty(len(order_N)) if signals is None else signals,
        num_flags=num_flags,
    )


def _counts(rows: ArrayLike, ring: Ring, dims: tuple[int, ...]) -> Ints:
    """Check the row counts and return them as [E, W, C]."""
    counts = np.asarray(rows)
    shapes = " or ".join({1: "[W]", 2: "[E, W]", 3: "[E, W, C]"}[dim] for dim in dims)
    ranks = counts.shape[min(1, counts.ndim - 1)] if counts.ndim in dims else -1
    if ranks != ring.world or counts.dtype.kind not in "iu":
        raise InputError(
            f"rows must be whole numbers of shape {shapes} with W = {ring.world} ranks; got shape {counts.shape}, "
            f"{counts.dtype}"
        )
    if counts.size and counts.min() < 0:
        raise InputError(f"rows must not be negative; got {counts.min()}")
    shape = {1: (1, ring.world, 1), 2: (*counts.shape, 1), 3: counts.shape}[counts.ndim]
    if not shape[-1]:
        raise InputError(f"rows must have at least one chunk of each source; got shape {counts.shape}")
    return counts.astype(np.int64).reshape(shape)
