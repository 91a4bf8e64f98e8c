"""Rows times weights, and dot products with a second operand: the backward pass of a weighted sum.

    token 5, slot 1 of 2     grad[5] * w[5, 1]      ─▶ out[place[5, 1]]       gradient of the row
                             grad[5] · rows[place]  ─▶ dots[5, 1]             gradient of the weight

Reference with the same bits: ``scale``, ``spread``, ``lane_dot`` and ``weight_grad`` of ``dispatch/slots/plain.py``.
The dot product has 32 lanes: lane l sums the products l, l + 32, ... in order, then lanes are summed pairwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.triton.device import int64, rounded, sum_of_lanes
from moe_comm.kernels.triton.launch import DTYPES, check_index, check_rows, check_tensors, launch

SLOTS = 16
COLUMNS = 128
STEPS = 8
"""Blocks of 32 columns that are loaded at once for a dot product."""


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
    _launch(rows_RD, weights_R.contiguous(), None, partner_RD, rows_RD, dots_R, 1)
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
    _launch(grad_TD, weights_TK.contiguous(), place_TK, rows_RD, out_RD, dots_TK, place_TK.shape[1])
    return out_RD, dots_TK


def _launch(
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
