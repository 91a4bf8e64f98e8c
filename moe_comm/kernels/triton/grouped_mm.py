"""Grouped GEMM: rows sorted by expert, times their experts' matrices, and the gradients of both.

    rows_RD  e0 e0 e0 │ e2 e2 │ e3        out[r] = rows[r] @ w[e of r].T        counts [3, 0, 2, 1], on the device

Reference: ``kernels/row_invariant.py``, expert by expert. Programs are persistent and process the tiles in order of
expert. Each program derives its tiles from the counts, so the host need not know them. Sums are fp32 over the inner
dimension (for weight gradients, over an expert's rows in order), rounded once, so the bits do not depend on scheduling.
fp32 uses no tensor cores, because TF32 would lose bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.errors import InputError
from moe_comm.kernels.needed_grads import needed_gradients
from moe_comm.kernels.triton.device import int64, multiply_add, rounded, tile_at
from moe_comm.kernels.triton.launch import (
    DTYPES,
    capability,
    check_index,
    check_rows,
    check_tensors,
    on_device_of,
    options,
    processors,
)


@dataclass(frozen=True)
class Tiling:
    """Tile of a kernel.

    rows, columns, inner: sizes of a tile and its step; powers of two, at least 16. warps, stages: of a compiled
        program.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    @property
    def blocks(self) -> dict[str, int]:
        """The tile sizes as kernel arguments."""
        return {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.inner}


INTERPRETED = Tiling(16, 16, 16, 4, 3)
FLOAT32 = Tiling(64, 64, 32, 4, 3)
SMALL = Tiling(64, 128, 64, 4, 4)
"""Tile for experts with few 16-bit rows: the smallest one that fills Hopper's matrix instructions."""
SMALL_ROWS = 64
TILINGS = {
    80: Tiling(128, 128, 32, 8, 4),
    90: Tiling(128, 256, 64, 8, 3),
    100: Tiling(128, 128, 64, 8, 4),
}
"""Tiles for 16-bit rows, by minimum compute capability. Chosen by registers and shared memory, not measured."""
WEIGHT_TILINGS = {80: Tiling(128, 128, 32, 8, 4), 90: Tiling(128, 128, 64, 8, 4), 100: Tiling(128, 128, 64, 8, 4)}
"""The same for weight gradients, where ``inner`` are rows of an expert."""
CONSUMER = 120
"""Minimum compute capability of consumer GPUs, which have the shared memory and instructions of sm_80, not sm_100."""


def tiling_for(dtype: torch.dtype, at: int, mean_rows: float, *, weights: bool = False) -> Tiling:
    """Return the tile for experts with ``mean_rows`` rows on average, on a GPU of compute capability ``at``."""
    if not at:
        return INTERPRETED
    if dtype == torch.float32:
        return FLOAT32
    if mean_rows <= SMALL_ROWS and not weights:
        return SMALL
    table = WEIGHT_TILINGS if weights else TILINGS
    if at >= CONSUMER:
        return table[min(table)]
    return table[max((minimum for minimum in table if minimum <= at), default=min(table))]


@triton.jit
def grouped_mm_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,  # [R, inner]
    rows_stride,
    w_ptr,  # [E, columns, inner], any strides
    w_stride_expert, w_stride_column, w_stride_inner,
    counts_ptr,  # [E] int64
    out_ptr,  # [R, columns]
    out_stride, experts, columns, inner,
    ELEMENT: tl.constexpr,
    WHOLE: tl.constexpr,  # inner is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute out[r] = rows[r] @ w[expert of r].T. Program p computes the tiles t with t % programs == p."""
    programs = tl.num_programs(0)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    skip = tl.program_id(0)  # offset of this program's next tile from the first tile of the expert
    start = int64(0)
    for expert in range(experts):
        count = tl.load(counts_ptr + expert)
        tiles_m = tl.cdiv(count, BLOCK_M).to(tl.int32)
        tiles = tiles_m * tiles_n
        w_expert_ptr = w_ptr + int64(expert) * w_stride_expert
        for tile in range(skip, tiles, programs):
            tile_m, tile_n = tile_at(tile, tiles_m, tiles_n)
            place = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            # Out-of-range rows and columns read valid ones and are not stored, so the loop needs no masks. The
            # remainder shows the compiler which columns are contiguous, so that it combines their loads.
            row = start + tl.where(place < count, place, 0)
            column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            valid_n = (column % columns).to(tl.int64)
            k = tl.arange(0, BLOCK_K)
            a_ptrs = rows_ptr + (row * rows_stride)[:, None] + k[None, :]
            b_ptrs = w_expert_ptr + (valid_n * w_stride_column)[None, :] + (k.to(tl.int64) * w_stride_inner)[:, None]
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for first in range(0, inner, BLOCK_K):
                if WHOLE:
                    a = tl.load(a_ptrs)
                    b = tl.load(b_ptrs)
                else:
                    a = tl.load(a_ptrs, mask=(k < inner - first)[None, :], other=0.0)
                    b = tl.load(b_ptrs, mask=(k < inner - first)[:, None], other=0.0)
                acc = multiply_add(a, b, acc)
                a_ptrs += BLOCK_K
                b_ptrs += BLOCK_K * w_stride_inner
            to_ptrs = out_ptr + (row * out_stride)[:, None] + column[None, :]
            tl.store(to_ptrs, rounded(acc, ELEMENT), mask=(place < count)[:, None] & (column < columns)[None, :])
        skip = _next(skip, tiles, programs)
        start += count


