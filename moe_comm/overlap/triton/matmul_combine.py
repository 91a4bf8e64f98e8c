"""Grouped GEMM + combine in one persistent kernel: results are summed while later columns are computed.

    rank 1                                                               rank 0
    compute programs   tile @ w[expert].T, slice by slice of columns
                       counter of the tiles of slice s with rows for
                       rank 0 complete ──▶ flag (s, 1) of rank 0 ──────▶ sum programs: wait for slice s of all ranks
                       rows in rank 1's memory ◀──────── read ────────── sum of each token's K rows, in slot order

Rows are cut along columns (COMET, arXiv 2502.19811) because a token's K results are in K experts: in row order, its sum
could start only when nearly all experts are computed. Results stay in the memory of the expert's rank and the sums
*pull* them. Each result is read once in either case, but tiles are stored to local memory, a finished slice costs one
remote flag for each pair of ranks, and no rank needs memory for T * K rows. The sums have the bits of
plain.weighted_sum: multiply, round, add, round, in slot order in fp32, one cast. The kernel is compiled without fused
multiply-add.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.triton.device import rounded
from moe_comm.overlap.triton.device import data_of, enter, may_write_to, words_of
from moe_comm.overlap.triton.expert_programs import count, tile_product
from moe_comm.overlap.triton.flags import wait_at_least


@triton.jit
def _compute(  # type: ignore[no-untyped-def]
    program,
    rows_ptr,  # [R, inner]
    w_ptr, w_stride_expert, w_stride_column, w_stride_inner,
    tiles_ptr,  # TileTable.items
    num_tiles,
    signals_ptr,  # TileTable.flags
    counters_ptr, peers_ptr, rank, world, turn, first_flag, out_at, fault_ptr, timeout_ns, columns, inner,
    ELEMENT: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    writable = tl.full((), 1, tl.int1)
    for step in range(world):  # wait until each rank has read what turn n - 2 wrote to this memory
        writable = may_write_to(peers_ptr, (rank + step) % world, rank, turn, fault_ptr, timeout_ns) & writable
    if writable:
        out_ptr = data_of(peers_ptr, rank, out_at, ELEMENT)
        for n in range(program, num_tiles, PROGRAMS):
            item = tiles_ptr + n * 7
            expert, first, end = tl.load(item), tl.load(item + 1), tl.load(item + 2)
            row = first + tl.arange(0, BLOCK_M)
            row_mask = row < end
            last_column = tl.load(item + 4)
            for first_column in range(tl.load(item + 3), last_column, BLOCK_N):
                column = first_column + tl.arange(0, BLOCK_N).to(tl.int64)
                acc = tile_product(
                    rows_ptr, rows_ptr, w_ptr + expert * w_stride_expert, w_stride_column, w_stride_inner, row,
                    row_mask, column, last_column, inner, ELEMENT, False, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                mask = row_mask[:, None] & (column < last_column)[None, :]
                tl.store(out_ptr + row[:, None] * columns + column[None, :], rounded(acc, ELEMENT), mask=mask)
            for signal in range(tl.load(item + 5), tl.load(item + 6)):
                entry = signals_ptr + signal * 3
                counter, target, peer = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
                flag = first_flag + counter - peer + rank
                count(counters_ptr, counter, target, peers_ptr, peer, flag, turn)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    program,
    items_ptr,  # SumTable.items
    num_items,
    sources_ptr,  # SumTable.sources
    num_sources,
    place_ptr,  # [T * K] int64
    owner_ptr,  # [T * K] int64
    weights_ptr,  # [T * K] fp32
    y_ptr,  # [T, columns]
    peers_ptr, rank, world, turn, first_flag, out_at, fault_ptr, timeout_ns, columns,
    ELEMENT: tl.constexpr, WEIGHTED: tl.constexpr, TOP_K: tl.constexpr, PROGRAMS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    own_flags = words_of(peers_ptr, rank)
    for n in range(program, num_items, PROGRAMS):
        item = items_ptr + n * 5
        column_slice, first, num = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        last_column = tl.load(item + 4)
        complete = tl.full((), 1, tl.int1)
        for entry in range(num_sources):
            source = tl.load(sources_ptr + entry)
            flag = first_flag + column_slice * world + source
            complete = wait_at_least(own_flags, flag, turn, source, fault_ptr, timeout_ns) & complete
        i = tl.arange(0, TOKENS)
        token = first + i
        token_mask = i < num
        for first_column in range(tl.load(item + 3), last_column, BLOCK_N):
            column = first_column + tl.arange(0, BLOCK_N).to(tl.int64)
            inside = column < last_column
            total = tl.zeros((TOKENS, BLOCK_N), tl.float32)
            for k in range(TOP_K):
                place = tl.load(place_ptr + token * TOP_K + k, mask=token_mask, other=-1)
                valid = (place >= 0) & complete
                owner = tl.load(owner_ptr + token * TOP_K + k, mask=valid, other=0)
                base = tl.load(peers_ptr + owner, mask=valid, other=0) + out_at
                rows_ptr = base.to(tl.pointer_type(ELEMENT)) + place * columns
                mask = valid[:, None] & inside[None, :]
                row = tl.load(rows_ptr[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
                if WEIGHTED:
                    weight = tl.load(weights_ptr + token * TOP_K + k, mask=valid, other=0.0)
                    row = row * weight[:, None]
                total = total + row
            total = tl.where(complete, total, float("nan"))
            mask = token_mask[:, None] & inside[None, :]
            tl.store(y_ptr + token[:, None] * columns + column[None, :], rounded(total, ELEMENT), mask=mask)


VARYING = ("num_tiles", "num_sums", "num_sources", "rank", "world", "turn", "call", "first_flag", "timeout_ns")
"""Arguments whose values do not cause a recompilation."""


@triton.jit(do_not_specialize=VARYING)
def matmul_combine_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, w_ptr, w_stride_expert, w_stride_column, w_stride_inner, tiles_ptr, num_tiles, signals_ptr, counters_ptr,
    sums_ptr, num_sums, sources_ptr, num_sources, place_ptr, owner_ptr, weights_ptr, y_ptr, peers_ptr, rank, world,
    turn, call, first_flag, out_at, fault_ptr, timeout_ns, columns, inner,
    ELEMENT: tl.constexpr, WEIGHTED: tl.constexpr, TOP_K: tl.constexpr, COMPUTE_PROGRAMS: tl.constexpr,
    SUM_PROGRAMS: tl.constexpr, TOKENS: tl.constexpr, SUM_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Run the compute programs, which wait for no results, then the sum programs, by number."""
    program = tl.program_id(0)
    if program == 0:
        enter(peers_ptr, rank, world, turn, call)
    if program < COMPUTE_PROGRAMS:
        _compute(
            program, rows_ptr, w_ptr, w_stride_expert, w_stride_column, w_stride_inner, tiles_ptr, num_tiles,
            signals_ptr, counters_ptr, peers_ptr, rank, world, turn, first_flag, out_at, fault_ptr, timeout_ns,
            columns, inner, ELEMENT, COMPUTE_PROGRAMS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        _sum(
            program - COMPUTE_PROGRAMS, sums_ptr, num_sums, sources_ptr, num_sources, place_ptr, owner_ptr,
            weights_ptr, y_ptr, peers_ptr, rank, world, turn, first_flag, out_at, fault_ptr, timeout_ns, columns,
            ELEMENT, WEIGHTED, TOP_K, SUM_PROGRAMS, TOKENS, SUM_COLUMNS,
        )  # fmt: skip
