"""Dispatch + grouped GEMM in one persistent kernel: rows are pushed to their positions while tiles are computed.

    rank 0                                                        rank 1
    send programs      x rows ──push──▶ rank 1's rows, in place   flag (expert, source)
                                                                  compute programs: wait for the flags of the next
    compute programs   ...                                        tile, then tile @ w[expert].T

Tiles are sorted by the latest source of their rows (COMET, arXiv 2502.19811). There is one flag for the rows of one
expert from one source (UniEP, arXiv 2604.19241). It holds the number of the turn (call of an operator) in which it was
raised. Programs are numbered send, relay, compute. A program waits only for programs of its rank with lower numbers, so
the interpreter, which runs programs one by one, cannot deadlock.

With relaying, a token's row is sent once to each rank that has experts for it, with its positions there, and relay
programs copy it to them (UniEP): fewer bytes between ranks, one more copy, the same bits.

    token 5: experts 8, 9, 11 of rank 2      direct  ──5──▶ row 40      relayed  ──5──▶ slot 7 ──▶ row 40
                                                     ──5──▶ row 61                           ──▶ row 61
                                                     ──5──▶ row 77                           ──▶ row 77
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.triton.device import rounded
from moe_comm.overlap.triton.device import data_of, enter, may_write_to, words_of
from moe_comm.overlap.triton.expert_programs import count, tile_product
from moe_comm.overlap.triton.flags import wait_at_least


@triton.jit
def _copy_rows(from_ptr, to_ptr, row_mask, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy rows from pointers ``from_ptr`` [ROWS] to ``to_ptr`` [ROWS] where ``row_mask``."""
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        mask = row_mask[:, None] & (column < width)[None, :]
        row = tl.load(from_ptr[:, None] + column[None, :], mask=mask)
        tl.store(to_ptr[:, None] + column[None, :], row, mask=mask)


