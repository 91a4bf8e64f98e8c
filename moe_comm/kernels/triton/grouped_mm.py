"""Grouped GEMM: rows sorted by expert, times their experts' matrices, and the gradients of both.

    rows_RD  e0 e0 e0 │ e2 e2 │ e3        out[r] = rows[r] @ w[e of r].T        counts [3, 0, 2, 1], on the device

Reference: ``kernels/row_invariant.py``, expert by expert. Programs are persistent and process the tiles in order of
expert. Each program derives its tiles from the counts, so the CPU need not know them. Sums are fp32 over the inner
dimension (for weight gradients, over an expert's rows in order), rounded once, so the bits do not depend on scheduling.
fp32 uses no tensor cores, because TF32 would lose bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.gpu.gemm import SWIGLU, Glu, TakenRows
from moe_comm.kernels.tensor_cores import multiply_rows, multiply_weights, setting
from moe_comm.kernels.triton.device import int64, multiply_add, rounded, store_tile, tile_at, tiles_of_program
from moe_comm.kernels.triton.launch import (
    DTYPES,
    Matrix,
    capability,
    check_index,
    check_rows,
    check_tensors,
    launch,
    processors,
)
from moe_comm.kernels.triton.swiglu import check_swiglu, swiglu_forward


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


INTERPRETED = Tiling(32, 16, 16, 4, 3)
INTERPRETED_WEIGHTS = Tiling(16, 16, 16, 4, 3)
FLOAT32 = Tiling(64, 64, 32, 4, 3)
SMALL = Tiling(64, 128, 64, 4, 4)
"""Tile for experts with few 16-bit rows: the smallest one that fills Hopper's matrix instructions."""
SMALL_ROWS = 64
Kind = Literal["rows", "weights", "added"]
TILINGS: dict[Kind, dict[int, Tiling]] = {
    "rows": {80: Tiling(128, 128, 32, 8, 4), 90: Tiling(128, 256, 64, 8, 3), 100: Tiling(128, 128, 64, 8, 4)},
    "weights": {80: Tiling(128, 128, 32, 8, 4), 90: Tiling(128, 256, 32, 8, 4), 100: Tiling(128, 128, 64, 8, 4)},
    "added": {80: Tiling(128, 128, 32, 8, 4), 90: Tiling(128, 128, 64, 8, 4), 100: Tiling(128, 128, 64, 8, 4)},
}
"""Tiles for 16-bit rows by minimum compute capability: for products of rows, for weight gradients, where ``inner`` are
rows of an expert, and for weight gradients that are added in fp32, which need more registers. Those of sm_90 are the
fastest of a few that were compared on an H100; a lower tile for the last rows of an expert was no faster. Those of
sm_80 and sm_100 were chosen by registers and shared memory, not measured.
"""
TMA_CAPABILITY = 90
"""Minimum compute capability for TMA, the copy engine of a GPU."""
TMA_ALIGNMENT = 16
"""Alignment in bytes of addresses and strides."""
TMA_STAGES = 4
"""Steps that are loaded ahead. On an H100 more than 3 are faster with TMA, and slower without."""
CONSUMER = 120
"""Minimum compute capability of consumer GPUs, which have the shared memory and instructions of sm_80, not sm_100."""


def tiling_for(dtype: torch.dtype, at: int, mean_rows: float, kind: Kind = "rows") -> Tiling:
    """Return the tile for experts with ``mean_rows`` rows on average, on a GPU of compute capability ``at``."""
    if not at:
        return INTERPRETED if kind == "rows" else INTERPRETED_WEIGHTS
    if dtype == torch.float32:
        return FLOAT32
    if mean_rows <= SMALL_ROWS and kind == "rows":
        return SMALL
    table = TILINGS[kind]
    if at >= CONSUMER:
        return table[min(table)]
    return table[max((minimum for minimum in table if minimum <= at), default=min(table))]


