"""Gathers, copies, weighted sums and scaled copies of rows.

    take_rows      y[r] = x[index[r]]                                     reference: ``x_ND[index_R]``
    copy_rows      y[place[t, k]] = x[t]                                  x[t] is cached between its K copies
    weighted_sum   y[t] = sum over k of w[t, k] * rows[place[t, k]]       in the order of k
    spread         out[place[t, k]] = grad[t] * w[t, k]                   its gradients
                   dots[t, k] = grad[t] · rows[place[t, k]]

``take_rows`` and ``copy_rows`` support any dtype and width, as words of up to 8 bytes, which the compiler combines into
accesses of 16 bytes. The others multiply, round, add and round in fp32, and cast once. References with the same bits:
``dispatch/slots/plain.py`` and ``row_weights.lane_dot``. The dot product has 32 lanes: lane l sums the products l,
l + 32, ... in order, then lanes are summed pairwise.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.triton.device import int64, rounded, sum_of_lanes
from moe_comm.kernels.triton.launch import DTYPES, check_index, check_rows, check_tensors, launch, tile
from moe_comm.kernels.triton.slot_order import INVALID

_INVALID = tl.constexpr(INVALID)
TILE_ELEMENTS = 1024
UNROLLED = 16
"""Maximum K for which the loop over a token's rows is unrolled."""
SLOTS = 16
COLUMNS = 128
STEPS = 8
"""Blocks of 32 columns that are loaded at once for a dot product."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def take_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, x_stride,
    index_ptr,  # [rows] int64 row of x; if TOP_K, row of y
    y_ptr,  # [.., width] dense
    rows, width,
    TOP_K: tl.constexpr,  # 0, or the number of rows of y for each row of x
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy ROWS rows per program. Rows with a negative index are zeros; if TOP_K, they are not copied."""
    row = int64(tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    index = tl.load(index_ptr + row, mask=live, other=-1)
    if TOP_K:
        live = index >= 0
        to = index
        index = tl.where(live, row // TOP_K, -1)
    else:
        to = row
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (column < width)[None, :]
        word = tl.load(
            x_ptr + (index * x_stride)[:, None] + column[None, :], mask=inside & (index >= 0)[:, None], other=0
        )
        tl.store(y_ptr + (to * width)[:, None] + column[None, :], word, mask=inside & live[:, None])


def take_rows(x_ND: Tensor, index_R: Tensor) -> Tensor:
    """Return [R, D], the rows of ``x_ND`` at ``index_R``; zeros where the index is -1. No autograd.

    Args:
        x_ND: [N, D] of any dtype; dense rows, any row stride.
        index_R: [R] int64 below N. Not checked, because a check would wait for the device.
    """
    check_tensors("take_rows", x_ND, index_R)
    check_index("take_rows", "index", index_R, (-1,))
    _check_dense("take_rows", x_ND)
    y_RD = torch.empty(index_R.shape[0], x_ND.shape[1], dtype=x_ND.dtype, device=x_ND.device)
    if not x_ND.shape[0]:
        return y_RD.zero_()
    _copy(x_ND, index_R, y_RD, 0)
    return y_RD


def copy_rows(x_TD: Tensor, place_TK: Tensor, num_rows: int, out_RD: Tensor | None = None) -> Tensor:
    """Return [num_rows, D], with ``x_TD[t]`` at row ``place_TK[t, k]``. No autograd.

    Args:
        x_TD: [T, D] of any dtype; dense rows, any row stride.
        place_TK: [T, K] int64 row of each slot, below ``num_rows``, or -1. Not checked, as in ``take_rows``. Rows
            without a slot are not initialised.
        out_RD: [num_rows, D] contiguous memory of the same dtype for the result, or None.
    """
    check_tensors("copy_rows", x_TD, place_TK)
    check_index("copy_rows", "places", place_TK, (x_TD.shape[0], -1))
    _check_dense("copy_rows", x_TD)
    shape = num_rows, x_TD.shape[1]
    y_RD = torch.empty(shape, dtype=x_TD.dtype, device=x_TD.device) if out_RD is None else out_RD
    if y_RD.shape != shape or y_RD.dtype != x_TD.dtype or not y_RD.is_contiguous():
        raise InputError(
            f"copy_rows needs contiguous out {shape} of {x_TD.dtype}; got {tuple(y_RD.shape)}, {y_RD.dtype}"
        )
    _copy(x_TD, place_TK, y_RD, place_TK.shape[1])
    return y_RD


def _check_dense(operator: str, x_ND: Tensor) -> None:
    if x_ND.dim() != 2 or (x_ND.numel() and x_ND.shape[1] > 1 and x_ND.stride(1) != 1):
        raise InputError(f"{operator} needs dense rows [N, D]; got {tuple(x_ND.shape)} with strides {x_ND.stride()}")


def _copy(x_ND: Tensor, index: Tensor, y_RD: Tensor, top_k: int) -> None:
    if not y_RD.numel() or not index.numel():
        return
    x_stride = x_ND.stride(0) * x_ND.element_size()
    row_bytes = x_ND.shape[1] * x_ND.element_size()
    size = gcd(x_ND.data_ptr(), x_stride, row_bytes, x_ND.storage_offset() * x_ND.element_size(), 8)
    if x_ND.stride(1) != 1:  # one column: view() needs a unit stride
        x_ND = x_ND.as_strided(x_ND.shape, (x_ND.stride(0), 1))
    x, y = x_ND.view(_WORDS[size]), y_RD.view(_WORDS[size])
    rows, columns = tile(y.shape[1], TILE_ELEMENTS)
    launch(
        take_rows_kernel, (-(-index.numel() // rows),), x,
        (x, x.stride(0), index, y, index.numel(), y.shape[1]),
        TOP_K=top_k, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


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


@triton.jit
def scale_rows_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, grad_stride,
    weights_ptr,  # [slots] fp32
    place_ptr,  # [slots] int64 row of each slot; unless PLACED any pointer, and the row is the slot
    rows_ptr,  # any pointer unless DOTTED
    rows_stride,
    out_ptr,  # may be grad_ptr
    out_stride,
    dots_ptr,  # [slots] fp32; any pointer unless DOTTED
    slots, width,
    ELEMENT: tl.constexpr, PLACED: tl.constexpr, DOTTED: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Scale the rows of SLOTS slots per program. A slot is one of the TOP_K (token, expert) pairs of a token."""
    slot = int64(tl.program_id(0)) * SLOTS + tl.arange(0, SLOTS)
    live = slot < slots
    from_ptr = grad_ptr + (slot // TOP_K * grad_stride)[:, None]
    place = slot
    if PLACED:
        place = tl.load(place_ptr + slot, mask=live, other=-1)
    valid = live & (place >= 0)
    if DOTTED:
        partner_ptr = rows_ptr + (place * rows_stride)[:, None]
        lanes = tl.zeros((SLOTS, 32), tl.float32)
        for first in range(0, width, 32 * STEPS):
            for step in tl.static_range(STEPS):
                column = first + step * 32 + tl.arange(0, 32)
                mask = valid[:, None] & (column < width)[None, :]
                grad = tl.load(from_ptr + column[None, :], mask=mask, other=0.0).to(tl.float32)
                row = tl.load(partner_ptr + column[None, :], mask=mask, other=0.0).to(tl.float32)
                lanes += grad * row
        tl.store(dots_ptr + slot, sum_of_lanes(lanes, SLOTS), mask=live)
        tl.debug_barrier()  # other warps may still read elements that this one overwrites
    weight = tl.load(weights_ptr + slot, mask=valid, other=0.0)
    to_ptr = out_ptr + (place * out_stride)[:, None]
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        mask = valid[:, None] & (column < width)[None, :]
        grad = tl.load(from_ptr + column[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(to_ptr + column[None, :], rounded(grad * weight[:, None], ELEMENT), mask=mask)


def scale_rows_(rows_RD: Tensor, weights_R: Tensor, partner_RD: Tensor | None = None) -> Tensor | None:
    """Multiply rows by their weights, in place.

    Args:
        rows_RD: [R, D] fp32, bf16 or fp16.
        weights_R: [R] fp32.
        partner_RD: [R, D] like ``rows_RD``, with any row stride; or None.

    Returns:
        [R] fp32 ``row_weights.lane_dot`` of the unscaled rows and ``partner_RD``; None without it.
    """
    check_tensors("scale_rows_", rows_RD, weights_R, partner_RD)
    check_rows("scale_rows_", "rows", rows_RD)
    if partner_RD is not None:
        check_rows("scale_rows_", "partners", partner_RD)
    num_rows = rows_RD.shape[0]
    fits = weights_R.shape == (num_rows,) and weights_R.dtype == torch.float32
    if not fits or (partner_RD is not None and partner_RD.shape != rows_RD.shape):
        raise InputError(
            f"scale_rows_ of rows {tuple(rows_RD.shape)} needs [{num_rows}] fp32 weights, and partners of its shape; "
            f"got {tuple(weights_R.shape)} of {weights_R.dtype}"
            + ("" if partner_RD is None else f", and {tuple(partner_RD.shape)}")
        )
    dots_R = None if partner_RD is None else weights_R.new_zeros(num_rows)
    _scale(rows_RD, weights_R.contiguous(), None, partner_RD, rows_RD, dots_R, 1)
    return dots_R


def spread(
    grad_TD: Tensor, place_TK: Tensor, weights_TK: Tensor, num_rows: int, rows_RD: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of ``weighted_sum``'s rows and, if the rows are given, of its weights.

    Args:
        grad_TD: [T, D] fp32, bf16 or fp16.
        place_TK: [T, K] int64 row of each slot, or -1; each row belongs to one slot.
        weights_TK: [T, K] fp32.
        num_rows: R.
        rows_RD: [R, D] the summed rows, of any supported dtype; or None.

    Returns:
        [num_rows, D] token's gradient times weight, and [T, K] fp32 dot products (0 where dropped) or None.
    """
    check_tensors("spread", grad_TD, place_TK, weights_TK, rows_RD)
    check_rows("spread", "gradients", grad_TD)
    check_index("spread", "places", place_TK, (grad_TD.shape[0], -1))
    if weights_TK.shape != place_TK.shape or weights_TK.dtype != torch.float32:
        raise InputError(
            f"spread needs fp32 weights {tuple(place_TK.shape)}, as places; "
            f"got {tuple(weights_TK.shape)} of {weights_TK.dtype}"
        )
    width = grad_TD.shape[1]
    if rows_RD is not None:
        check_rows("spread", "rows", rows_RD)
        if rows_RD.shape != (num_rows, width):
            raise InputError(f"spread needs rows [{num_rows}, {width}]; got {tuple(rows_RD.shape)}")
    out_RD = torch.empty(num_rows, width, dtype=grad_TD.dtype, device=grad_TD.device)
    dots_TK = None
    if rows_RD is not None:  # the kernel writes all of them, if there are columns
        new = torch.empty_like if width else torch.zeros_like
        dots_TK = new(weights_TK, memory_format=torch.contiguous_format)
    _scale(grad_TD, weights_TK.contiguous(), place_TK, rows_RD, out_RD, dots_TK, place_TK.shape[1])
    return out_RD, dots_TK


def _scale(
    grad_TD: Tensor, weights: Tensor, place: Tensor | None, rows_RD: Tensor | None, out_RD: Tensor,
    dots: Tensor | None, top_k: int,
) -> None:  # fmt: skip
    slots, width = weights.numel(), grad_TD.shape[1]
    if not slots or not width:
        return
    rows = grad_TD if rows_RD is None else rows_RD
    launch(
        scale_rows_kernel, (-(-slots // SLOTS),), grad_TD,
        (grad_TD, grad_TD.stride(0), weights, weights if place is None else place, rows, rows.stride(0),
         out_RD, out_RD.stride(0), weights if dots is None else dots, slots, width),
        ELEMENT=DTYPES[grad_TD.dtype], PLACED=place is not None, DOTTED=dots is not None, TOP_K=top_k,
        SLOTS=SLOTS, COLUMNS=COLUMNS, STEPS=STEPS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
