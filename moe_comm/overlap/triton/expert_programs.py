"""Device code of both operators for experts: a tile of a grouped GEMM, and a flag raised by the last of n programs."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.triton.device import multiply_add, rounded
from moe_comm.overlap.triton.device import words_of
from moe_comm.overlap.triton.flags import notify


@triton.jit
def count(counters_ptr, counter, target, peers_ptr, peer, flag, turn):  # type: ignore[no-untyped-def]
    """Count a written block. The program that counts block number ``target`` raises ``flag`` of ``peer`` to ``turn``.

    turn: number of the current operator call. counters_ptr: int64 in this rank's own memory, initially zero. The
    counter has system scope, like the flag, so that the writes of all programs that counted are visible to the peer
    when the flag is raised.
    """
    tl.debug_barrier()  # one thread counts, after the stores of all
    one = tl.full((), 1, tl.int64)
    previous = tl.atomic_add(counters_ptr + counter, one, sem="acq_rel", scope="sys")
    if previous + 1 == target:
        notify(words_of(peers_ptr, peer), flag, turn)


@triton.jit
def tile_product(  # type: ignore[no-untyped-def]
    rows_ptr,  # [R, inner] dense, of ELEMENT
    scale_ptr,  # [R] fp32; any pointer unless SCALED
    w_ptr,  # the expert's [columns, inner]
    w_stride_column, w_stride_inner,
    row,  # [BLOCK_M] int64
    row_mask,  # [BLOCK_M] which of them are rows of the tile
    column,  # [BLOCK_N] int64
    columns, inner,
    ELEMENT: tl.constexpr, SCALED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return [BLOCK_M, BLOCK_N] fp32 = rows @ w.T, summed in order of the inner columns, so that the bits are fixed.

    SCALED: rows are first multiplied by their scale and rounded, as in ``plain.scale``.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SCALED:
        scale = tl.load(scale_ptr + row, mask=row_mask, other=0.0)
    for first in range(0, inner, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K).to(tl.int64)
        inside = k < inner
        a = tl.load(rows_ptr + row[:, None] * inner + k[None, :], mask=row_mask[:, None] & inside[None, :], other=0.0)
        if SCALED:
            a = rounded(a.to(tl.float32) * scale[:, None], ELEMENT)
        b = tl.load(
            w_ptr + k[:, None] * w_stride_inner + column[None, :] * w_stride_column,
            mask=inside[:, None] & (column < columns)[None, :],
            other=0.0,
        )
        acc = multiply_add(a, b, acc)
    return acc