@triton.jit
def compute_tile(  # type: ignore[no-untyped-def]
    rows_ptr, rows_stride, w_ptr, w_stride_column, w_stride_inner, out_ptr, out_stride,
    start, first_m, count, first_n, columns, inner,
    ELEMENT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    biases_ptr=None, BIASED: tl.constexpr = False,
):  # fmt: skip
    """Compute one tile of an expert with the rows ``start`` to ``start + count``, from its row ``first_m``. BIASED: add
    the biases [columns] of the expert before rounding."""
    place = first_m + tl.arange(0, BLOCK_M)
    # Out-of-range rows and columns read valid ones and are not stored, so the loop needs no masks. The remainder shows
    # the compiler which columns are contiguous, so that it combines their loads.
    row = start + tl.where(place < count, place, 0)
    column = first_n + tl.arange(0, BLOCK_N)
    valid_n = (column % columns).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = rows_ptr + (row * rows_stride)[:, None] + k[None, :]
    b_ptrs = w_ptr + (valid_n * w_stride_column)[None, :] + (k.to(tl.int64) * w_stride_inner)[:, None]
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
    if BIASED:
        acc += tl.load(biases_ptr + valid_n).to(tl.float32)[None, :]
    store_tile(acc, out_ptr, out_stride, row, place < count, column, columns, ELEMENT)


@triton.jit
def grouped_mm_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,  # [R, inner]
    rows_stride,
    w_ptr,  # [E, columns, inner], any strides
    w_stride_expert, w_stride_column, w_stride_inner,
    counts_ptr,  # [E] int64
    out_ptr,  # [R, columns]
    out_stride, experts, columns, inner,
    biases_ptr,  # [E, columns]; any pointer unless BIASED
    biases_stride,
    ELEMENT: tl.constexpr,
    WHOLE: tl.constexpr,  # inner is a multiple of BLOCK_K
    BIASED: tl.constexpr,
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
        steps = tiles_of_program(skip, tiles, programs)
        for step in range(steps):
            tile_m, tile_n = tile_at(skip + step * programs, tiles_m, tiles_n)
            first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
            compute_tile(
                rows_ptr, rows_stride, w_expert_ptr, w_stride_column, w_stride_inner, out_ptr, out_stride,
                start, first_m, count, first_n, columns, inner, ELEMENT, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K,
                biases_ptr + int64(expert) * biases_stride, BIASED,
            )  # fmt: skip
        skip += steps * programs - tiles
        start += count


