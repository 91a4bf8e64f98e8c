"""The gradients of ``linear.py``: products of fp32 gradients and 16-bit tokens or weights, in 16 bits.

    grad_x[t] = grad[t] @ w          the same tile for any number of rows: a row has the same bits in every batch
    grad_w    = grad.T @ x           partial sums of PART rows, and their sum in order: the same bits in every call

In bf16, tensor cores multiply three bf16 terms whose sum is the fp32 gradient, so products are exact. In fp16 such
terms could overflow, and products are those of fp32. Reference: products of the fp32 operands, up to the order of sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.triton.device import int64, multiply_add, rounded, store_tile
from moe_comm.kernels.triton.grouped_mm import INTERPRETED, Tiling
from moe_comm.kernels.triton.launch import DTYPES, capability, check_rows, check_tensors, launch, tile
from moe_comm.kernels.triton.program import Program

ROWS_TILING = Tiling(64, 128, 32, 4, 3)
WEIGHTS_TILING = Tiling(64, 128, 32, 4, 3)
PART = 1024
"""Rows of a partial sum of the gradient of weights."""
SUM_ELEMENTS = 1024


@triton.jit
def multiply_wide(a, b, acc):  # type: ignore[no-untyped-def]
    """Return acc + a @ b with fp32 ``a`` and 16-bit ``b``."""
    if b.dtype == tl.bfloat16:
        high = rounded(a, tl.bfloat16)
        rest = a - high.to(tl.float32)
        middle = rounded(rest, tl.bfloat16)
        low = rounded(rest - middle.to(tl.float32), tl.bfloat16)
        acc = multiply_add(low, b, acc)
        acc = multiply_add(middle, b, acc)
        return multiply_add(high, b, acc)
    else:
        return multiply_add(a, b.to(tl.float32), acc)


@triton.jit
def linear_rows_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,  # [rows, inner] fp32
    grad_stride,
    w_ptr,  # [inner, columns]
    w_stride_inner, w_stride_column,
    out_ptr,  # [rows, columns]
    out_stride, rows, columns, inner,
    ELEMENT: tl.constexpr, ADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the gradient of rows per program. If ADDED, round it and add it to the output."""
    row = int64(tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, inner, BLOCK_K):
        at = first + k
        grad = tl.load(
            grad_ptr + (row * grad_stride)[:, None] + at[None, :],
            mask=(row < rows)[:, None] & (at < inner)[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(
            w_ptr + (at.to(tl.int64) * w_stride_inner)[:, None] + (column.to(tl.int64) * w_stride_column)[None, :],
            mask=(at < inner)[:, None] & (column < columns)[None, :], other=0.0,
        )  # fmt: skip
        acc = multiply_wide(grad, w, acc)
    if ADDED:
        out_ptrs = out_ptr + (row * out_stride)[:, None] + column[None, :]
        before = tl.load(out_ptrs, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)
        acc = before.to(tl.float32) + rounded(acc, ELEMENT).to(tl.float32)
    store_tile(acc, out_ptr, out_stride, row, row < rows, column, columns, ELEMENT)


@triton.jit
def linear_weights_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,  # [rows, outer] fp32
    grad_stride,
    x_ptr,  # [rows, columns]
    x_stride,
    out_ptr,  # [parts, outer, columns] fp32, dense
    rows, outer, columns,
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one partial sum of the gradient of weights per program."""
    part = int64(tl.program_id(2))
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, PART, BLOCK_K):
        row = part * PART + first + k
        grad = tl.load(
            grad_ptr + (row * grad_stride)[None, :] + m[:, None],
            mask=(m < outer)[:, None] & (row < rows)[None, :], other=0.0,
        )  # fmt: skip
        x = tl.load(
            x_ptr + (row * x_stride)[:, None] + column[None, :],
            mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0,
        )  # fmt: skip
        acc = multiply_wide(grad, x, acc)
    store_tile(acc, out_ptr, columns, part * outer + m, m < outer, column, columns, tl.float32)


@triton.jit
def sum_parts_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,  # [parts, size] fp32
    out_ptr,  # [size]
    parts, size,
    ELEMENT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add partial sums in order, and round once."""
    at = int64(tl.program_id(0)) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for part in range(parts):
        total += tl.load(parts_ptr + int64(part) * size + at, mask=at < size, other=0.0)
    tl.store(out_ptr + at, rounded(total, ELEMENT), mask=at < size)


def takes(grad_TE: Tensor, x_TD: Tensor, w_ED: Tensor) -> bool:
    """Return whether the kernels support operands of these dtypes and strides."""
    fits = x_TD.dtype in (torch.bfloat16, torch.float16) and w_ED.dtype == x_TD.dtype and x_TD.stride(1) == 1
    return fits and grad_TE.dtype == torch.float32 and grad_TE.stride(1) == 1


def grad_of_rows(grad_TE: Tensor, w_ED: Tensor, added_TD: Tensor | None = None) -> Tensor:
    """Return grad @ w, [T, D] in the dtype of ``w``. No autograd.

    Args:
        grad_TE: [T, E] fp32; dense rows, any row stride.
        w_ED: [E, D] bf16 or fp16, any strides.
        added_TD: a contiguous tensor to which the product is added and which is returned, with the bits of ``add_``.
    """
    check_tensors("grad_of_rows", grad_TE, w_ED)
    check_rows("grad_of_rows", "gradients", grad_TE)
    _check("grad_of_rows", grad_TE, w_ED, grad_TE.shape[1])
    (rows, inner), columns = grad_TE.shape, w_ED.shape[1]
    out_TD = torch.empty(rows, columns, dtype=w_ED.dtype, device=w_ED.device) if added_TD is None else added_TD
    tiling = ROWS_TILING if capability(grad_TE) else INTERPRETED
    if out_TD.numel():
        launch(
            linear_rows_kernel, (-(-rows // tiling.rows), -(-columns // tiling.columns)), grad_TE,
            (grad_TE, grad_TE.stride(0), w_ED, *w_ED.stride(), out_TD, columns, rows, columns, inner),
            ELEMENT=DTYPES[w_ED.dtype], ADDED=added_TD is not None, **tiling.blocks, num_warps=tiling.warps,
            num_stages=tiling.stages,
        )  # fmt: skip
    return out_TD


def grad_of_weights(grad_TE: Tensor, x_TD: Tensor) -> Tensor:
    """Return grad.T @ x, [E, D] in the dtype of ``x``. No autograd.

    Args:
        grad_TE: [T, E] fp32; dense rows, any row stride.
        x_TD: [T, D] bf16 or fp16; dense rows, any row stride.
    """
    check_tensors("grad_of_weights", grad_TE, x_TD)
    check_rows("grad_of_weights", "gradients", grad_TE)
    check_rows("grad_of_weights", "rows", x_TD)
    _check("grad_of_weights", grad_TE, x_TD, grad_TE.shape[0])
    (rows, outer), columns = grad_TE.shape, x_TD.shape[1]
    out_ED = torch.empty(outer, columns, dtype=x_TD.dtype, device=x_TD.device)
    if not rows or not out_ED.numel():
        return out_ED.zero_()
    tiling, part = (WEIGHTS_TILING, PART) if capability(grad_TE) else (INTERPRETED, 2 * INTERPRETED.inner)
    parts = -(-rows // part)
    parts_PED = torch.empty(parts, outer, columns, dtype=torch.float32, device=x_TD.device)
    launch(
        linear_weights_kernel, (-(-outer // tiling.rows), -(-columns // tiling.columns), parts), grad_TE,
        (grad_TE, grad_TE.stride(0), x_TD, x_TD.stride(0), parts_PED, rows, outer, columns),
        PART=part, **tiling.blocks, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    _, block = tile(out_ED.numel(), SUM_ELEMENTS)
    launch(
        sum_parts_kernel, (-(-out_ED.numel() // block),), grad_TE, (parts_PED, out_ED, parts, out_ED.numel()),
        ELEMENT=DTYPES[x_TD.dtype], COLUMNS=block, num_warps=4,
    )  # fmt: skip
    return out_ED


def _check(operator: str, grad_TE: Tensor, other: Tensor, size: int) -> None:
    dtypes = other.dtype in (torch.bfloat16, torch.float16) and grad_TE.dtype == torch.float32
    if not dtypes or other.dim() != 2 or other.shape[0] != size:
        raise InputError(
            f"{operator} of fp32 gradients {tuple(grad_TE.shape)} needs a 16-bit operand [{size}, D]; got "
            f"{tuple(other.shape)} of {other.dtype}, and gradients of {grad_TE.dtype}"
        )


def _backward(
    grad_TE: Tensor, x_TD: Tensor, w_ED: Tensor, needs_x: bool, needs_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    return grad_of_rows(grad_TE, w_ED) if needs_x else None, grad_of_weights(grad_TE, x_TD) if needs_w else None


_BACKWARD = Program(_backward)


def repeated_backward(
    grad_TE: Tensor, x_TD: Tensor, w_ED: Tensor, needs_x: bool, needs_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the tokens and of the weights that are needed, as a program."""
    grad_x_TD, grad_ED = _BACKWARD(needs_x + 2 * needs_w, (grad_TE, x_TD, w_ED), needs_x, needs_w)
    return grad_x_TD, grad_ED
