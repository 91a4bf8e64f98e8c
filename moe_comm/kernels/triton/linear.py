"""A product of 16-bit rows and weights with fp32 results: the logits of a router.

Products of 16-bit numbers are exact in fp32, and sums are fp32, so the operands need not be converted to fp32, which
GPUs multiply without tensor cores. The tile is the same for any number of rows, so a row has the same bits in every
batch. Reference: ``row_invariant_linear`` of the fp32 operands, up to the order of sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.triton.device import int64
from moe_comm.kernels.triton.grouped_mm import INTERPRETED, Tiling, compute_tile
from moe_comm.kernels.triton.launch import DTYPES, capability, check_rows, check_tensors, launch
from moe_comm.kernels.triton.program import Program

TILING = Tiling(64, 64, 64, 4, 4)


@triton.jit
def linear_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,  # [rows, inner]
    rows_stride,
    w_ptr,  # [columns, inner]
    w_stride_column, w_stride_inner,
    out_ptr,  # [rows, columns] fp32
    out_stride, rows, columns, inner,
    ELEMENT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile per program."""
    compute_tile(
        rows_ptr, rows_stride, w_ptr, w_stride_column, w_stride_inner, out_ptr, out_stride,
        int64(0), tl.program_id(0) * BLOCK_M, rows, tl.program_id(1) * BLOCK_N, columns, inner,
        ELEMENT, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


def takes(rows_RD: Tensor, w_ND: Tensor) -> bool:
    """Return whether the kernel supports operands of these dtypes and strides."""
    return rows_RD.dtype in (torch.bfloat16, torch.float16) and w_ND.dtype == rows_RD.dtype and rows_RD.stride(1) == 1


def linear(rows_RD: Tensor, w_ND: Tensor) -> Tensor:
    """Return rows @ w.T, [R, N] fp32. No autograd.

    Args:
        rows_RD: [R, D] bf16 or fp16; dense rows, any row stride.
        w_ND: [N, D] of the same dtype, any strides.
    """
    check_tensors("linear", rows_RD, w_ND)
    check_rows("linear", "rows", rows_RD)
    if not takes(rows_RD, w_ND) or w_ND.dim() != 2 or w_ND.shape[1] != rows_RD.shape[1]:
        raise InputError(
            f"linear of rows {tuple(rows_RD.shape)} of {rows_RD.dtype} needs 16-bit rows and weights "
            f"[N, {rows_RD.shape[1]}] of their dtype; got {tuple(w_ND.shape)} of {w_ND.dtype}"
        )
    (rows, inner), columns = rows_RD.shape, w_ND.shape[0]
    out_RN = torch.empty(rows, columns, dtype=torch.float32, device=rows_RD.device)
    if not inner:
        return out_RN.zero_()
    tiling = TILING if capability(rows_RD) else INTERPRETED
    if out_RN.numel():
        launch(
            linear_kernel, (-(-rows // tiling.rows), -(-columns // tiling.columns)), rows_RD,
            (rows_RD, rows_RD.stride(0), w_ND, *w_ND.stride(), out_RN, columns, rows, columns, inner),
            ELEMENT=DTYPES[torch.float32], WHOLE=inner % tiling.inner == 0, **tiling.blocks,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
    return out_RN


_PROGRAM = Program(lambda rows_RD, w_ND: (linear(rows_RD, w_ND),))


def repeated_linear(rows_RD: Tensor, w_ND: Tensor) -> Tensor:
    """Return ``linear``, as a program."""
    (out_RN,) = _PROGRAM(1, (rows_RD, w_ND))
    return out_RN  # type: ignore[no-any-return]
