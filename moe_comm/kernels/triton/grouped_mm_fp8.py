"""Grouped GEMM of e4m3 rows and weights with fp32 scales per block; ``kernels/fp8.py`` defines the arithmetic.

The tensor cores compute the sums of a block. Each is multiplied by its scales and added to an fp32 sum, so that the
reduced precision of Hopper's fp8 accumulators affects sums of at most 128 products. With this operator experts read the
rows of an fp8 dispatch as they are received, without a copy in bf16. There is no backward pass.

GPUs before sm_89 have no e4m3 instructions: values are converted to bf16, exactly, and multiplied in bf16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.tensor_cores import multiply_fp8, setting
from moe_comm.kernels.triton.device import INTERPRETED, e4m3_value, int64, store_tile, tile_at, tiles_of_program
from moe_comm.kernels.triton.grouped_mm import CONSUMER, SMALL_ROWS, Tiling
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
from moe_comm.kernels.triton.quantize import BLOCK, CONVERTS_FROM

E4M3 = (torch.float8_e4m3fn, torch.uint8)
"""Dtypes of values: e4m3, or its bytes."""
TILING = Tiling(128, 128, BLOCK, 8, 4)
SMALL = Tiling(64, 128, BLOCK, 4, 4)
CONSUMER_TILING = Tiling(64, 128, BLOCK, 4, 3)
"""Tile for sm_89 and from sm_120, which have 99 KiB of shared memory."""
CONVERTING = Tiling(64, 128, BLOCK, 8, 3)
"""Tile where values are converted to bf16 in registers."""
TILING_INTERPRETED = Tiling(32, 16, BLOCK, 4, 3)


def fp8_tiling_for(at: int, mean_rows: float) -> Tiling:
    """Return the tile for experts with ``mean_rows`` rows on average, on a GPU of compute capability ``at``.

    A tile has at most 128 columns, so that one scale of the weights applies to all of them, and steps of 128 channels.
    """
    if not at:
        return TILING_INTERPRETED
    if at < CONVERTS_FROM:
        return CONVERTING
    if at == CONVERTS_FROM or at >= CONSUMER:
        return CONSUMER_TILING
    return SMALL if mean_rows <= SMALL_ROWS else TILING


@triton.jit
def _block_product(a, b, CONVERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a @ b in fp32; a [M, K] and b [K, N] e4m3, or its bytes if not CONVERTS."""
    if CONVERTS:
        return tl.dot(a, b)
    elif INTERPRETED:
        return tl.dot(e4m3_value(a), e4m3_value(b), input_precision="ieee")
    else:
        return tl.dot(e4m3_value(a).to(tl.bfloat16), e4m3_value(b).to(tl.bfloat16))


@triton.jit
def _fp8_tile(  # type: ignore[no-untyped-def]
    values_ptr, values_stride, scale_ptr, scale_stride, scale_stride_block,
    w_ptr, w_stride_column, w_scale_ptr, w_scale_stride_block, out_ptr, out_stride,
    start, first_m, count, first_n, columns, inner,
    ELEMENT: tl.constexpr, WHOLE: tl.constexpr, CONVERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile, as ``compute_tile`` in ``grouped_mm.py``. ``w_scale_ptr``: the scales of the tile's columns."""
    place = first_m + tl.arange(0, BLOCK_M)
    row = start + tl.where(place < count, place, 0)
    column = first_n + tl.arange(0, BLOCK_N)
    valid_n = (column % columns).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = values_ptr + (row * values_stride)[:, None] + k[None, :]
    b_ptrs = w_ptr + (valid_n * w_stride_column)[None, :] + k[:, None]
    scale_ptrs = scale_ptr + row * scale_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, inner, BLOCK_K):
        scale = tl.load(scale_ptrs) * tl.load(w_scale_ptr)  # before the product, which hides their latency
        if WHOLE:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(k < inner - first)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=(k < inner - first)[:, None], other=0.0)
        acc += _block_product(a, b, CONVERTS) * scale[:, None]
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
        scale_ptrs += scale_stride_block
        w_scale_ptr += w_scale_stride_block
    store_tile(acc, out_ptr, out_stride, row, place < count, column, columns, ELEMENT)


