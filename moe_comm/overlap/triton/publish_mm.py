"""Grouped GEMM whose results peers read while it computes: it sets a flag after each slice of columns of a rank's rows.

    rank 1's tiles    slice 0: expert 0 │ expert 1 │ ...      slice 1: expert 0 │ ...
                               after the last rows of rank 0 ╰─▶ results(0, rank 1) in rank 0's control area

    rank 0            waits for slice 0 of all ranks ▸ sums it ▸ waits for slice 1 ...       (``sum_while``)

A sum of a token needs all its K results, which are in tiles of different experts. If whole rows were computed one after
another, nearly all tiles would be computed before most sums could start. So the columns are divided into slices (COMET,
arXiv 2502.19811), and sums start after the first one. Within a slice, tiles are in the order of ``tile_list.py``: by
expert, so that its weights are read from memory once, and within an expert own rows last.

Programs take tiles in this order with a counter. No program waits. A tile may have rows of several ranks; it counts for
each of them, and the last tile of a (slice, rank) sets its flag. The bits are those of ``grouped_mm``. As for
``arrived_mm``, there is a kernel in CUDA C++.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_comm.gpu.gemm import ListedTiles
from moe_comm.gpu.protocol import SLICE_COLUMNS, RowFlags, num_slices
from moe_comm.kernels.tensor_cores import multiply_listed, setting
from moe_comm.kernels.triton.grouped_mm import compute_tile
from moe_comm.kernels.triton.launch import DTYPES, on_device_of, options, waiting_programs
from moe_comm.overlap.triton.arrived_mm import STATE_FAULT, tiling_of
from moe_comm.overlap.triton.flags import notify, words_of
from moe_comm.overlap.triton.tile_list import TILE_WORDS, TileList

_WORDS = tl.constexpr(TILE_WORDS)
_UNIT = tl.constexpr(SLICE_COLUMNS)

VARYING = ("rank", "world", "first_flag", "turn")
"""Arguments whose values do not cause a recompilation."""


@triton.jit
def _end_tile(part, columns, SLICES: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the end of slice ``part`` in tiles of BLOCK_N columns, as ``first_column`` of csrc/cuda/args.h."""
    end = (part + 1) * tl.cdiv(columns, _UNIT) // SLICES * (_UNIT // BLOCK_N)
    return tl.minimum(end, tl.cdiv(columns, BLOCK_N))


