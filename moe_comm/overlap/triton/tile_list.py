"""The tiles of dispatched rows, listed on the device from the counts of a dispatch.

Rows are ordered by (expert, source rank, token, slot). A tile has rows of one expert, and waits for the tiles that its
source ranks send (csrc/cuda/order.h). Tiles are listed in the order in which they are received: by expert, and within
an expert from the rank after this one around the ring, because rank r + 1 sends to rank r first.

    counts [E, W], rank 1 of 4         tiles of 4 rows, in order: expert, rows, sources
        rank   0   1   2   3           0    8- 9   3
    expert 0   2   3   3   2           0    0- 3   0 1
    expert 1   0   4   1   0           0    4- 7   1 2       also has rows of rank 1 itself, which it sends last
                                       1   14      2
                                       1   10-13   1

So all tiles of an expert are computed one after another, which reads its weights from memory once. A list in the order
of the ring would read them once for each rank. Prefix sums give the position of each tile, so no sort is needed, and
one program per expert writes its tiles. The CPU knows only an upper bound of their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.gpu.protocol import TILE_ROWS
from moe_comm.kernels.triton.launch import on_device_of, options

TILE_WORDS = 6
"""Words of a tile: local expert, first row, end row, first source, last source, first row of the first source."""
EXPERTS_AT_ONCE = 16
"""Experts whose tiles a program counts at once."""
TILES_AT_ONCE = 32
"""Tiles that a program writes at once."""
_WORDS = tl.constexpr(TILE_WORDS)


@dataclass(frozen=True, eq=False)
class TileList:
    """The tiles of one dispatch, in device memory.

    items_N6: int64 tiles; only the first ``count`` are valid. count: [1] int64. tiles_W: int64 number of tiles that
    have rows of each rank. rows_EW: int64 rows of each local expert from each rank. counts_E: int64 rows of each local
    expert.
    """

    items_N6: Tensor
    count: Tensor
    tiles_W: Tensor
    rows_EW: Tensor
    counts_E: Tensor


@triton.jit
def _with_rows(rows_EW, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return [E, W], the number of tiles that have rows of each source."""
    end = tl.cumsum(rows_EW, 1)
    first_tile = (end - rows_EW) // ROWS
    return tl.where(rows_EW > 0, (end - 1) // ROWS - first_tile + 1, 0)


@triton.jit
def _at(values, source, chosen):  # type: ignore[no-untyped-def]
    """Return ``values`` [1, W] at the sources ``chosen`` [N], as [N]."""
    return tl.sum(tl.where(source == chosen[:, None], values, 0), 1)


@triton.jit(do_not_specialize=("first_expert", "experts", "all_experts", "rank"))
def tile_list_kernel(  # type: ignore[no-untyped-def]
    counts_ptr,  # [W, all experts] int64 rows of each rank for each expert
    items_ptr, count_ptr, tiles_ptr, rows_ptr, counts_E_ptr,  # the fields of TileList
    first_expert, experts, all_experts, rank,
    WORLD: tl.constexpr, SOURCES: tl.constexpr,  # a power of two above WORLD
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write the tiles of expert ``program_id(0)``. Each program counts the tiles of all experts."""
    expert = tl.program_id(0)
    source = tl.arange(0, SOURCES)[None, :]
    is_source = source < WORLD
    from_ptr = counts_ptr + first_expert + source * all_experts
    with_rows = tl.zeros((1, SOURCES), tl.int64)
    num_tiles, tiles_before, rows_before = (
        tl.full((), 0, tl.int64),
        tl.full((), 0, tl.int64),
        tl.full((), 0, tl.int64),
    )
    for first in range(0, experts, EXPERTS):
        e = first + tl.arange(0, EXPERTS)
        rows_EW = tl.load(from_ptr + e[:, None], mask=(e[:, None] < experts) & is_source, other=0)
        total = tl.sum(rows_EW, 1)
        num_tiles += tl.sum(tl.cdiv(total, ROWS))
        with_rows += tl.sum(_with_rows(rows_EW, ROWS), 0)[None, :]
        tiles_before += tl.sum(tl.where(e < expert, tl.cdiv(total, ROWS), 0))
        rows_before += tl.sum(tl.where(e < expert, total, 0))
    if expert == 0:
        tl.store(count_ptr, num_tiles)
        tl.store(tiles_ptr + source, with_rows, mask=is_source)

    rows = tl.load(from_ptr + expert, mask=is_source, other=0)
    total = tl.sum(rows)
    tl.store(rows_ptr + expert * WORLD + source, rows, mask=is_source)
    tl.store(counts_E_ptr + expert, total)
    end = tl.cumsum(rows, 1)
    start = end - rows
    count = tl.cdiv(total, ROWS)
    # The tile in which the rows of the next rank begin, unless it has rows of this one too: those are sent last.
    first_tile = tl.cdiv(tl.sum(tl.where(source <= rank, rows, 0)), ROWS)
    for first in range(0, count, TILES):
        number = first + tl.arange(0, TILES).to(tl.int64)
        tile = (first_tile + number) % count
        first_of = tile * ROWS
        end_of = tl.minimum(first_of + ROWS, total)
        first_source = tl.sum(((end <= first_of[:, None]) & is_source).to(tl.int64), 1)
        last_source = tl.sum(((end <= end_of[:, None] - 1) & is_source).to(tl.int64), 1)
        item_ptr = items_ptr + (tiles_before + number) * _WORDS
        mask = number < count
        tl.store(item_ptr, expert + number * 0, mask=mask)
        tl.store(item_ptr + 1, rows_before + first_of, mask=mask)
        tl.store(item_ptr + 2, rows_before + end_of, mask=mask)
        tl.store(item_ptr + 3, first_source, mask=mask)
        tl.store(item_ptr + 4, last_source, mask=mask)
        tl.store(item_ptr + 5, rows_before + _at(start, source, first_source), mask=mask)


@lru_cache(maxsize=64)
def tiles_of_ranks(rows: int, rank: int, world: int, first: int, device: torch.device) -> TileList:
    """List tiles of ``TILE_ROWS`` rows of a matrix with ``rows`` rows of each rank, as those of one expert.

    A tile has rows of one rank. Ranks are in the order of the ring, from ``rank + first`` on.
    """
    order = [(rank + first + step) % world for step in range(world)]
    tiles = [
        (0, start, min(start + TILE_ROWS, source * rows + rows), source, source, source * rows)
        for source in order
        for start in range(source * rows, source * rows + rows, TILE_ROWS)
    ]

    def words(values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    of_rank = len(tiles) // world
    return TileList(
        words(tiles), words([len(tiles)]), words([of_rank] * world), words([[rows] * world]), words([rows * world])
    )


def most_tiles(num_rows: int, experts: int, tile_rows: int) -> int:
    """Return an upper bound of the number of tiles of ``num_rows`` rows of ``experts`` experts, for any counts."""
    return num_rows // tile_rows + experts


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
        words(1),
        words(world),
        words(len(experts), world),
        words(len(experts)),
    )
    if not len(experts):
        tiles.count.zero_()
        tiles.tiles_W.zero_()
        return tiles
    with on_device_of(counts_WE):
        tile_list_kernel[(len(experts),)](
            counts_WE, tiles.items_N6, tiles.count, tiles.tiles_W, tiles.rows_EW, tiles.counts_E,
            experts.start, len(experts), counts_WE.shape[1], rank,
            WORLD=world, SOURCES=1 << world.bit_length(), ROWS=tile_rows,
            EXPERTS=EXPERTS_AT_ONCE, TILES=TILES_AT_ONCE, **options(counts_WE, num_warps=4),
        )  # fmt: skip
    return tiles
