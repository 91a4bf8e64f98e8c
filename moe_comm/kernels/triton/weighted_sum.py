"""Sums of each token's rows: ``y[t] = sum over k of w[t, k] * rows[place[t, k]]``, in the order of k.

Reference with the same bits: ``weighted_sum`` of ``dispatch/slots/plain.py``: multiply, round, add, round, in fp32; one
cast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.triton.device import int64, rounded
from moe_comm.kernels.triton.launch import DTYPES, check_index, check_rows, check_tensors, launch, tile
from moe_comm.kernels.triton.slot_order import INVALID

_INVALID = tl.constexpr(INVALID)
TILE_ELEMENTS = 1024
UNROLLED = 16
"""Maximum K for which the loop over a token's rows is unrolled."""


@triton.jit
def _plus_row(  # type: ignore[no-untyped-def]
    total, k, token, live, column, inside, rows_ptr, rows_stride, place_ptr, weights_ptr, TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    place = tl.load(place_ptr + token * TOP_K + k, mask=live, other=-1)
    valid = inside & (place >= 0)[:, None]
    row = tl.load(rows_ptr + (place * rows_stride)[:, None] + column[None, :], mask=valid, other=0.0).to(tl.float32)
    row = tl.where((place == _INVALID)[:, None], float("nan"), row)
    if WEIGHTED:
        weight = tl.load(weights_ptr + token * TOP_K + k, mask=live & (place >= 0), other=0.0)
        row = row * weight[:, None]
    return total + row


@triton.jit
def weighted_sum_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, rows_stride,
    place_ptr,  # [tokens, TOP_K] int64
    weights_ptr,  # [tokens, TOP_K] fp32; any pointer unless WEIGHTED
    y_ptr,  # [tokens, width] dense
    tokens, width,
    ELEMENT: tl.constexpr, WEIGHTED: tl.constexpr, TOP_K: tl.constexpr, UNROLL: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the rows of TOKENS tokens, in COLUMNS columns, per program."""
    token = int64(tl.program_id(0)) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = token < tokens
    inside = live[:, None] & (column < width)[None, :]
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    if UNROLL:
        for k in tl.static_range(TOP_K):
            total = _plus_row(
                total, k, token, live, column, inside, rows_ptr, rows_stride, place_ptr, weights_ptr, TOP_K, WEIGHTED
            )
    else:
        for k in range(TOP_K):
            total = _plus_row(
                total, k, token, live, column, inside, rows_ptr, rows_stride, place_ptr, weights_ptr, TOP_K, WEIGHTED
            )
    tl.store(y_ptr + (token * width)[:, None] + column[None, :], rounded(total, ELEMENT), mask=inside)


def weighted_sum(rows_RD: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Return [T, D], the weighted sum of each token's rows, in their dtype. No autograd.

    Args:
        rows_RD: [R, D] fp32, bf16 or fp16; dense rows, any row stride.
        place_TK: [T, K] int64 row of each slot; -1 is skipped, with any weight. ``slot_order.INVALID``: the sum is NaN.
        weights_TK: [T, K] fp32, or None for ones.
    """
    check_tensors("weighted_sum", rows_RD, place_TK, weights_TK)
    check_rows("weighted_sum", "rows", rows_RD)
    check_index("weighted_sum", "places", place_TK, (-1, -1))
    if weights_TK is not None and (weights_TK.shape != place_TK.shape or weights_TK.dtype != torch.float32):
        raise InputError(
            f"weighted_sum needs fp32 weights {tuple(place_TK.shape)}, as places; "
            f"got {tuple(weights_TK.shape)} of {weights_TK.dtype}"
        )
    (tokens, top_k), width = place_TK.shape, rows_RD.shape[1]
    y_TD = torch.empty(tokens, width, dtype=rows_RD.dtype, device=rows_RD.device)
    if not y_TD.numel():
        return y_TD
    if not rows_RD.shape[0] or not top_k:
        return y_TD.zero_()
    block, columns = tile(width, TILE_ELEMENTS)
    launch(
        weighted_sum_kernel, (-(-tokens // block), -(-width // columns)), rows_RD,
        (rows_RD, rows_RD.stride(0), place_TK, place_TK if weights_TK is None else weights_TK.contiguous(), y_TD,
         tokens, width),
        ELEMENT=DTYPES[rows_RD.dtype], WEIGHTED=weights_TK is not None, TOP_K=top_k, UNROLL=top_k <= UNROLLED,
        TOKENS=block, COLUMNS=columns, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y_TD
