"""The tiles of dispatched rows, listed on the device from the counts of a dispatch.

Rows are ordered by (expert, source rank, token, slot). A tile has rows of one expert, and waits for the source ranks of
its rows. Tiles are sorted by (ring distance of their latest source, expert, row), as in COMET (arXiv 2502.19811), so
tiles of this rank's own rows are first. The latest source of a tile is the one at the greatest ring distance.

    counts [E, W], rank 1 of 4         tiles of 4 rows, in order: expert, rows, sources
        rank   0   1   2   3           1   10-13   1         own rows
    expert 0   2   3   3   2           0    2- 5   1 2       rank 2 is the latest source
    expert 1   0   4   1   0           1   14      2
                                       0    6- 9   2 3
                                       0    0- 1   0

A cut between sources avoids waits, but it may add a tile. Of three cuts each expert gets the finest one that adds no
more than a quarter to its tiles: between all sources, only where the ring order wraps around, or none. How many tiles
have a source as their latest one follows from prefix sums, so no sort is needed, and one program per expert writes the
tiles of its rows. The CPU knows only an upper bound of their number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.kernels.triton.launch import on_device_of, options

TILE_WORDS = 5
"""Words of a tile: local expert, first row, end row, first source, last source."""
EXTRA_PERCENT = 25
"""Tiles that an expert may have in addition, so that a tile has rows of one source, in percent."""
EXPERTS_AT_ONCE = 16
"""Experts whose tiles a program counts at once."""
TILES_AT_ONCE = 32
"""Tiles that a program writes at once."""
_WORDS = tl.constexpr(TILE_WORDS)


@dataclass(frozen=True, eq=False)
class TileList:
    """The tiles of one dispatch, in device memory.

    items_N5: int64 tiles; only the first ``ends_W[-1]`` are valid. ends_W: int64 number of tiles whose latest source is
    at this distance in the ring, or nearer. tiles_W: int64 number of tiles that have rows of each rank. rows_EW: int64
    rows of each local expert from each rank. counts_E: int64 rows of each local expert.
    """

    items_N5: Tensor
    ends_W: Tensor
    tiles_W: Tensor
    rows_EW: Tensor
    counts_E: Tensor


@triton.jit
def _ends_before(x, total, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return how many of the tiles of ``total`` rows end at row ``x`` or before it; ``x`` is at most ``total``."""
    return tl.where(x < total, x // ROWS, tl.cdiv(total, ROWS))


@triton.jit
def _cut(rows_EW, source, rank, world, ROWS: tl.constexpr, EXTRA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return, for experts with ``rows_EW`` rows from each source, how their tiles are cut.

    Returns:
        tiles: [E, W] tiles whose latest source is the source.
        wraps: [E, 1] the row at which the ring order wraps around: rows of the sources below ``rank`` are before it.
        total: [E, 1] rows.
        by_source, by_wrap: [E, 1] whether tiles are cut between all sources, and at ``wraps``.
    """
    end = tl.cumsum(rows_EW, 1)
    start = end - rows_EW
    low = source < rank
    wraps = tl.sum(tl.where(low, rows_EW, 0), 1)[:, None]
    total = tl.sum(rows_EW, 1)[:, None]
    fine = tl.cdiv(rows_EW, ROWS)
    # Without a cut at ``wraps``, the tile with rows on both sides belongs to the sources below: they are the latest.
    below = tl.cdiv(wraps, ROWS)
    in_low = _ends_before(tl.minimum(end, wraps), wraps, ROWS) - _ends_before(tl.minimum(start, wraps), wraps, ROWS)
    above = total - wraps
    wrapped = _ends_before(tl.maximum(end - wraps, 0), above, ROWS) - _ends_before(
        tl.maximum(start - wraps, 0), above, ROWS
    )
    whole = tl.maximum(_ends_before(end, total, ROWS), below) - tl.maximum(_ends_before(start, total, ROWS), below)
    allowed = tl.cdiv(total, ROWS) * (100 + EXTRA)
    by_source = tl.sum(fine, 1)[:, None] * 100 <= allowed
    by_wrap = (below + tl.cdiv(above, ROWS)) * 100 <= allowed
    coarse = tl.where(low, in_low, tl.where(by_wrap, wrapped, whole))
    tiles = tl.where(by_source, fine, coarse)
    return tl.where(source < world, tiles, 0), wraps, total, by_source, by_wrap


@triton.jit
def _with_rows(rows_EW, tiles, wraps, by_source, by_wrap, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return [E, W], the number of tiles that have rows of each source. The arguments are those of ``_cut``."""
    end = tl.cumsum(rows_EW, 1)
    start = end - rows_EW
    last = end - 1
    first_tile = tl.where(by_wrap & (start >= wraps), tl.cdiv(wraps, ROWS) + (start - wraps) // ROWS, start // ROWS)
    last_tile = tl.where(by_wrap & (last >= wraps), tl.cdiv(wraps, ROWS) + (last - wraps) // ROWS, last // ROWS)
    return tl.where(rows_EW > 0, tl.where(by_source, tiles, last_tile - first_tile + 1), 0)


@triton.jit
def _at(values, source, chosen):  # type: ignore[no-untyped-def]
    """Return ``values`` [1, W] at the sources ``chosen`` [N], as [N]."""
    return tl.sum(tl.where(source == chosen[:, None], values, 0), 1)


@triton.jit(do_not_specialize=("first_expert", "experts", "all_experts", "rank"))
def tile_list_kernel(  # type: ignore[no-untyped-def]
    counts_ptr,  # [W, all experts] int64 rows of each rank for each expert
    items_ptr, ends_ptr, tiles_ptr, rows_ptr, counts_E_ptr,  # the fields of TileList
    first_expert, experts, all_experts, rank,
    WORLD: tl.constexpr, SOURCES: tl.constexpr,  # a power of two above WORLD
    ROWS: tl.constexpr, EXTRA: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write the tiles of expert ``program_id(0)``. Each program counts the tiles of all experts."""
    expert = tl.program_id(0)
    source = tl.arange(0, SOURCES)[None, :]
    is_source = source < WORLD
    from_ptr = counts_ptr + first_expert + source * all_experts
    num_tiles = tl.zeros((1, SOURCES), tl.int64)  # by latest source, of all experts
    before = tl.zeros((1, SOURCES), tl.int64)  # of the experts before this one
    with_rows = tl.zeros((1, SOURCES), tl.int64)
    first_row = tl.zeros((1, 1), tl.int64)
    for first in range(0, experts, EXPERTS):
        e = first + tl.arange(0, EXPERTS)[:, None]
        rows_EW = tl.load(from_ptr + e, mask=(e < experts) & is_source, other=0)
        tiles, wraps, total, by_source, by_wrap = _cut(rows_EW, source, rank, WORLD, ROWS, EXTRA)
        num_tiles += tl.sum(tiles, 0)[None, :]
        with_rows += tl.sum(_with_rows(rows_EW, tiles, wraps, by_source, by_wrap, ROWS), 0)[None, :]
        before += tl.sum(tl.where(e < expert, tiles, 0), 0)[None, :]
        first_row += tl.sum(tl.where(e < expert, total, 0), 0)[None, :]
    distance = (source - rank + WORLD) % WORLD
    other = tl.arange(0, SOURCES)[:, None]
    nearer = (distance > (other - rank + WORLD) % WORLD) & (other < WORLD)
    first_by_source = tl.sum(tl.where(nearer, tl.trans(num_tiles), 0), 0)[None, :]
    if expert == 0:
        tl.store(ends_ptr + distance, first_by_source + num_tiles, mask=is_source)
        tl.store(tiles_ptr + source, with_rows, mask=is_source)

    rows = tl.load(from_ptr + expert, mask=is_source, other=0)
    tiles, wraps, total, by_source, by_wrap = _cut(rows, source, rank, WORLD, ROWS, EXTRA)
    tl.store(rows_ptr + expert * WORLD + source, rows, mask=is_source)
    tl.store(counts_E_ptr + expert + tl.zeros((1, 1), tl.int32), total)
    # Position of the first tile of each source: after those of nearer sources, and of the experts before.
    position = before + first_by_source
    end = tl.cumsum(rows, 1)
    start = end - rows
    last_tile = tl.cumsum(tiles, 1)
    first_tile = last_tile - tiles
    below = tl.cdiv(wraps, ROWS)
    count = tl.sum(tiles)
    for first in range(0, count, TILES):
        tile = first + tl.arange(0, TILES).to(tl.int64)
        latest = tl.sum(((last_tile <= tile[:, None]) & is_source).to(tl.int32), 1)
        index = tile - _at(first_tile, source, latest)
        # By source: the n-th tile of the source. Otherwise: the n-th tile of the expert, or after ``wraps``.
        in_source = _at(start, source, latest) + index * ROWS
        of_expert = tile * ROWS
        limit = tl.sum(total) + tile * 0
        cut_here = tl.sum(by_wrap.to(tl.int32)) > 0
        after = tl.sum(wraps) + (tile - tl.sum(below)) * ROWS
        is_low = tile < tl.sum(below)
        of_expert = tl.where(cut_here & (is_low == 0), after, of_expert)
        limit = tl.where(cut_here & is_low, tl.sum(wraps), limit)
        fine = tl.sum(by_source.to(tl.int32)) > 0
        first_of = tl.where(fine, in_source, of_expert)
        end_of = tl.minimum(first_of + ROWS, tl.where(fine, _at(end, source, latest), limit))
        first_source = tl.sum(((end <= first_of[:, None]) & is_source).to(tl.int64), 1)
        last_source = tl.sum(((end <= end_of[:, None] - 1) & is_source).to(tl.int64), 1)
        item_ptr = items_ptr + (_at(position, source, latest) + index) * _WORDS
        mask = tile < count
        row = tl.sum(first_row)
        tl.store(item_ptr, expert + tile * 0, mask=mask)
        tl.store(item_ptr + 1, row + first_of, mask=mask)
        tl.store(item_ptr + 2, row + end_of, mask=mask)
        tl.store(item_ptr + 3, first_source, mask=mask)
        tl.store(item_ptr + 4, last_source, mask=mask)


def most_tiles(num_rows: int, experts: int, tile_rows: int) -> int:
    """Return an upper bound of the number of tiles of ``num_rows`` rows of ``experts`` experts, for any counts."""
    return (num_rows // tile_rows + experts) * (100 + EXTRA_PERCENT) // 100


def list_tiles(counts_WE: Tensor, experts: range, rank: int, num_rows: int, tile_rows: int) -> TileList:
    """List the tiles of the rows of ``experts``. The CPU neither reads the counts nor copies anything.

    Args:
        counts_WE: [W, E] int64 rows of each rank for each expert of all ranks, on the device.
        experts: ids of this rank's experts.
        rank: this rank.
        num_rows: rows of ``experts``, or more.
        tile_rows: maximum number of rows of a tile.
    """
    device, world = counts_WE.device, counts_WE.shape[0]

    def words(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    tiles = TileList(
        words(most_tiles(num_rows, len(experts), tile_rows), TILE_WORDS),
        words(world),
        words(world),
        words(len(experts), world),
        words(len(experts)),
    )
    if not len(experts):
        tiles.ends_W.zero_()
        tiles.tiles_W.zero_()
        return tiles
    with on_device_of(counts_WE):
        tile_list_kernel[(len(experts),)](
            counts_WE, tiles.items_N5, tiles.ends_W, tiles.tiles_W, tiles.rows_EW, tiles.counts_E,
            experts.start, len(experts), counts_WE.shape[1], rank,
            WORLD=world, SOURCES=1 << world.bit_length(), ROWS=tile_rows, EXTRA=EXTRA_PERCENT,
            EXPERTS=EXPERTS_AT_ONCE, TILES=TILES_AT_ONCE, **options(counts_WE, num_warps=4),
        )  # fmt: skip
    return tiles