@triton.jit(do_not_specialize=VARYING)
def publish_mm_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,  # [R, inner]
    rows_stride,
    w_ptr,  # [E, columns, inner], any strides
    w_stride_expert, w_stride_column, w_stride_inner,
    items_ptr, count_ptr, counts_ptr, tiles_ptr,  # items_N6, count, rows_EW and tiles_W of TileList
    written_ptr,  # [SLICES * W + 1] int64 zeros: tiles that are written, by slice and rank; tiles that are taken
    out_ptr,  # [R, columns]
    out_stride, columns, inner,
    biases_ptr,  # [E, columns]; any pointer unless BIASED
    biases_stride,
    peers_ptr, state_ptr, rank, world, first_flag, turn,  # RowFlags
    ELEMENT: tl.constexpr,
    WHOLE: tl.constexpr,  # inner is a multiple of BLOCK_K
    BIASED: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute out[r] = rows[r] @ w[expert of r].T, slice by slice, and set the flags of the rows' ranks. BIASED: add
    the biases of the expert before rounding.

    After a fault of the group, nothing is computed and no flag is set.
    """
    one = tl.full((), 1, tl.int64)
    healthy = tl.load(state_ptr + STATE_FAULT) == 0
    tiles_m = tl.where(healthy, tl.load(count_ptr), 0)
    if healthy & (tl.program_id(0) == 0):
        for to in range(world):
            if tl.load(tiles_ptr + to) == 0:
                for part in range(SLICES):
                    notify(words_of(peers_ptr, to), first_flag + part * world + rank, turn)
    total = tiles_m * tl.cdiv(columns, BLOCK_N)
    part = 0
    first_tile_n = 0
    end_tile_n = _end_tile(0, columns, SLICES, BLOCK_N)
    taken = tl.atomic_add(written_ptr + SLICES * world, one, sem="relaxed")
    while taken < total:
        while taken >= tiles_m * end_tile_n:
            part += 1
            first_tile_n = end_tile_n
            end_tile_n = _end_tile(part, columns, SLICES, BLOCK_N)
        width = end_tile_n - first_tile_n
        tile = taken - tiles_m * first_tile_n
        item_ptr = items_ptr + tile // width * _WORDS
        expert, start, end = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
        count = (end - start).to(tl.int32)
        first_n = (first_tile_n + (tile % width).to(tl.int32)) * BLOCK_N
        w_expert_ptr = w_ptr + expert * w_stride_expert
        compute_tile(
            rows_ptr, rows_stride, w_expert_ptr, w_stride_column, w_stride_inner, out_ptr, out_stride,
            start, 0, count, first_n, columns, inner, ELEMENT, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K,
            biases_ptr + expert * biases_stride, BIASED,
        )  # fmt: skip
        tl.debug_barrier()  # one thread counts, after the stores of all
        for to in range(tl.load(item_ptr + 3), tl.load(item_ptr + 4) + 1):
            if tl.load(counts_ptr + expert * world + to) > 0:
                # System scope, like the flag: the rank that reads the flag also sees the tiles of other programs.
                before = tl.atomic_add(written_ptr + part * world + to, one, sem="acq_rel", scope="sys")
                if before + 1 == tl.load(tiles_ptr + to) * width:
                    notify(words_of(peers_ptr, to), first_flag + part * world + rank, turn)
        taken = tl.atomic_add(written_ptr + SLICES * world, one, sem="relaxed")


def publish_mm_into(
    rows_RD: Tensor, w_END: Tensor, tiles: TileList, flags: RowFlags, out_RN: Tensor, bias_EN: Tensor | None = None
) -> None:
    """Write out[r] = rows[r] @ w[e].T for each row r of expert e, and set the flags of its slices. No autograd.

    Args:
        rows_RD: [R, D] fp32, bf16 or fp16; dense rows.
        w_END: [E, N, D] weights of this rank's experts, of the same dtype, any strides.
        tiles: as in ``arrived_mm_into``.
        flags: of the results. All of them are set, also by a rank without rows.
        out_RN: [R, N], dense, where peers can read it.
        bias_EN: [E, N] of the same dtype, dense along N, or None: added in fp32, before rounding.
    """
    experts, columns, inner = w_END.shape
    slices, tiling = num_slices(columns), tiling_of(rows_RD, len(tiles.counts_E))
    if not slices:
        return
    written = tiles.count.new_zeros(slices * flags.world + 1)
    programs = waiting_programs(rows_RD.device)
    if setting() == "cuda" and experts and out_RN.shape[0]:
        words = tiles.items_N6, tiles.count, tiles.rows_EW, tiles.tiles_W, written, None
        if multiply_listed(rows_RD, w_END, out_RN, ListedTiles(words, flags, True, programs), bias_EN=bias_EN):
            return
    bias = (out_RN, 0) if bias_EN is None else (bias_EN, bias_EN.stride(0))
    with on_device_of(rows_RD):
        publish_mm_kernel[(programs,)](
            rows_RD, rows_RD.stride(0), w_END, *w_END.stride(), tiles.items_N6, tiles.count, tiles.rows_EW,
            tiles.tiles_W, written, out_RN, out_RN.stride(0), columns, inner, *bias,
            flags.peers_W, flags.state, flags.rank, flags.world, flags.first_flag, flags.turn,
            ELEMENT=DTYPES[rows_RD.dtype], WHOLE=inner % tiling.inner == 0, BIASED=bias_EN is not None, SLICES=slices,
            **tiling.blocks, **options(rows_RD, num_warps=tiling.warps, num_stages=tiling.stages),
        )  # fmt: skip
