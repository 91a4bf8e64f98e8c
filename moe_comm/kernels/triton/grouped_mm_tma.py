"""The grouped GEMM of ``grouped_mm.py`` with operands loaded by TMA, the copy engine of sm_90 and later.

A descriptor holds address, sizes and strides of a matrix. With it one thread requests a whole tile, instead of each
thread computing addresses and copying 16 bytes at a time: fewer instructions and registers. Tiles and the order of sums
are those of ``grouped_mm_kernel``. A tile may include rows of the next expert, which are computed but not stored.
Results are stored with masks, because TMA cannot end a tile at the last row of an expert.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_comm.kernels.triton.device import int64, multiply_add, store_tile, tile_at, tiles_of_program

MIN_CAPABILITY = 90
ALIGNMENT = 16
"""Alignment in bytes of addresses and strides."""
STAGES = 4
"""Steps that are loaded ahead. On an H100 more than 3 are faster with TMA, and slower without."""


@triton.jit
def _tma_tile(  # type: ignore[no-untyped-def]
    rows_desc, w_desc, first_w, out_ptr, out_stride, start, first_m, count, first_n, columns, inner,
    ELEMENT: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile, as ``compute_tile`` in ``grouped_mm.py``. first_w: first row of the expert in ``w_desc``."""
    first_row = (start + first_m).to(tl.int32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, inner, BLOCK_K):
        a = rows_desc.load([first_row, first])
        b = w_desc.load([first_w + first, first_n]) if TRANSPOSED else w_desc.load([first_w + first_n, first]).T
        acc = multiply_add(a, b, acc)
    place = first_m + tl.arange(0, BLOCK_M)
    column = first_n + tl.arange(0, BLOCK_N)
    store_tile(acc, out_ptr, out_stride, start + place, place < count, column, columns, ELEMENT)


@triton.jit
def grouped_mm_tma_kernel(  # type: ignore[no-untyped-def]
    rows_desc,  # [R, inner], blocks [BLOCK_M, BLOCK_K]
    w_desc,  # [E * columns, inner], blocks [BLOCK_N, BLOCK_K]; TRANSPOSED: [E * inner, columns], [BLOCK_K, BLOCK_N]
    counts_ptr,  # [E] int64
    out_ptr,  # [R, columns]
    out_stride, experts, columns,
    inner,  # a multiple of BLOCK_K
    ELEMENT: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute out[r] = rows[r] @ w[expert of r].T. Programs and tiles as in ``grouped_mm_kernel``."""
    programs = tl.num_programs(0)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    skip = tl.program_id(0)
    start = int64(0)
    for expert in range(experts):
        count = tl.load(counts_ptr + expert)
        tiles_m = tl.cdiv(count, BLOCK_M).to(tl.int32)
        tiles = tiles_m * tiles_n
        first_w = expert * inner if TRANSPOSED else expert * columns
        steps = tiles_of_program(skip, tiles, programs)
        for step in range(steps):
            tile_m, tile_n = tile_at(skip + step * programs, tiles_m, tiles_n)
            first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
            _tma_tile(
                rows_desc, w_desc, first_w, out_ptr, out_stride, start, first_m, count, first_n, columns, inner,
                ELEMENT, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        skip += steps * programs - tiles
        start += count


def supported(rows_RD: Tensor, w_END: Tensor, step: int) -> bool:
    """Return whether TMA can load the operands in steps of ``step`` along D, on a GPU that has it.

    The experts' matrices must follow each other without gaps, with D or N dense, and addresses and strides must be
    multiples of 16 bytes.
    """
    experts, columns, inner = w_END.shape
    size = rows_RD.element_size()
    by_expert, by_column, by_inner = w_END.stride()
    plain, transposed = _is_plain(w_END), _is_transposed(w_END)
    strides = [rows_RD.stride(0), by_column if plain else by_inner]
    return (
        (plain or transposed)
        and inner % step == 0
        and min(rows_RD.shape[0], experts, columns, inner) > 0
        and max(rows_RD.shape[0], experts * columns, experts * inner) < 2**31
        and (experts == 1 or by_expert == (columns * by_column if plain else inner * by_inner))
        and all(stride * size % ALIGNMENT == 0 for stride in strides)
        and rows_RD.data_ptr() % ALIGNMENT == 0
        and w_END.data_ptr() % ALIGNMENT == 0
    )


def descriptors(rows_RD: Tensor, w_END: Tensor, tiling: Any) -> dict[str, Any]:
    """Return the arguments of the kernel for supported operands, by name. tiling: a ``Tiling``."""
    experts, columns, inner = w_END.shape
    _, by_column, by_inner = w_END.stride()
    transposed = not _is_plain(w_END)
    block, step = tiling.columns, tiling.inner
    shape = [rows_RD.shape[0], inner]
    strides = [rows_RD.stride(0), 1]
    w_shape = [experts * inner, columns] if transposed else [experts * columns, inner]
    w_strides = [by_inner if transposed else by_column, 1]
    return {
        "rows_desc": TensorDescriptor(rows_RD, shape, strides, [tiling.rows, step]),
        "w_desc": TensorDescriptor(w_END, w_shape, w_strides, [step, block] if transposed else [block, step]),
        "TRANSPOSED": transposed,
    }


def _is_plain(w_END: Tensor) -> bool:
    """Return whether D is dense, and the rows of a matrix do not overlap."""
    return w_END.stride(2) == 1 and w_END.stride(1) >= w_END.shape[2]


def _is_transposed(w_END: Tensor) -> bool:
    return w_END.stride(1) == 1 and w_END.stride(2) >= w_END.shape[1]