@triton.jit
def grouped_mm_fp8_kernel(  # type: ignore[no-untyped-def]
    values_ptr,  # [R, inner] e4m3, or its bytes if not CONVERTS
    values_stride,
    scale_ptr,  # [R, inner / BLOCK_K] fp32
    scale_stride, scale_stride_block,
    w_ptr,  # [E, columns, inner], as values_ptr
    w_stride_expert, w_stride_column,
    w_scale_ptr,  # [E, columns / BLOCK_K, inner / BLOCK_K] fp32
    w_scale_stride_expert, w_scale_stride_column, w_scale_stride_block,
    counts_ptr,  # [E] or [E, SOURCES] int64
    out_ptr,  # [R, columns]
    out_stride, experts, columns, inner, block_rows,
    ELEMENT: tl.constexpr, WHOLE: tl.constexpr, CONVERTS: tl.constexpr, SOURCES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the rows of all experts. Programs and tiles as in ``grouped_mm_kernel``; BLOCK_K is the scale block.

    SOURCES: 0 if the rows of an expert follow those of the expert before; else each expert has that many blocks of
    ``block_rows`` rows, with a count for each block.
    """
    programs = tl.num_programs(0)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    skip = tl.program_id(0)
    start = int64(0)
    for group in range(experts * SOURCES if SOURCES else experts):
        expert = group // SOURCES if SOURCES else group
        count = tl.load(counts_ptr + group)
        tiles_m = tl.cdiv(count, BLOCK_M).to(tl.int32)
        tiles = tiles_m * tiles_n
        w_expert_ptr = w_ptr + int64(expert) * w_stride_expert
        w_scale_expert_ptr = w_scale_ptr + int64(expert) * w_scale_stride_expert
        steps = tiles_of_program(skip, tiles, programs)
        for step in range(steps):
            tile_m, tile_n = tile_at(skip + step * programs, tiles_m, tiles_n)
            first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
            w_scale_tile_ptr = w_scale_expert_ptr + (first_n // BLOCK_K) * w_scale_stride_column
            _fp8_tile(
                values_ptr, values_stride, scale_ptr, scale_stride, scale_stride_block,
                w_expert_ptr, w_stride_column, w_scale_tile_ptr, w_scale_stride_block, out_ptr, out_stride,
                start, first_m, count, first_n, columns, inner, ELEMENT, WHOLE, CONVERTS, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        skip += steps * programs - tiles
        start += block_rows if SOURCES else count


def grouped_mm_fp8_into(
    rows: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    counts_E: Tensor,
    out_RN: Tensor,
    *,
    native: bool | None = None,
) -> None:
    """Write out[r] = rows[r] @ w[e].T for each row r of expert e. No autograd, no synchronization with the CPU.

    Rows beyond the counts are neither read nor written.

    Args:
        rows: Values [R, K], e4m3 or its bytes (uint8), dense rows with any row stride; and fp32 scales [R, K / 128],
            any strides. Both may be views of packed rows (``quantize``).
        weights: Values [E, N, K], e4m3 or its bytes, dense along K; and fp32 scales [E, N / 128, K / 128]. Fractions
            are rounded up.
        counts_E: [E] int64 rows of each expert, on the device. The sum is at most R. Or [E, W]: the rows of each expert
            consist of W blocks of R / (E W) rows, and the counts are those of the first rows of each block that are
            used, as ``LowLatencyHandle.receive_scaled`` returns them.
        out_RN: [R, N] fp32, bf16 or fp16; dense rows.
        native: Use the kernel in CUDA C++ where it runs and takes the operands (``kernels/tensor_cores.py``). None: if
            MOE_COMM_GEMM is ``cuda``.
    """
    (values_RK, scale_RB), (w_ENK, w_scale_ECB) = rows, weights
    check_tensors("grouped_mm_fp8", values_RK, scale_RB, w_ENK, w_scale_ECB, counts_E, out_RN)
    check_rows("grouped_mm_fp8", "out", out_RN)
    _check_fp8("rows", values_RK, scale_RB, 2, (BLOCK,))
    _check_fp8("weights", w_ENK, w_scale_ECB, 3, (BLOCK, BLOCK))
    (experts, columns, inner), num_rows = w_ENK.shape, values_RK.shape[0]
    blocked = counts_E.dim() == 2
    check_index("grouped_mm_fp8", "counts", counts_E, (experts, -1) if blocked else (experts,))
    if blocked and num_rows % max(1, counts_E.numel()):
        raise InputError(
            f"grouped_mm_fp8 needs blocks of equal size for counts {tuple(counts_E.shape)}; got {num_rows} rows"
        )
    if values_RK.shape[1] != inner or tuple(out_RN.shape) != (num_rows, columns):
        raise InputError(
            f"grouped_mm_fp8 of weights {tuple(w_ENK.shape)} needs rows [R, {inner}] and out [R, {columns}]; "
            f"got {tuple(values_RK.shape)} and {tuple(out_RN.shape)}"
        )
    if not out_RN.numel() or not counts_E.numel():
        return
    if (setting() == "cuda" if native is None else native) and multiply_fp8(rows, weights, counts_E, out_RN):
        return
    at = capability(values_RK)
    tiling, converts = fp8_tiling_for(at, num_rows / counts_E.numel()), at >= CONVERTS_FROM
    words = torch.float8_e4m3fn if converts else torch.uint8
    with on_device_of(values_RK):
        grouped_mm_fp8_kernel[(processors(values_RK.device),)](
            values_RK.view(words), values_RK.stride(0), scale_RB, *scale_RB.stride(),
            w_ENK.view(words), *w_ENK.stride()[:2], w_scale_ECB, *w_scale_ECB.stride(), counts_E,
            out_RN, out_RN.stride(0), experts, columns, inner, num_rows // counts_E.numel(),
            ELEMENT=DTYPES[out_RN.dtype], WHOLE=inner % BLOCK == 0, CONVERTS=converts,
            SOURCES=counts_E.shape[1] if blocked else 0,
            **tiling.blocks, **options(values_RK, num_warps=tiling.warps, num_stages=tiling.stages),
        )  # fmt: skip


def _check_fp8(name: str, values: Tensor, scales: Tensor, dims: int, blocks: tuple[int, ...]) -> None:
    """Raise InputError unless ``values`` are e4m3 with one scale per ``blocks`` of the last dimensions."""
    fits = values.dim() == dims and values.dtype in E4M3 and scales.dtype == torch.float32
    fits = fits and (values.stride(-1) == 1 or values.shape[-1] <= 1 or not values.numel())
    leading = dims - len(blocks)
    expected = (*values.shape[:leading], *(-(-n // b) for n, b in zip(values.shape[leading:], blocks, strict=True)))
    if not fits or tuple(scales.shape) != expected:
        raise InputError(
            f"grouped_mm_fp8 needs {name} as dense float8_e4m3fn or uint8 with {dims} dimensions, and fp32 scales "
            f"{expected}; got {tuple(values.shape)} of {values.dtype} with strides {values.stride()}, and "
            f"{tuple(scales.shape)} of {scales.dtype}"
        )