@triton.jit
def _send(  # type: ignore[no-untyped-def]
    program,
    x_ptr,  # [T, inner]
    x_stride,
    scale_ptr,  # [T * K] fp32 weights of the slots
    place_ptr,  # [T * K] int64
    owner_ptr,  # [T * K] int64
    items_ptr,  # SendTable.items
    num_items,
    index_ptr,  # SendTable.index
    counters_ptr, peers_ptr, rank, turn, first_flag, rows_at, scale_at, slots_at, slot_places_at, slot_scales_at,
    fault_ptr, timeout_ns, inner,
    ELEMENT: tl.constexpr, SCALED: tl.constexpr, RELAYED: tl.constexpr, TOP_K: tl.constexpr, PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    for n in range(program, num_items, PROGRAMS):
        item = items_ptr + n * 7
        peer, first, num = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        row, flag, counter, target = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
        if may_write_to(peers_ptr, peer, rank, turn, fault_ptr, timeout_ns):
            i = tl.arange(0, ROWS).to(tl.int64)
            row_mask = i < num
            entry = tl.load(index_ptr + first + i, mask=row_mask, other=0)
            if RELAYED:
                token = entry
                to_ptr = data_of(peers_ptr, peer, slots_at, ELEMENT)
                places_ptr = data_of(peers_ptr, peer, slot_places_at, tl.int64)
                scales_ptr = data_of(peers_ptr, peer, slot_scales_at, tl.float32)
                for k in range(TOP_K):
                    place = tl.load(place_ptr + token * TOP_K + k, mask=row_mask, other=-1)
                    owner = tl.load(owner_ptr + token * TOP_K + k, mask=row_mask, other=-1)
                    tl.store(places_ptr + (row + i) * TOP_K + k, tl.where(owner == peer, place, -1), mask=row_mask)
                    if SCALED:
                        scale = tl.load(scale_ptr + token * TOP_K + k, mask=row_mask, other=0.0)
                        tl.store(scales_ptr + (row + i) * TOP_K + k, scale, mask=row_mask)
            else:
                token = entry // TOP_K
                to_ptr = data_of(peers_ptr, peer, rows_at, ELEMENT)
                if SCALED:
                    scale = tl.load(scale_ptr + entry, mask=row_mask, other=0.0)
                    tl.store(data_of(peers_ptr, peer, scale_at, tl.float32) + row + i, scale, mask=row_mask)
            _copy_rows(x_ptr + token * x_stride, to_ptr + (row + i) * inner, row_mask, inner, ROWS, COLUMNS)
            count(counters_ptr, counter, target, peers_ptr, peer, first_flag + flag, turn)


@triton.jit
def _relay(  # type: ignore[no-untyped-def]
    program,
    items_ptr,  # RelayTable.items
    num_items, counters_ptr, peers_ptr, rank, turn, first_flag, rows_at, scale_at, slots_at, slot_places_at,
    slot_scales_at, fault_ptr, timeout_ns, inner,
    ELEMENT: tl.constexpr, SCALED: tl.constexpr, TOP_K: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    own_flags = words_of(peers_ptr, rank)
    rows_ptr = data_of(peers_ptr, rank, rows_at, ELEMENT)
    scale_ptr = data_of(peers_ptr, rank, scale_at, tl.float32)
    slots_ptr = data_of(peers_ptr, rank, slots_at, ELEMENT)
    places_ptr = data_of(peers_ptr, rank, slot_places_at, tl.int64)
    scales_ptr = data_of(peers_ptr, rank, slot_scales_at, tl.float32)
    for n in range(program, num_items, PROGRAMS):
        item = items_ptr + n * 5
        source, slot, num = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        flag, target = tl.load(item + 3), tl.load(item + 4)
        if wait_at_least(own_flags, first_flag + flag, turn, source, fault_ptr, timeout_ns):
            i = tl.arange(0, ROWS).to(tl.int64)
            from_ptr = slots_ptr + (slot + i) * inner
            for k in range(TOP_K):
                place = tl.load(places_ptr + (slot + i) * TOP_K + k, mask=i < num, other=-1)
                row_mask = place >= 0
                if SCALED:
                    scale = tl.load(scales_ptr + (slot + i) * TOP_K + k, mask=row_mask, other=0.0)
                    tl.store(scale_ptr + place, scale, mask=row_mask)
                _copy_rows(from_ptr, rows_ptr + place * inner, row_mask, inner, ROWS, COLUMNS)
            count(counters_ptr, source, target, peers_ptr, rank, first_flag + source, turn)


@triton.jit
def _compute(  # type: ignore[no-untyped-def]
    program,
    tiles_ptr,  # TileTable.items
    num_tiles,
    needs_ptr,  # TileTable.flags
    w_ptr, w_stride_expert, w_stride_column, w_stride_inner,
    h_ptr,  # [R, columns]
    peers_ptr, rank, turn, first_flag, rows_at, scale_at, fault_ptr, timeout_ns, columns, inner,
    ELEMENT: tl.constexpr, SCALED: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    own_flags = words_of(peers_ptr, rank)
    rows_ptr = data_of(peers_ptr, rank, rows_at, ELEMENT)
    scale_ptr = data_of(peers_ptr, rank, scale_at, tl.float32)
    column_blocks = tl.cdiv(columns, BLOCK_N)
    for n in range(program, num_tiles * column_blocks, PROGRAMS):
        item = tiles_ptr + n // column_blocks * 7
        expert, first, end = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        complete = tl.full((), 1, tl.int1)
        for need in range(tl.load(item + 5), tl.load(item + 6)):
            flag, source = tl.load(needs_ptr + need * 3), tl.load(needs_ptr + need * 3 + 2)
            complete = wait_at_least(own_flags, first_flag + flag, turn, source, fault_ptr, timeout_ns) & complete
        row = first + tl.arange(0, BLOCK_M)
        row_mask = row < end
        column = n % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
        acc = tile_product(
            rows_ptr, scale_ptr, w_ptr + expert * w_stride_expert, w_stride_column, w_stride_inner, row, row_mask,
            column, columns, inner, ELEMENT, SCALED, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc = tl.where(complete, acc, float("nan"))
        mask = row_mask[:, None] & (column < columns)[None, :]
        tl.store(h_ptr + row[:, None] * columns + column[None, :], rounded(acc, ELEMENT), mask=mask)


VARYING = ("num_sends", "num_relays", "num_tiles", "rank", "world", "turn", "call", "first_flag", "timeout_ns")
"""Arguments whose values do not cause a recompilation."""


@triton.jit(do_not_specialize=VARYING)
def dispatch_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr, x_stride, scale_ptr, place_ptr, owner_ptr, sends_ptr, num_sends, index_ptr, relays_ptr, num_relays,
    tiles_ptr, num_tiles, needs_ptr, send_counters_ptr, relay_counters_ptr, w_ptr, w_stride_expert, w_stride_column,
    w_stride_inner, h_ptr, peers_ptr, rank, world, turn, call, first_flag, rows_at, scale_at, slots_at, slot_places_at,
    slot_scales_at, fault_ptr, timeout_ns, columns, inner,
    ELEMENT: tl.constexpr, SCALED: tl.constexpr, RELAYED: tl.constexpr, TOP_K: tl.constexpr,
    SEND_PROGRAMS: tl.constexpr, RELAY_PROGRAMS: tl.constexpr, COMPUTE_PROGRAMS: tl.constexpr, SEND_ROWS: tl.constexpr,
    SEND_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Run the send programs, the relay programs (none unless RELAYED), then the compute programs, by number."""
    program = tl.program_id(0)
    if program == 0:
        enter(peers_ptr, rank, world, turn, call)
    if program < SEND_PROGRAMS:
        _send(
            program, x_ptr, x_stride, scale_ptr, place_ptr, owner_ptr, sends_ptr, num_sends, index_ptr,
            send_counters_ptr, peers_ptr, rank, turn, first_flag, rows_at, scale_at, slots_at, slot_places_at,
            slot_scales_at, fault_ptr, timeout_ns, inner, ELEMENT, SCALED, RELAYED, TOP_K, SEND_PROGRAMS, SEND_ROWS,
            SEND_COLUMNS,
        )  # fmt: skip
    elif program < SEND_PROGRAMS + RELAY_PROGRAMS:
        _relay(
            program - SEND_PROGRAMS, relays_ptr, num_relays, relay_counters_ptr, peers_ptr, rank, turn, first_flag,
            rows_at, scale_at, slots_at, slot_places_at, slot_scales_at, fault_ptr, timeout_ns, inner, ELEMENT, SCALED,
            TOP_K, RELAY_PROGRAMS, SEND_ROWS, SEND_COLUMNS,
        )  # fmt: skip
    else:
        _compute(
            program - SEND_PROGRAMS - RELAY_PROGRAMS, tiles_ptr, num_tiles, needs_ptr, w_ptr, w_stride_expert,
            w_stride_column, w_stride_inner, h_ptr, peers_ptr, rank, turn, first_flag, rows_at, scale_at, fault_ptr,
            timeout_ns, columns, inner, ELEMENT, SCALED, COMPUTE_PROGRAMS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
