"""Gradient of SwiGLU behind the product that gives the gradient of its result: ``grad_act = grad @ w2``.

    Triton      grouped_mm_into, then swiglu_backward or swiglu_backward_weighted
    CUDA C++    one launch (csrc/cuda/gemm/gradient.h), if MOE_COMM_GEMM is ``cuda``; then the sums of sections

Gradients of h and activations have the same bits. A gradient of a routing weight is the dot product of two rows. In
CUDA C++ a block has 256 columns of a row, so the dot product is the sum of those of sections of 256 columns, in their
order; with more columns its last bits are not those of Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.gpu.gemm import SWIGLU, Glu, SwigluGradient
from moe_comm.kernels.tensor_cores import multiply_gradient, sections_like, setting
from moe_comm.kernels.triton.device import int64
from moe_comm.kernels.triton.grouped_mm import grouped_mm_into
from moe_comm.kernels.triton.launch import launch
from moe_comm.kernels.triton.swiglu import Weights, check_swiglu, swiglu_backward, swiglu_backward_weighted

SLOTS = 256


@triton.jit
def add_sections_kernel(  # type: ignore[no-untyped-def]
    sections_ptr,  # [sections, rows] fp32
    place_ptr,  # [slots] int64 row of each slot; unless PLACED any pointer, and the row is the slot
    dots_ptr,  # [slots] fp32
    sections, rows, slots,
    PLACED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write the sum of the sections of each slot's row, in order; 0 without a row."""
    slot = int64(tl.program_id(0)) * SLOTS + tl.arange(0, SLOTS)
    live = slot < slots
    row = slot
    if PLACED:
        row = tl.load(place_ptr + slot, mask=live, other=-1)
    valid = live & (row >= 0)
    total = tl.zeros((SLOTS,), tl.float32)
    for section in range(sections):
        total += tl.load(sections_ptr + int64(section) * rows + row, mask=valid, other=0.0)
    tl.store(dots_ptr + slot, total, mask=live)


def swiglu_gradient_into(
    grad_RD: Tensor,
    w2_EDF: Tensor,
    counts_E: Tensor,
    h_RG: Tensor,
    grad_h_RG: Tensor,
    act_RF: Tensor,
    weights: Weights | None,
    *,
    glu: Glu = SWIGLU,
) -> None:
    """Write the gradient of ``h_RG`` and the activation, for gradients ``grad_RD`` of the product of the activation
    with ``w2_EDF``; with ``weights``, both times them, and their gradients.

    Arguments and errors are those of ``grouped_mm_into`` and ``swiglu_backward_weighted``. Rows beyond the sum of
    ``counts_E`` are undefined.
    """
    weights_N, place_N, dots_N, slot_R = (None,) * 4 if weights is None else weights
    if setting() == "cuda" and grad_RD.numel() and act_RF.numel() and w2_EDF.shape[0]:
        check_swiglu("swiglu_gradient", h_RG, grad_h=grad_h_RG, act=act_RF)
        sections_SR = None if dots_N is None else sections_like(grad_RD, act_RF.shape[1])
        of = SwigluGradient(h_RG, grad_h_RG, act_RF, weights_N, slot_R, sections_SR)
        fits = weights_N is None or weights_N.dtype == torch.float32
        knows_slots = place_N is None or slot_R is not None
        if fits and knows_slots and multiply_gradient(grad_RD, w2_EDF, counts_E, of, glu):
            if sections_SR is not None and dots_N is not None:
                add_sections(sections_SR, place_N, dots_N)
            return
    grouped_mm_into(grad_RD, w2_EDF.transpose(1, 2), counts_E, act_RF)
    if weights is None:
        # The gradient is read before the activation overwrites it.
        swiglu_backward(h_RG, act_RF, grad_h_RG, act_RF, glu)
    else:
        swiglu_backward_weighted(h_RG, act_RF, grad_h_RG, act_RF, weights, glu)


def add_sections(sections_SR: Tensor, place_N: Tensor | None, dots_N: Tensor) -> None:
    """Write the dot product of each slot's row.

    Args:
        sections_SR: [S, R] fp32, the sums of the row over its sections.
        place_N: int64 row of each slot, negative for slots without a row, whose result is 0; None: slots are rows.
        dots_N: fp32, contiguous, written.
    """
    slots = dots_N.numel()
    launch(
        add_sections_kernel, (-(-slots // SLOTS),), sections_SR,
        (sections_SR, dots_N if place_N is None else place_N, dots_N, *sections_SR.shape, slots),
        PLACED=place_N is not None, SLOTS=SLOTS, num_warps=4,
    )  # fmt: skip
