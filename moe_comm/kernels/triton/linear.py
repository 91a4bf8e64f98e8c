"""Products of 16-bit rows and weights with fp32 results, the logits of a router, and their gradients.

    y = x @ w.T              the same tile for any number of rows: a row has the same bits in every batch
    grad_x[t] = grad[t] @ w  likewise
    grad_w    = grad.T @ x   partial sums of PART rows, and their sum in order: the same bits in every call

Products of 16-bit numbers are exact in fp32, and sums are fp32, so the operands need not be converted to fp32, which
GPUs multiply without tensor cores. One launch computes the tiles of both gradients. The partial sums are added by the
program that computes the last one of a tile, or by a second launch. In bf16, tensor cores multiply three bf16 terms
whose sum is the fp32 gradient, so products are exact. In fp16 such terms could overflow, and products are those of
fp32. Reference: ``row_invariant_linear`` of the fp32 operands, up to the order of sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.triton.device import int64, multiply_add, rounded, store_tile
from moe_comm.kernels.triton.grouped_mm import INTERPRETED, Tiling, compute_tile
from moe_comm.kernels.triton.launch import DTYPES, capability, check_rows, check_tensors, launch, tile
from moe_comm.kernels.triton.program import Program

TILING = Tiling(64, 64, 64, 4, 4)
GRADIENT_TILING = Tiling(64, 128, 32, 4, 3)
PART = 1024
"""Rows of a partial sum of the gradient of weights."""
SUM_ELEMENTS = 1024


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
def _rows_tile(  # type: ignore[no-untyped-def]
    grad_ptr, grad_stride, w_ptr, w_stride_expert, w_stride_column, out_ptr, tile, rows, experts, columns,
    ELEMENT: tl.constexpr, ADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(columns, BLOCK_N)
    row = int64(tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, experts, BLOCK_K):
        at = first + k
        grad = tl.load(
            grad_ptr + (row * grad_stride)[:, None] + at[None, :],
            mask=(row < rows)[:, None] & (at < experts)[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(
            w_ptr + (at.to(tl.int64) * w_stride_expert)[:, None] + (column.to(tl.int64) * w_stride_column)[None, :],
            mask=(at < experts)[:, None] & (column < columns)[None, :], other=0.0,
        )  # fmt: skip
        acc = multiply_wide(grad, w, acc)
    if ADDED:
        out_ptrs = out_ptr + (row * columns)[:, None] + column[None, :]
        before = tl.load(out_ptrs, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)
        acc = before.to(tl.float32) + rounded(acc, ELEMENT).to(tl.float32)
    store_tile(acc, out_ptr, columns, row, row < rows, column, columns, ELEMENT)


@triton.jit
def _weights_tile(  # type: ignore[no-untyped-def]
    grad_ptr, grad_stride, x_ptr, x_stride, parts_ptr, sums_ptr, ended_ptr, tile, rows, experts, columns,
    ELEMENT: tl.constexpr, SUMMED: tl.constexpr, PART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tiles = tl.cdiv(experts, BLOCK_M) * tiles_n
    part = int64(tile // tiles)
    m = tile % tiles // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, PART, BLOCK_K):
        row = part * PART + first + k
        grad = tl.load(
            grad_ptr + (row * grad_stride)[None, :] + m[:, None],
            mask=(m < experts)[:, None] & (row < rows)[None, :], other=0.0,
        )  # fmt: skip
        x = tl.load(
            x_ptr + (row * x_stride)[:, None] + column[None, :],
            mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0,
        )  # fmt: skip
        acc = multiply_wide(grad, x, acc)
    store_tile(acc, parts_ptr, columns, part * experts + m, m < experts, column, columns, tl.float32)
    if SUMMED:
        parts = tl.cdiv(rows, PART)
        tl.debug_barrier()  # the atomic of one thread publishes the stores of all
        if tl.atomic_add(ended_ptr + tile % tiles, 1) == parts - 1:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for other in range(parts):
                total += tl.load(
                    parts_ptr + ((int64(other) * experts + m) * columns)[:, None] + column[None, :],
                    mask=(m < experts)[:, None] & (column < columns)[None, :], other=0.0,
                )  # fmt: skip
            store_tile(total, sums_ptr, columns, m, m < experts, column, columns, ELEMENT)


@triton.jit
def linear_backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,  # [rows, experts] fp32
    grad_stride,
    x_ptr,  # [rows, columns]
    x_stride,
    w_ptr,  # [experts, columns]
    w_stride_expert, w_stride_column,
    out_ptr,  # [rows, columns] dense
    parts_ptr,  # [parts, experts, columns] fp32, dense
    sums_ptr,  # [experts, columns], dense; any pointer unless SUMMED
    ended_ptr,  # int32 zeros, one for each tile of a part; any pointer unless SUMMED
    tiles,  # of the gradient of weights, which the first programs compute: their tiles take longer
    rows, experts, columns,
    ELEMENT: tl.constexpr, ADDED: tl.constexpr, SUMMED: tl.constexpr, PART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile per program: of a partial sum of the gradient of weights, or of the gradient of rows.

    ADDED: round the gradient of rows and add it to the output. SUMMED: the program that computes the last part of a
    tile adds the parts in order, and rounds once.
    """
    tile = tl.program_id(0)
    if tile < tiles:
        _weights_tile(
            grad_ptr, grad_stride, x_ptr, x_stride, parts_ptr, sums_ptr, ended_ptr, tile, rows, experts, columns,
            ELEMENT, SUMMED, PART, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        _rows_tile(
            grad_ptr, grad_stride, w_ptr, w_stride_expert, w_stride_column, out_ptr, tile - tiles, rows, experts,
            columns, ELEMENT, ADDED, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip


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


def takes(rows_RD: Tensor, w_ND: Tensor, grad_RN: Tensor | None = None) -> bool:
    """Return whether the kernels support operands of these dtypes and strides, and gradients of the result."""
    fits = rows_RD.dtype in (torch.bfloat16, torch.float16) and w_ND.dtype == rows_RD.dtype and rows_RD.stride(1) == 1
    return fits and (grad_RN is None or (grad_RN.dtype == torch.float32 and grad_RN.stride(1) == 1))


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


def linear_gradients(
    grad_TE: Tensor, x_TD: Tensor, w_ED: Tensor, needs: tuple[bool, bool], added_TD: Tensor | None = None,
    ended: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return grad @ w, [T, D], and grad.T @ x, [E, D], in the dtype of ``x`` and ``w``. No autograd.

    Args:
        grad_TE: [T, E] fp32; dense rows, any row stride.
        x_TD: [T, D] bf16 or fp16; dense rows, any row stride.
        w_ED: [E, D] in the dtype of ``x_TD``, any strides.
        needs: whether each of the two is needed; otherwise it is None.
        added_TD: a contiguous tensor to which grad @ w is added and which is returned, with the bits of ``add_``.
        ended: ``counters`` that are 0, with which all of it is one launch.
    """
    check_tensors("linear_gradients", grad_TE, x_TD, w_ED)
    check_rows("linear_gradients", "gradients", grad_TE)
    check_rows("linear_gradients", "rows", x_TD)
    (rows, columns), experts, (needs_x, needs_w) = x_TD.shape, w_ED.shape[0], needs
    dtypes = x_TD.dtype in (torch.bfloat16, torch.float16) and w_ED.dtype == x_TD.dtype
    shapes = grad_TE.shape == (rows, experts) and w_ED.shape == (experts, columns)
    if not dtypes or not shapes or grad_TE.dtype != torch.float32:
        raise InputError(
            f"linear_gradients of fp32 gradients [{rows}, {experts}] needs 16-bit tokens and weights; got gradients "
            f"{tuple(grad_TE.shape)} of {grad_TE.dtype}, tokens {tuple(x_TD.shape)} of {x_TD.dtype} and weights "
            f"{tuple(w_ED.shape)} of {w_ED.dtype}"
        )
    tiling, part = _tiling(grad_TE)
    grad_x_TD = (torch.empty_like(x_TD) if added_TD is None else added_TD) if needs_x else None
    grad_ED = torch.empty(experts, columns, dtype=x_TD.dtype, device=x_TD.device) if needs_w else None
    parts, tiles_n = -(-rows // part) if needs_w else 0, -(-columns // tiling.columns)
    tiles = parts * -(-experts // tiling.rows) * tiles_n
    parts_PED = torch.empty(parts, experts, columns, dtype=torch.float32, device=x_TD.device)
    programs = tiles + (-(-rows // tiling.rows) * tiles_n if needs_x else 0)
    if programs:
        launch(
            linear_backward_kernel, (programs,), grad_TE,
            (grad_TE, grad_TE.stride(0), x_TD, x_TD.stride(0), w_ED, *w_ED.stride(),
             x_TD if grad_x_TD is None else grad_x_TD, parts_PED, parts_PED if grad_ED is None else grad_ED,
             parts_PED if ended is None else ended, tiles, rows, experts, columns),
            ELEMENT=DTYPES[x_TD.dtype], ADDED=added_TD is not None, SUMMED=ended is not None and needs_w, PART=part,
            **tiling.blocks, num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
    if grad_ED is not None and not tiles:
        grad_ED.zero_()
    elif grad_ED is not None and ended is None:
        _, block = tile(grad_ED.numel(), SUM_ELEMENTS)
        launch(
            sum_parts_kernel, (-(-grad_ED.numel() // block),), grad_TE, (parts_PED, grad_ED, parts, grad_ED.numel()),
            ELEMENT=DTYPES[x_TD.dtype], COLUMNS=block, num_warps=4,
        )  # fmt: skip
    return grad_x_TD, grad_ED


def counters(x_TD: Tensor, w_ED: Tensor) -> Tensor:
    """Return uninitialized int32 counters for ``linear_gradients``."""
    tiling, _ = _tiling(x_TD)
    tiles = -(-w_ED.shape[0] // tiling.rows) * -(-w_ED.shape[1] // tiling.columns)
    return torch.empty(tiles, dtype=torch.int32, device=x_TD.device)


def _tiling(on: Tensor) -> tuple[Tiling, int]:
    """Return the tiles of gradients, and the rows of a partial sum."""
    return (GRADIENT_TILING, PART) if capability(on) else (INTERPRETED, 2 * INTERPRETED.inner)


_LINEAR, _GRADIENTS = Program(lambda rows_RD, w_ND: (linear(rows_RD, w_ND),)), Program(linear_gradients)


def repeated_linear(rows_RD: Tensor, w_ND: Tensor) -> Tensor:
    """Return ``linear``, as a program."""
    (out_RN,) = _LINEAR(1, (rows_RD, w_ND))
    return out_RN  # type: ignore[no-any-return]


def repeated_gradients(
    grad_TE: Tensor, x_TD: Tensor, w_ED: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return ``linear_gradients`` as a program."""
    grad_x_TD, grad_ED = _GRADIENTS(any(needs) + needs[1], (grad_TE, x_TD, w_ED), needs)
    return grad_x_TD, grad_ED