@triton.jit
def _next(skip, tiles, programs):  # type: ignore[no-untyped-def]
    """Return the offset of a program's next tile from the end of ``tiles`` tiles. ``skip``: from their start."""
    beyond = skip - tiles
    return tl.where(beyond >= 0, beyond, (programs + beyond % programs) % programs)


@triton.jit
def grouped_weight_grad_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,  # [R, columns]
    grad_stride,
    rows_ptr,  # [R, inner]
    rows_stride,
    counts_ptr,  # [E] int64
    out_ptr,  # [E, columns, inner], any strides
    out_stride_expert, out_stride_column, out_stride_inner, experts, columns, inner,
    ELEMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute out[e] = grad[rows of e].T @ rows[rows of e]; zeros without rows. BLOCK_K rows at a time."""
    programs = tl.num_programs(0)
    tiles_m, tiles_n = tl.cdiv(columns, BLOCK_M), tl.cdiv(inner, BLOCK_N)
    tiles = tiles_m * tiles_n
    skip = tl.program_id(0)
    start = int64(0)
    for expert in range(experts):
        count = tl.load(counts_ptr + expert)
        for tile in range(skip, tiles, programs):
            tile_m, tile_n = tile_at(tile, tiles_m, tiles_n)
            m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            k = tl.arange(0, BLOCK_K)
            a_ptrs = grad_ptr + ((start + k) * grad_stride)[None, :] + (m % columns)[:, None]
            b_ptrs = rows_ptr + ((start + k) * rows_stride)[:, None] + (n % inner)[None, :]
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for first in range(0, count.to(tl.int32), BLOCK_K):
                live = k < count - first
                a = tl.load(a_ptrs, mask=live[None, :], other=0.0)
                b = tl.load(b_ptrs, mask=live[:, None], other=0.0)
                acc = multiply_add(a, b, acc)
                a_ptrs += int64(BLOCK_K) * grad_stride
                b_ptrs += int64(BLOCK_K) * rows_stride
            to_ptrs = out_ptr + int64(expert) * out_stride_expert
            to_ptrs += (m.to(tl.int64) * out_stride_column)[:, None] + (n.to(tl.int64) * out_stride_inner)[None, :]
            tl.store(to_ptrs, rounded(acc, ELEMENT), mask=(m < columns)[:, None] & (n < inner)[None, :])
        skip = _next(skip, tiles, programs)
        start += count


def grouped_mm_into(rows_RD: Tensor, w_END: Tensor, counts_E: Tensor, out_RN: Tensor) -> None:
    """Write out[r] = rows[r] @ w[e].T for each row r of expert e. No autograd, no synchronization with the host.

    Rows beyond the sum of ``counts_E`` (of a larger buffer) are not written.

    Args:
        rows_RD: [R, D] fp32, bf16 or fp16; dense rows, any row stride.
        w_END: [E, N, D] of the same dtype, any strides (for gradients of rows, w transposed).
        counts_E: [E] int64 rows of each expert, on the device. The sum is at most R.
        out_RN: [R, N] of the same dtype; dense rows.

    Raises:
        InputError: shapes or dtypes are not supported.
        ConfigError: CPU tensors, and kernels are not interpreted.
    """
    check_tensors("grouped_mm", rows_RD, w_END, counts_E, out_RN)
    check_rows("grouped_mm", "rows", rows_RD)
    check_rows("grouped_mm", "out", out_RN)
    if w_END.dim() != 3 or w_END.shape[2] != rows_RD.shape[1] or w_END.dtype != rows_RD.dtype:
        raise InputError(
            f"grouped_mm of rows {tuple(rows_RD.shape)} of {rows_RD.dtype} needs weights [E, N, {rows_RD.shape[1]}] "
            f"of that dtype; got {tuple(w_END.shape)} of {w_END.dtype}"
        )
    experts, columns, inner = w_END.shape
    check_index("grouped_mm", "counts", counts_E, (experts,))
    if tuple(out_RN.shape) != (rows_RD.shape[0], columns) or out_RN.dtype != rows_RD.dtype:
        raise InputError(
            f"grouped_mm needs out [{rows_RD.shape[0]}, {columns}] of {rows_RD.dtype}; "
            f"got {tuple(out_RN.shape)} of {out_RN.dtype}"
        )
    if not out_RN.numel() or not experts:
        return
    tiling = tiling_for(rows_RD.dtype, capability(rows_RD), rows_RD.shape[0] / experts)
    with on_device_of(rows_RD):
        grouped_mm_kernel[(processors(rows_RD.device),)](
            rows_RD, rows_RD.stride(0), w_END, *w_END.stride(), counts_E,
            out_RN, out_RN.stride(0), experts, columns, inner,
            ELEMENT=DTYPES[rows_RD.dtype], WHOLE=inner % tiling.inner == 0, **tiling.blocks, **_launch(rows_RD, tiling),
        )  # fmt: skip


def grouped_weight_grad_into(grad_RN: Tensor, rows_RD: Tensor, counts_E: Tensor, out_END: Tensor) -> None:
    """Write out[e] = grad.T @ rows over the rows of expert e; zeros without rows. Arguments as in ``grouped_mm_into``.

    Raises:
        InputError: shapes or dtypes are not supported.
        ConfigError: CPU tensors, and kernels are not interpreted.
    """
    check_tensors("grouped_weight_grad", grad_RN, rows_RD, counts_E, out_END)
    check_rows("grouped_weight_grad", "gradients", grad_RN)
    check_rows("grouped_weight_grad", "rows", rows_RD)
    shape = (out_END.shape[0], grad_RN.shape[1], rows_RD.shape[1])
    same_dtype = grad_RN.dtype == rows_RD.dtype == out_END.dtype
    if tuple(out_END.shape) != shape or grad_RN.shape[0] != rows_RD.shape[0] or not same_dtype:
        raise InputError(
            f"grouped_weight_grad of gradients {tuple(grad_RN.shape)} of {grad_RN.dtype} and rows "
            f"{tuple(rows_RD.shape)} of {rows_RD.dtype} needs as many of each, and out {shape} of their dtype; "
            f"got {tuple(out_END.shape)} of {out_END.dtype}"
        )
    check_index("grouped_weight_grad", "counts", counts_E, shape[:1])
    if not out_END.numel():
        return
    experts, columns, inner = shape
    tiling = tiling_for(rows_RD.dtype, capability(rows_RD), rows_RD.shape[0] / experts, weights=True)
    with on_device_of(rows_RD):
        grouped_weight_grad_kernel[(processors(rows_RD.device),)](
            grad_RN, grad_RN.stride(0), rows_RD, rows_RD.stride(0), counts_E,
            out_END, *out_END.stride(), experts, columns, inner,
            ELEMENT=DTYPES[rows_RD.dtype], **tiling.blocks, **_launch(rows_RD, tiling),
        )  # fmt: skip


def _launch(tensor: Tensor, tiling: Tiling) -> dict[str, Any]:
    return options(tensor, num_warps=tiling.warps, num_stages=tiling.stages)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, w_END: Tensor, counts_E: Tensor) -> Tensor:
        out_RN = rows_RD.new_empty(rows_RD.shape[0], w_END.shape[1])
        grouped_mm_into(rows_RD, w_END, counts_E, out_RN)
        ctx.save_for_backward(rows_RD, w_END, counts_E)
        return out_RN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_RD, w_END, counts_E = ctx.saved_tensors
        needs_rows, needs_w, _ = needed_gradients(ctx)
        grad_RN = grad_RN.contiguous()
        grad_RD = torch.empty_like(rows_RD, memory_format=torch.contiguous_format) if needs_rows else None
        grad_END = torch.empty_like(w_END) if needs_w else None
        if grad_RD is not None:
            grouped_mm_into(grad_RN, w_END.transpose(1, 2), counts_E, grad_RD)
        if grad_END is not None:
            grouped_weight_grad_into(grad_RN, rows_RD, counts_E, grad_END)
        return grad_RD, grad_END, None


def grouped_mm(rows_RD: Tensor, w_END: Tensor, counts_E: Tensor) -> Tensor:
    """Return [R, N]; differentiable. Arguments and errors as in ``grouped_mm_into``.

    Rows beyond the sum of ``counts_E``, and their gradients, are undefined.
    """
    return _GroupedMM.apply(rows_RD, w_END, counts_E)  # type: ignore[no-any-return]
