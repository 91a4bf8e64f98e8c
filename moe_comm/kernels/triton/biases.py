"""Gradients of the experts' biases: sums over the rows of an expert, and dot products of rows with a bias.

    grad_RN  e0 e0 e0 │ e2 e2 │ e3        out[e] = sum of grad[rows of e]        dots[r] += <grad[r], bias[e of r]>

``GROUP`` rows of an expert are added at a time, each to an fp32 sum of its own; these are then added in halves. So the
bits depend on the rows of the expert only. Reference: ``expert_mlp.MLPBackward``, which adds rows in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.kernels.triton.device import int64, rounded, sum_of_lanes
from moe_comm.kernels.triton.launch import DTYPES, check_index, check_rows, check_tensors, launch, power_of_two
from moe_comm.kernels.triton.swiglu import Weights

GROUP, COLUMNS, SLOTS = 32, 64, 16


@triton.jit
def sum_rows_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,  # [R, columns]
    grad_stride,
    weights_ptr,  # [R] fp32; any pointer unless WEIGHTED
    counts_ptr,  # [E] int64 rows of each expert
    out_ptr,  # [E, columns]
    out_stride, experts, columns,
    ELEMENT: tl.constexpr, OUT: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_E: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the sums of COLUMNS columns of an expert, rounded to OUT. WEIGHTED: of rows times their weights, rounded to
    ELEMENT."""
    expert = int64(tl.program_id(0))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    other = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + other, mask=other < experts, other=0)
    start = tl.sum(tl.where(other < expert, counts, 0), axis=0)
    end = start + tl.load(counts_ptr + expert)
    sums = tl.zeros((COLUMNS, GROUP), tl.float32)
    for first in range(0, (end - start).to(tl.int32), GROUP):
        row = start + first + tl.arange(0, GROUP)
        mask = (column < columns)[:, None] & (row < end)[None, :]
        grad = tl.load(grad_ptr + (row * grad_stride)[None, :] + column[:, None], mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights_ptr + row, mask=row < end, other=0.0)
            grad = rounded(grad * weight[None, :], ELEMENT).to(tl.float32)
        sums += grad
    total = sum_of_lanes(sums, COLUMNS)
    tl.store(out_ptr + expert * out_stride + column, rounded(total, OUT), mask=column < columns)


@triton.jit
def add_bias_dots_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,  # [R, columns]
    grad_stride,
    biases_ptr,  # [E, columns]
    biases_stride,
    counts_ptr,  # [E] int64 rows of each expert
    place_ptr,  # [slots] int64 row of each slot; unless PLACED any pointer, and the row is the slot
    dots_ptr,  # [slots] fp32
    slots, experts, columns,
    PLACED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Add the dot products of SLOTS rows with the biases of their experts, in the order of ``row_weights.lane_dot``."""
    slot = int64(tl.program_id(0)) * SLOTS + tl.arange(0, SLOTS)
    live = slot < slots
    row = slot
    if PLACED:
        row = tl.load(place_ptr + slot, mask=live, other=-1)
    expert, end = tl.zeros((SLOTS,), tl.int64), int64(0)
    for one in range(experts):  # a matrix of rows and experts would need most registers
        end += tl.load(counts_ptr + one)
        expert += (end <= row).to(tl.int64)
    live = live & (row >= 0) & (expert < experts)
    lanes = tl.zeros((SLOTS, 32), tl.float32)
    for first in range(0, columns, 32):
        column = (first + tl.arange(0, 32))[None, :]
        mask = live[:, None] & (column < columns)
        grad = tl.load(grad_ptr + (row * grad_stride)[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        lanes += grad * tl.load(biases_ptr + (expert * biases_stride)[:, None] + column, mask=mask, other=0.0).to(
            tl.float32
        )
    before = tl.load(dots_ptr + slot, mask=live, other=0.0)
    tl.store(dots_ptr + slot, before + sum_of_lanes(lanes, SLOTS), mask=live)


def bias_grad(
    bias_EN: Tensor,
    grad_RN: Tensor,
    counts_E: Tensor,
    weights_R: Tensor | None = None,
    out_EN: Tensor | None = None,
) -> Tensor | None:
    """Return the gradient of ``bias_EN``: the sum of ``grad_RN``, times ``weights_R``, over the rows of each expert.

    With ``out_EN``, [E, N] of the same dtype or fp32, it is written there, and the result is None.

    Args:
        bias_EN: [E, N] fp32, bf16 or fp16; not read.
        grad_RN: [R, N] of the same dtype, dense rows; those beyond the sum of ``counts_E`` are not read.
        counts_E: [E] int64 rows of each expert, on the device.
        weights_R: [R] fp32, contiguous.
    """
    check_tensors("bias_grad", bias_EN, grad_RN, counts_E, weights_R)
    check_rows("bias_grad", "gradients", grad_RN)
    check_index("bias_grad", "counts", counts_E, bias_EN.shape[:1])
    to_EN = torch.empty_like(bias_EN, memory_format=torch.contiguous_format) if out_EN is None else out_EN
    experts, columns = to_EN.shape
    if to_EN.numel():
        launch(
            sum_rows_kernel, (experts, -(-columns // COLUMNS)), grad_RN,
            (grad_RN, grad_RN.stride(0), grad_RN if weights_R is None else weights_R, counts_E,
             to_EN, to_EN.stride(0), experts, columns),
            ELEMENT=DTYPES[grad_RN.dtype], OUT=DTYPES[to_EN.dtype], WEIGHTED=weights_R is not None,
            BLOCK_E=power_of_two(experts), GROUP=GROUP, COLUMNS=COLUMNS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return to_EN if out_EN is None else None


def add_bias_dots(weights: Weights, grad_RN: Tensor, bias_EN: Tensor, counts_E: Tensor) -> None:
    """Add ``row_weights.lane_dot`` of the row of each slot in ``grad_RN`` and its expert's bias to ``weights.dots_N``.

    Args:
        weights: a ``row_weights.RowWeights``.
        grad_RN, bias_EN, counts_E: as in ``bias_grad``.
    """
    _, place_N, dots_N, _ = weights
    check_tensors("add_bias_dots", dots_N, place_N, grad_RN, bias_EN, counts_E)
    check_rows("add_bias_dots", "gradients", grad_RN)
    check_rows("add_bias_dots", "biases", bias_EN)
    if dots_N is None or not dots_N.numel():
        return
    slots = dots_N.numel()
    launch(
        add_bias_dots_kernel, (-(-slots // SLOTS),), grad_RN,
        (grad_RN, grad_RN.stride(0), bias_EN, bias_EN.stride(0), counts_E, counts_E if place_N is None else place_N,
         dots_N, slots, *bias_EN.shape),
        PLACED=place_N is not None, SLOTS=SLOTS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