@triton.jit
def _tma_tile(  # type: ignore[no-untyped-def]
    rows_desc, w_desc, first_w, out_ptr, out_stride, start, first_m, count, first_n, columns, inner, biases_ptr,
    ELEMENT: tl.constexpr, TRANSPOSED: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile, as ``compute_tile``. first_w: first row of the expert in ``w_desc``."""
    first_row = (start + first_m).to(tl.int32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, inner, BLOCK_K):
        a = rows_desc.load([first_row, first])
        b = w_desc.load([first_w + first, first_n]) if TRANSPOSED else w_desc.load([first_w + first_n, first]).T
        acc = multiply_add(a, b, acc)
    place = first_m + tl.arange(0, BLOCK_M)
    column = first_n + tl.arange(0, BLOCK_N)
    if BIASED:
        acc += tl.load(biases_ptr + column % columns).to(tl.float32)[None, :]
    store_tile(acc, out_ptr, out_stride, start + place, place < count, column, columns, ELEMENT)


@triton.jit
def grouped_mm_tma_kernel(  # type: ignore[no-untyped-def]
    rows_desc,  # [R, inner], blocks [BLOCK_M, BLOCK_K]
    w_desc,  # [E * columns, inner], blocks [BLOCK_N, BLOCK_K]; TRANSPOSED: [E * inner, columns], [BLOCK_K, BLOCK_N]
    counts_ptr,  # [E] int64
    out_ptr,  # [R, columns]
    out_stride, experts, columns,
    inner,  # a multiple of BLOCK_K
    biases_ptr,  # [E, columns]; any pointer unless BIASED
    biases_stride,
    ELEMENT: tl.constexpr, TRANSPOSED: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute ``grouped_mm_kernel``, with operands loaded by TMA.

    A descriptor holds address, sizes and strides of a matrix. With it one thread requests a whole tile, instead of each
    thread computing addresses and copying 16 bytes at a time: fewer instructions and registers. A tile may include rows
    of the next expert, which are computed but not stored. Results are stored with masks, because TMA cannot end a tile
    at the last row of an expert.
    """
    programs = tl.num_programs(0)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    skip = tl.program_id(0)
    start = int64(0)
    for expert in range(experts):
        count = tl.load(counts_ptr + expert)
        tiles_m = tl.cdiv(count, BLOCK_M).to(tl.int32)
        tiles = tiles_m * tiles_n
        first_w = expert * inner if TRANSPOSED else expert * columns
        steps = tiles_of_program(skip, tiles, programs)
        for step in range(steps):
            tile_m, tile_n = tile_at(skip + step * programs, tiles_m, tiles_n)
            first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
            _tma_tile(
                rows_desc, w_desc, first_w, out_ptr, out_stride, start, first_m, count, first_n, columns, inner,
                biases_ptr + int64(expert) * biases_stride, ELEMENT, TRANSPOSED, BIASED, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        skip += steps * programs - tiles
        start += count


@triton.jit
def grouped_weight_grad_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,  # [R, columns]
    grad_stride,
    rows_ptr,  # [R, inner]
    rows_stride,
    counts_ptr,  # [E] int64
    out_ptr,  # [E, columns, inner], any strides
    out_stride_expert, out_stride_column, out_stride_inner, experts, columns, inner,
    ELEMENT: tl.constexpr,  # of out
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute out[e] = grad[rows of e].T @ rows[rows of e]; zeros without rows. BLOCK_K rows at a time.

    ADD: add to out[e] instead; an expert without rows is skipped.
    """
    programs = tl.num_programs(0)
    tiles_m, tiles_n = tl.cdiv(columns, BLOCK_M), tl.cdiv(inner, BLOCK_N)
    tiles = tiles_m * tiles_n
    skip = tl.program_id(0)
    start = int64(0)
    for expert in range(experts):
        count = tl.load(counts_ptr + expert)
        if ADD:
            tiles = tl.where(count > 0, tiles_m * tiles_n, 0)
        steps = tiles_of_program(skip, tiles, programs)
        for step in range(steps):
            tile_m, tile_n = tile_at(skip + step * programs, tiles_m, tiles_n)
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
            inside = (m < columns)[:, None] & (n < inner)[None, :]
            if ADD:
                acc += tl.load(to_ptrs, mask=inside, other=0.0)
            tl.store(to_ptrs, rounded(acc, ELEMENT), mask=inside)
        skip += steps * programs - tiles
        start += count


def grouped_mm_into(
    rows_RD: Tensor, w_END: Tensor, counts_E: Tensor, out_RN: Tensor, *, bias_EN: Tensor | None = None,
    tma: bool = True, native: bool | None = None,
) -> None:  # fmt: skip
    """Write out[r] = rows[r] @ w[e].T for each row r of expert e. No autograd, no synchronization with the CPU.

    Rows beyond the sum of ``counts_E`` (of a larger buffer) are not written.

    Args:
        rows_RD: [R, D] fp32, bf16 or fp16; dense rows, any row stride.
        w_END: [E, N, D] of the same dtype, any strides (for gradients of rows, w transposed).
        counts_E: [E] int64 rows of each expert, on the device. The sum is at most R.
        out_RN: [R, N] of the same dtype; dense rows.
        bias_EN: [E, N] of the same dtype, dense along N, or None: added to each row of e in fp32, before rounding.
        tma: Load 16-bit operands with TMA on sm_90 and sm_100, with the same tiles, if their strides allow it
            (``tma_supports``). False: never. The bits are the same.
        native: With ``tma``, use the kernels in CUDA C++ where they run (``kernels/tensor_cores.py``), with the same
            bits. None: if MOE_COMM_GEMM is ``cuda``.
    """
    _check(rows_RD, w_END, counts_E, out_RN, bias_EN)
    experts, columns, inner = w_END.shape
    if not out_RN.numel() or not experts:
        return
    if native is None:
        native = setting() == "cuda"
    if tma and native and multiply_rows(rows_RD, w_END, counts_E, out_RN, bias_EN=bias_EN):
        return
    at = capability(rows_RD)
    tiling = tiling_for(rows_RD.dtype, at, rows_RD.shape[0] / experts)
    grid, bias = (processors(rows_RD.device),), (out_RN, 0) if bias_EN is None else (bias_EN, bias_EN.stride(0))
    if tma and uses_tma(rows_RD, w_END, tiling, at):
        rows, w = _matrices(rows_RD, w_END, tiling)
        launch(
            grouped_mm_tma_kernel, grid, rows_RD,
            (rows, w, counts_E, out_RN, out_RN.stride(0), experts, columns, inner, *bias),
            ELEMENT=DTYPES[rows_RD.dtype], TRANSPOSED=not _is_plain(w_END), BIASED=bias_EN is not None, **tiling.blocks,
            num_warps=tiling.warps, num_stages=TMA_STAGES,
        )  # fmt: skip
        return
    launch(
        grouped_mm_kernel, grid, rows_RD,
        (rows_RD, rows_RD.stride(0), w_END, *w_END.stride(), counts_E,
         out_RN, out_RN.stride(0), experts, columns, inner, *bias),
        ELEMENT=DTYPES[rows_RD.dtype], WHOLE=inner % tiling.inner == 0, BIASED=bias_EN is not None, **tiling.blocks,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip


def taken_mm_swiglu_into(
    rows: TakenRows, w13_EGD: Tensor, counts_E: Tensor, h_RG: Tensor, act_RF: Tensor, *, glu: Glu = SWIGLU
) -> bool:
    """Write the results of ``grouped_mm_swiglu_into`` for rows that are not copied, if a kernel in CUDA C++ does it.

    Returns:
        Whether the results were written. If not, copy the rows. The bits are the same.
    """
    if setting() != "cuda" or not h_RG.numel() or not w13_EGD.shape[0]:
        return False
    check_index("grouped_mm", "slots", rows.slot_R, h_RG.shape[:1])
    check_swiglu("grouped_mm_swiglu", h_RG, out=act_RF)
    return multiply_rows(rows, w13_EGD, counts_E, h_RG, act_RF, glu=glu)


def grouped_mm_swiglu_into(
    rows_RD: Tensor, w13_EGD: Tensor, counts_E: Tensor, h_RG: Tensor, act_RF: Tensor, b13_EG: Tensor | None = None,
    *, glu: Glu = SWIGLU,
) -> None:  # fmt: skip
    """Write h = rows @ w13.T + b13, and its activation ``glu``; in one launch if MOE_COMM_GEMM is ``cuda``.

    The bits are those of ``grouped_mm_into`` and ``swiglu_forward``, whose arguments and errors these are. Rows beyond
    the sum of ``counts_E`` are undefined.
    """
    _check(rows_RD, w13_EGD, counts_E, h_RG, b13_EG)
    check_swiglu("grouped_mm_swiglu", h_RG, out=act_RF)
    some = h_RG.numel() and w13_EGD.shape[0]
    if some and setting() == "cuda" and multiply_rows(rows_RD, w13_EGD, counts_E, h_RG, act_RF, b13_EG, glu):
        return
    grouped_mm_into(rows_RD, w13_EGD, counts_E, h_RG, bias_EN=b13_EG)
    swiglu_forward(h_RG, act_RF, glu)


def _check(rows_RD: Tensor, w_END: Tensor, counts_E: Tensor, out_RN: Tensor, bias_EN: Tensor | None = None) -> None:
    check_tensors("grouped_mm", rows_RD, w_END, counts_E, out_RN, bias_EN)
    check_rows("grouped_mm", "rows", rows_RD)
    check_rows("grouped_mm", "out", out_RN)
    if w_END.dim() != 3 or w_END.shape[2] != rows_RD.shape[1] or w_END.dtype != rows_RD.dtype:
        raise InputError(
            f"grouped_mm of rows {tuple(rows_RD.shape)} of {rows_RD.dtype} needs weights [E, N, {rows_RD.shape[1]}] "
            f"of that dtype; got {tuple(w_END.shape)} of {w_END.dtype}"
        )
    experts, columns, _ = w_END.shape
    check_index("grouped_mm", "counts", counts_E, (experts,))
    if tuple(out_RN.shape) != (rows_RD.shape[0], columns) or out_RN.dtype != rows_RD.dtype:
        raise InputError(
            f"grouped_mm needs out [{rows_RD.shape[0]}, {columns}] of {rows_RD.dtype}; "
            f"got {tuple(out_RN.shape)} of {out_RN.dtype}"
        )
    if bias_EN is not None:
        check_rows("grouped_mm", "biases", bias_EN)
        if bias_EN.shape != w_END.shape[:2] or bias_EN.dtype != w_END.dtype:
            raise InputError(
                f"grouped_mm needs biases {tuple(w_END.shape[:2])} of {w_END.dtype}; "
                f"got {tuple(bias_EN.shape)} of {bias_EN.dtype}"
            )


def uses_tma(rows_RD: Tensor, w_END: Tensor, tiling: Tiling, at: int) -> bool:
    """Return whether ``grouped_mm_into`` with ``tma`` uses it on a GPU of compute capability ``at``; 0: interpreter."""
    has_tma = not at or TMA_CAPABILITY <= at < CONSUMER  # not compiled for later ones
    return has_tma and rows_RD.element_size() == 2 and tma_supports(rows_RD, w_END, tiling.inner)


def grouped_weight_grad_into(
    grad_RN: Tensor, rows_RD: Tensor, counts_E: Tensor, out_END: Tensor, *, add: bool = False, native: bool = True
) -> None:
    """Write out[e] = grad.T @ rows over the rows of expert e; zeros without rows. Arguments as in ``grouped_mm_into``.

    Args:
        out_END: [E, N, D], any strides, in the dtype of the rows, or fp32.
        add: Add to ``out_END``, which must be fp32, instead of overwriting it. The sum over the rows is added to it in
            fp32; matrices of experts without rows are neither read nor written.
        native: Use the kernels in CUDA C++ where they run (``kernels/tensor_cores.py``).
    """
    check_tensors("grouped_weight_grad", grad_RN, rows_RD, counts_E, out_END)
    check_rows("grouped_weight_grad", "gradients", grad_RN)
    check_rows("grouped_weight_grad", "rows", rows_RD)
    shape = (out_END.shape[0], grad_RN.shape[1], rows_RD.shape[1])
    allowed = (torch.float32,) if add else (torch.float32, rows_RD.dtype)
    fits = grad_RN.dtype == rows_RD.dtype and out_END.dtype in allowed
    if tuple(out_END.shape) != shape or grad_RN.shape[0] != rows_RD.shape[0] or not fits:
        raise InputError(
            f"grouped_weight_grad of gradients {tuple(grad_RN.shape)} of {grad_RN.dtype} and rows "
            f"{tuple(rows_RD.shape)} of {rows_RD.dtype} needs as many of each, of one dtype, and out {shape} of "
            f"{' or '.join(map(str, allowed))}; got {tuple(out_END.shape)} of {out_END.dtype}"
        )
    check_index("grouped_weight_grad", "counts", counts_E, shape[:1])
    if not out_END.numel():
        return
    if native and multiply_weights(grad_RN, rows_RD, counts_E, out_END, add=add):
        return
    experts, columns, inner = shape
    tiling = tiling_for(rows_RD.dtype, capability(rows_RD), rows_RD.shape[0] / experts, "added" if add else "weights")
    launch(
        grouped_weight_grad_kernel, (processors(rows_RD.device),), rows_RD,
        (grad_RN, grad_RN.stride(0), rows_RD, rows_RD.stride(0), counts_E,
         out_END, *out_END.stride(), experts, columns, inner),
        ELEMENT=DTYPES[out_END.dtype], ADD=add, **tiling.blocks,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip


def main_grad_of(w_END: Tensor) -> Tensor | None:
    """Return the attribute ``main_grad`` of a parameter if it is an fp32 tensor of its shape and device, else None."""
    main = getattr(w_END, "main_grad", None)
    if not isinstance(main, Tensor) or main.dtype != torch.float32:
        return None
    return main if main.shape == w_END.shape and main.device == w_END.device else None


def weight_grad(
    w_END: Tensor, grad_RN: Tensor, rows_RD: Tensor, counts_E: Tensor, out_END: Tensor | None = None
) -> Tensor | None:
    """Return the gradient of ``w_END``, or add it to ``w_END.main_grad`` if the parameter has one, or write it into
    ``out_END`` and return None.

    In the second case the result is None: autograd then accumulates nothing, and its hooks run without a gradient. If
    the parameter has an attribute ``grad_added_to_main_grad``, which Megatron's data parallelism sets to False, the
    attribute becomes True and the result is a dummy, because Megatron's hooks require a gradient. The dummy is not
    initialised, or is zero if ``w_END.zero_out_wgrad`` is set.

    Arguments and errors are those of ``grouped_weight_grad_into``.
    """
    if out_END is not None:
        grouped_weight_grad_into(grad_RN, rows_RD, counts_E, out_END)
        return None
    main_END = main_grad_of(w_END)
    if main_END is None:
        grad_END = torch.empty_like(w_END)
        grouped_weight_grad_into(grad_RN, rows_RD, counts_E, grad_END)
        return grad_END
    grouped_weight_grad_into(grad_RN, rows_RD, counts_E, main_END, add=True)
    if not hasattr(w_END, "grad_added_to_main_grad"):
        return None
    w_END.grad_added_to_main_grad = True
    return torch.zeros_like(w_END) if getattr(w_END, "zero_out_wgrad", False) else torch.empty_like(w_END)


def tma_supports(rows_RD: Tensor, w_END: Tensor, step: int) -> bool:
    """Return whether TMA can load the operands in steps of ``step`` along D, on a GPU that has it.

    The experts' matrices must follow each other without gaps, with D or N dense, and addresses and strides must be
    multiples of 16 bytes.
    """
    experts, columns, inner = w_END.shape
    size = rows_RD.element_size()
    by_expert, by_column, by_inner = w_END.stride()
    plain, transposed = _is_plain(w_END), _is_transposed(w_END)
    strides = [rows_RD.stride(0), by_column if plain else by_inner]
    return (
        (plain or transposed)
        and inner % step == 0
        and min(rows_RD.shape[0], experts, columns, inner) > 0
        and max(rows_RD.shape[0], experts * columns, experts * inner) < 2**31
        and (experts == 1 or by_expert == (columns * by_column if plain else inner * by_inner))
        and all(stride * size % TMA_ALIGNMENT == 0 for stride in strides)
        and rows_RD.data_ptr() % TMA_ALIGNMENT == 0
        and w_END.data_ptr() % TMA_ALIGNMENT == 0
    )


def _matrices(rows_RD: Tensor, w_END: Tensor, tiling: Tiling) -> tuple[Matrix, Matrix]:
    """Return the operands of ``grouped_mm_tma_kernel``, if it supports them."""
    experts, columns, inner = w_END.shape
    _, by_column, by_inner = w_END.stride()
    transposed = not _is_plain(w_END)
    block, step = tiling.columns, tiling.inner
    w_shape = (experts * inner, columns) if transposed else (experts * columns, inner)
    w_strides = (by_inner if transposed else by_column, 1)
    return (
        Matrix(rows_RD, (rows_RD.shape[0], inner), (rows_RD.stride(0), 1), (tiling.rows, step)),
        Matrix(w_END, w_shape, w_strides, (step, block) if transposed else (block, step)),
    )


def _is_plain(w_END: Tensor) -> bool:
    """Return whether D is dense, and the rows of a matrix do not overlap."""
    return w_END.stride(2) == 1 and w_END.stride(1) >= w_END.shape[2]


def _is_transposed(w_END: Tensor) -> bool:
    return w_END.stride(1) == 1 and w_END.stride(2) >= w_END.shape[1]
