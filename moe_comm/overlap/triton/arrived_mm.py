"""Grouped GEMM of rows that ``peer_to_peer`` is still receiving: a tile starts when its rows are received.

    rank 0    push ──── rows ────▶ rank 1's heap, then the flag (expert, rank 0, tile) in rank 1's control area

    rank 1    tiles of expert 0, after the flags of their rows │ tiles of expert 1 │ ...     arrived_mm, in one launch

Rows, flags and faults are those of csrc/cuda/args.h: ``push`` sets the word ``arrived(expert, source, tile)`` to the
number of the turn after the last of these rows. Nothing is copied between the CPU and the device. Programs take tiles
from a list in the order in which rows are received (``tile_list.py``), with one counter. A program whose rows do not
come sets the tile aside after a few polls and takes the next one, so it does not wait for a late rank while other rows
can be computed. It returns to these tiles when all others are taken. A program that starts late, because ``push``
occupied its processor, takes fewer tiles. No program waits for another one of this launch. The bits of a row depend
neither on the order of the tiles nor on their rows: they are those of ``grouped_mm``.

The kernel waits for kernels of other ranks, so it leaves processors free (``waiting_programs``): this rank's ``push``,
which the peers wait for, has been launched before, and always has a processor to run on.

With MOE_COMM_GEMM=cuda a kernel in CUDA C++ takes its place where it runs (csrc/cuda/gemm/listed.h): the same list,
flags, reports and bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import ConfigError, InputError, MoeCommError
from moe_comm.gpu.gemm import SWIGLU, Glu, ListedTiles
from moe_comm.gpu.protocol import ABORTED, ARRIVED, REPORT_WORDS, TILE_FLAGS, TILE_ROWS, TIMED_OUT, RowFlags
from moe_comm.kernels.tensor_cores import multiply_listed, setting
from moe_comm.kernels.triton.device import int64
from moe_comm.kernels.triton.grouped_mm import Tiling, compute_tile, tiling_for
from moe_comm.kernels.triton.launch import (
    DTYPES,
    INTERPRETING,
    capability,
    on_device_of,
    options,
    processors,
    waiting_programs,
)
from moe_comm.overlap.triton.flags import clock_ns, rest, words_of
from moe_comm.overlap.triton.memory import NOT_INTERPRETED
from moe_comm.overlap.triton.tile_list import TILE_WORDS, TileList

PATIENCE = 32
"""Polls of the flags of a tile before a program sets it aside."""
_WORDS, _ROWS, _FLAGS = tl.constexpr(TILE_WORDS), tl.constexpr(TILE_ROWS), tl.constexpr(TILE_FLAGS)
_PATIENCE = tl.constexpr(PATIENCE)
_TIMED_OUT, _ABORTED, _ARRIVED = (tl.constexpr(value) for value in (TIMED_OUT, ABORTED, ARRIVED))
_FAULT, _WHO, _WHAT, _EXPECTED, _VALUE = (
    tl.constexpr(REPORT_WORDS.index(name)) for name in ("fault", "who", "what", "expected", "value")
)
STATE_FAULT = tl.constexpr(1)
"""Index of ``fault`` in State of csrc/cuda/args.h."""


@triton.jit
def _arrived(flags_ptr, counts_ptr, item_ptr, world, turn):  # type: ignore[no-untyped-def]
    """Return the index of the first flag of the tile that is not raised, or -1. Acquires the rows of the others."""
    late = tl.full((), -1, tl.int64)
    expert, start, end = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    begin = tl.load(item_ptr + 5)
    for source in range(tl.load(item_ptr + 3), tl.load(item_ptr + 4) + 1):
        pair = expert * world + source
        rows = tl.load(counts_ptr + pair)
        if rows > 0:  # a rank without rows sets no flag
            tiles = tl.minimum(tl.maximum((rows + _ROWS // 2) // _ROWS, 1), _FLAGS)
            of_flag = tl.cdiv(rows, tiles)  # flag_rows of csrc/cuda/args.h
            first = (tl.maximum(start, begin) - begin) // of_flag
            last = (tl.minimum(end, begin + rows) - 1 - begin) // of_flag
            for flag in range(first, last + 1):
                word = pair * _FLAGS + flag
                value = tl.atomic_add(flags_ptr + word, tl.full((), 0, tl.int64), sem="acquire", scope="sys")
                if (value < turn) & (late < 0):
                    late = word
        begin += rows
    return late


@triton.jit
def _report(flag_ptr, source, turn, state_ptr, report_ptr, abort_ptr):  # type: ignore[no-untyped-def]
    """Report a missing flag of rank ``source``, as ``fail`` of csrc/cuda/machine.h does. The first report counts."""
    aborted = tl.load(abort_ptr, volatile=True) != 0
    fault = tl.where(aborted, int64(_ABORTED), int64(_TIMED_OUT))
    if tl.atomic_cas(state_ptr + STATE_FAULT, tl.full((), 0, tl.int64), fault, sem="acq_rel", scope="gpu") == 0:
        tl.store(report_ptr + _WHO, source)
        tl.store(report_ptr + _WHAT, int64(_ARRIVED))
        tl.store(report_ptr + _EXPECTED, int64(turn))
        tl.store(report_ptr + _VALUE, tl.load(flag_ptr, volatile=True))
        tl.debug_barrier()
        tl.atomic_xchg(report_ptr + _FAULT, fault, sem="release", scope="sys")


VARYING = ("rank", "world", "first_flag", "turn", "timeout_ns")
"""Arguments whose values do not cause a recompilation."""


@triton.jit(do_not_specialize=VARYING)
def arrived_mm_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,  # [R, inner]
    rows_stride,
    w_ptr,  # [E, columns, inner], any strides
    w_stride_expert, w_stride_column, w_stride_inner,
    items_ptr, count_ptr, counts_ptr,  # items_N6, count and rows_EW of TileList
    taken_ptr,  # [2] int64 zeros: tiles that programs have taken, and failed waits
    aside_ptr,  # [tiles of the list, tiles of the columns] int64: the next of the tiles that a program has set aside
    out_ptr,  # [R, columns]
    out_stride, columns, inner,
    biases_ptr,  # [E, columns]; any pointer unless BIASED
    biases_stride,
    peers_ptr, state_ptr, report_ptr, abort_ptr, rank, world, first_flag, turn, timeout_ns,  # RowFlags
    ELEMENT: tl.constexpr,
    WHOLE: tl.constexpr,  # inner is a multiple of BLOCK_K
    BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute out[r] = rows[r] @ w[expert of r].T, tile by tile of the list, each after the flags of its rows. BIASED:
    add the biases of the expert before rounding.

    Words that other programs or ranks change are read by atomics, which return the same value to all warps.
    """
    tiles_n = tl.cdiv(columns, BLOCK_N)
    flags_ptr = words_of(peers_ptr, rank) + first_flag
    zero = tl.full((), 0, tl.int64)
    total = tl.load(count_ptr) * tiles_n
    oldest, newest = zero - 1, zero - 1  # of the tiles that this program has set aside
    polls = 0
    start_ns = clock_ns()
    fresh = tl.atomic_add(taken_ptr, zero + 1, sem="relaxed")
    tile = tl.where(fresh < total, fresh, zero - 1)
    while tile >= 0:
        item_ptr = items_ptr + tile // tiles_n * _WORDS
        late = _arrived(flags_ptr, counts_ptr, item_ptr, world, turn)
        if late < 0:
            expert, start, end = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
            count = (end - start).to(tl.int32)
            first_n = (tile % tiles_n).to(tl.int32) * BLOCK_N
            w_expert_ptr = w_ptr + expert * w_stride_expert
            compute_tile(
                rows_ptr, rows_stride, w_expert_ptr, w_stride_column, w_stride_inner, out_ptr, out_stride,
                start, 0, count, first_n, columns, inner, ELEMENT, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K,
                biases_ptr + expert * biases_stride, BIASED,
            )  # fmt: skip
            start_ns = clock_ns()
        else:
            rest()
            polls += 1
            if polls >= _PATIENCE:  # not each time: the abort word is in the memory of the CPU, and slow to read
                # It and the clock may differ between warps: the first thread counts, and the next time decides.
                failed = (clock_ns() - start_ns >= timeout_ns) | (tl.load(abort_ptr, volatile=True) != 0)
                failures = tl.atomic_add(taken_ptr + 1, failed.to(tl.int64), sem="relaxed")
                if failures > 0:
                    _report(flags_ptr + late, late // _FLAGS % world, turn, state_ptr, report_ptr, abort_ptr)
                    oldest, fresh = zero - 1, total
                else:
                    tl.store(aside_ptr + tile, zero - 1)
                    if oldest < 0:
                        oldest = tile
                    else:
                        tl.store(aside_ptr + newest, tile)
                    newest = tile
                    tl.debug_barrier()  # all threads read what the first one has stored
                late = zero - 1
        if late < 0:  # take the next tile of the list, or the oldest of those set aside
            polls = 0
            if fresh < total:
                fresh = tl.atomic_add(taken_ptr, zero + 1, sem="relaxed")
            tile = fresh
            if fresh >= total:
                tile = oldest
                if oldest >= 0:
                    oldest = tl.load(aside_ptr + oldest)


def rows_fault(dtype: torch.dtype, device: torch.device) -> MoeCommError | None:
    """Return the error if the kernels do not support rows of ``dtype`` on ``device``, else None."""
    if device.type == "cpu" and not INTERPRETING:
        return ConfigError(NOT_INTERPRETED)
    if dtype not in DTYPES:
        return InputError(f"the Triton kernels support float32, bfloat16 and float16; got {dtype}")
    return None


def sending_blocks(device: torch.device, requested: int | None) -> int:
    """Return the number of thread blocks of ``push`` while this kernel runs: ``requested``, or one for 8 processors."""
    return requested or max(1, processors(device) // 8)


def tiling_of(rows_RD: Tensor, experts: int) -> Tiling:
    """Return the tile for rows of ``experts`` experts, that of ``grouped_mm``."""
    return tiling_for(rows_RD.dtype, capability(rows_RD), rows_RD.shape[0] / max(experts, 1))


def arrived_mm_into(
    rows_RD: Tensor, w_END: Tensor, tiles: TileList, flags: RowFlags, out_RN: Tensor, act_RF: Tensor | None = None,
    bias_EN: Tensor | None = None, *, glu: Glu = SWIGLU,
) -> bool:  # fmt: skip
    """Write out[r] = rows[r] @ w[e].T for each row r of expert e, after the rows have been received. No autograd.

    A rank that does not send its rows in time is reported as a fault of the dispatch; the rows of ``out_RN`` that
    depend on it are then not written.

    Args:
        rows_RD: [R, D] fp32, bf16 or fp16, dense; rows in flight.
        w_END: [E, N, D] weights of this rank's experts, of the same dtype, any strides.
        tiles: of these rows, listed for these experts or more, with ``tiling_of(rows_RD, listed experts).rows`` rows.
        flags: of the dispatch, or of the gradients.
        out_RN: [R, N], dense.
        act_RF: the activation ``glu`` of ``out_RN``, written as well if a kernel in CUDA C++ does it. Otherwise nothing
            is computed.
        bias_EN: [E, N] of the same dtype, dense along N, or None: added in fp32, before rounding.

    Returns:
        Whether the results are computed.
    """
    experts, columns, inner = w_END.shape
    if not out_RN.numel() or not experts:
        return act_RF is None
    if setting() == "cuda":
        aside, programs = tiles.count.new_empty(tiles.items_N6.shape[0] * -(-columns // 128)), waiting_programs
        words = tiles.items_N6, tiles.count, tiles.rows_EW, None, tiles.count.new_zeros(1), aside
        listed = ListedTiles(words, flags, False, programs(rows_RD.device))
        if multiply_listed(rows_RD, w_END, out_RN, listed, act_RF, bias_EN, glu):
            return True
    if act_RF is not None:
        return False
    tiling, taken = tiling_of(rows_RD, len(tiles.counts_E)), tiles.count.new_zeros(2)
    aside = tiles.count.new_empty(tiles.items_N6.shape[0] * -(-columns // tiling.columns))
    bias = (out_RN, 0) if bias_EN is None else (bias_EN, bias_EN.stride(0))
    with on_device_of(rows_RD):
        arrived_mm_kernel[(waiting_programs(rows_RD.device),)](
            rows_RD, rows_RD.stride(0), w_END, *w_END.stride(), tiles.items_N6, tiles.count, tiles.rows_EW,
            taken, aside, out_RN, out_RN.stride(0), columns, inner, *bias,
            flags.peers_W, flags.state, flags.report, flags.abort, flags.rank, flags.world, flags.first_flag,
            flags.turn, flags.timeout_ns,
            ELEMENT=DTYPES[rows_RD.dtype], WHOLE=inner % tiling.inner == 0, BIASED=bias_EN is not None, **tiling.blocks,
            **options(rows_RD, num_warps=tiling.warps, num_stages=tiling.stages),
        )  # fmt: skip
    return True
