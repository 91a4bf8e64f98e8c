"""Quantize rows to e4m3 with their scales, optionally fused with SwiGLU; and weights.

    | D values, e4m3 | to 4 bytes | fp32 scales: 1, or one for 128 channels | to 16 bytes |

"to 4 bytes" are zeros up to a multiple of 4 bytes. The bytes are those of ``encode`` in
``dispatch/wire_dtype.py``, the reference, applied to the operator's output: the activation is first rounded to the
dtype of ``h``, so the fused and separate forms have the same bits. If a block has a NaN or an infinity, its values are
all NaN, whose sign may differ.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.triton.device import e4m3_bits, e4m3_value, int64, rounded, sigmoid
from moe_comm.kernels.triton.launch import DTYPES, capability, check_rows, check_tensors, on_device_of, options
from moe_comm.kernels.triton.swiglu import check_swiglu

BLOCK = 128
"""Channels that share a scale, unless there is one scale per row."""
TILE_ELEMENTS = 1024
CONVERTS_FROM = 89
"""Compute capability from which GPUs have an instruction for e4m3."""


@triton.jit
def _value(x_ptr, column, width, inside, ELEMENT: tl.constexpr, SWIGLU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return fp32 values of one row's ``column``, rounded to ELEMENT. ``width``: size of the quantized row."""
    if SWIGLU:
        gate = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + width + column, mask=inside, other=0.0).to(tl.float32)
        return rounded(sigmoid(gate) * gate * up, ELEMENT).to(tl.float32)
    else:
        return tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _magnitude(x):  # type: ignore[no-untyped-def]
    """Return the magnitudes of ``x``; infinity for NaN, because a maximum may ignore NaN."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _scale_for(peak, POWER_OF_TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the fp32 scale of blocks with maximum magnitude ``peak``; see ``kernels.fp8.scales_for``."""
    scale = tl.maximum(tl.div_rn(peak, tl.full(peak.shape, 448.0, tl.float32)), 1.1754943508222875e-38)  # 2 ** -126
    if POWER_OF_TWO:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & ~0x7FFFFF).to(tl.float32, bitcast=True)
    return tl.where(peak < float("inf"), scale, float("nan"))


@triton.jit
def quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr, x_stride,
    packed_ptr,  # [rows, row_bytes] uint8
    scale_ptr,  # the same memory, as fp32
    width,
    first_scale,  # the byte in a row
    row_bytes,
    ELEMENT: tl.constexpr, SWIGLU: tl.constexpr, PER_ROW: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    CONVERTS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Quantize one row per program. With PER_ROW, read the row twice, first for its largest magnitude."""
    row = int64(tl.program_id(0))
    x_ptr += row * x_stride
    packed_ptr += row * row_bytes
    scale_ptr += row * (row_bytes // 4) + first_scale // 4
    num_blocks = tl.cdiv(width, BLOCK)
    if PER_ROW:
        peak = tl.zeros((BLOCKS, BLOCK), tl.float32)
        for first in range(0, num_blocks, BLOCKS):
            column = (first + tl.arange(0, BLOCKS))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            x = _value(x_ptr, column, width, column < width, ELEMENT, SWIGLU)
            peak = tl.maximum(peak, _magnitude(x))
        row_scale = _scale_for(tl.max(tl.max(peak, axis=1, keep_dims=True), axis=0, keep_dims=True), POWER_OF_TWO)
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = column < width
        x = _value(x_ptr, column, width, inside, ELEMENT, SWIGLU)
        if PER_ROW:
            scale = tl.broadcast_to(row_scale, (BLOCKS, BLOCK))
        else:
            block_scale = _scale_for(tl.max(_magnitude(x), axis=1), POWER_OF_TWO)
            tl.store(scale_ptr + block, block_scale, mask=block < num_blocks)
            scale = tl.broadcast_to(block_scale[:, None], (BLOCKS, BLOCK))
        tl.store(packed_ptr + column, e4m3_bits(tl.div_rn(x, scale), CONVERTS), mask=inside)
    gap = tl.arange(0, 16)
    last = first_scale + 4 * num_blocks
    if PER_ROW:
        tl.store(scale_ptr + tl.arange(0, 1)[:, None], row_scale)
        last = first_scale + 4
    zero = tl.zeros((16,), tl.uint8)
    tl.store(packed_ptr + width + gap, zero, mask=width + gap < first_scale)
    tl.store(packed_ptr + last + gap, zero, mask=last + gap < row_bytes)


@triton.jit
def dequantize_kernel(  # type: ignore[no-untyped-def]
    values_ptr,  # [rows, width] uint8
    values_stride,
    scale_ptr,  # [rows, scales] fp32
    scale_stride,
    counts_ptr,  # [rows / capacity] int64: of each ``capacity`` rows, the number that is decoded; unused if not COUNTED
    y_ptr,  # [rows, width] dense
    width, capacity, largest,
    ELEMENT: tl.constexpr, PER_ROW: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Dequantize BLOCKS blocks of a row per program."""
    row = int64(tl.program_id(0))
    if COUNTED:
        if row % capacity >= tl.load(counts_ptr + row // capacity):
            return
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < width
    scale_ptr += row * scale_stride
    if PER_ROW:
        scale = tl.load(scale_ptr + block * 0)
    else:
        scale = tl.load(scale_ptr + block, mask=block * BLOCK < width, other=0.0)
    y = e4m3_value(tl.load(values_ptr + row * values_stride + column, mask=inside, other=0)) * scale[:, None]
    y = tl.where(y > largest, largest, tl.where(y < -largest, -largest, y))  # clamp to finite values; NaN stays NaN
    tl.store(y_ptr + row * width + column, rounded(y, ELEMENT), mask=inside)


@triton.jit
def quantize_weights_kernel(  # type: ignore[no-untyped-def]
    w_ptr, w_stride_expert, w_stride_column, w_stride_inner,
    values_ptr,  # [experts, columns, inner] uint8, dense
    scale_ptr,  # [experts, columns / BLOCK, inner / BLOCK] fp32, dense
    columns, inner, CONVERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize one block of BLOCK x BLOCK weights per program, with one scale."""
    expert = int64(tl.program_id(2))
    column = (int64(tl.program_id(1)) * BLOCK + tl.arange(0, BLOCK))[:, None]
    k = (int64(tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (column < columns) & (k < inner)
    at = expert * w_stride_expert + column * w_stride_column + k * w_stride_inner
    x = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.max(_magnitude(x), axis=1, keep_dims=True), axis=0, keep_dims=True)
    scale = _scale_for(peak, False)
    block = (expert * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(scale_ptr + block + tl.zeros((1, 1), tl.int32), scale)
    bits = e4m3_bits(tl.div_rn(x, tl.broadcast_to(scale, (BLOCK, BLOCK))), CONVERTS)
    tl.store(values_ptr + (expert * columns + column) * inner + k, bits, mask=inside)


def quantize_weights(w_ENK: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``kernels.fp8.quantize_weights`` of fp32, bf16 or fp16 weights with any strides: the same bits."""
    check_tensors("quantize_weights", w_ENK)
    if w_ENK.dim() != 3 or w_ENK.dtype not in DTYPES:
        raise InputError(
            f"quantize_weights needs [E, N, K] of {', '.join(map(str, DTYPES))}; got {tuple(w_ENK.shape)} of "
            f"{w_ENK.dtype}"
        )
    experts, columns, inner = w_ENK.shape
    grid = -(-inner // BLOCK), -(-columns // BLOCK), experts
    values = torch.empty(w_ENK.shape, dtype=torch.float8_e4m3fn, device=w_ENK.device)
    scale_ECB = torch.empty(*grid[::-1], dtype=torch.float32, device=w_ENK.device)
    if w_ENK.numel():
        with on_device_of(w_ENK):
            quantize_weights_kernel[grid](
                w_ENK, *w_ENK.stride(), values.view(torch.uint8), scale_ECB, columns, inner,
                CONVERTS=capability(w_ENK) >= CONVERTS_FROM, BLOCK=BLOCK,
                **options(w_ENK, num_warps=8, enable_fp_fusion=False),
            )  # fmt: skip
    return values, scale_ECB


def quantize(rows_RD: Tensor, *, per_row: bool = False, power_of_two: bool = False) -> Tensor:
    """Return packed rows, uint8 [R, bytes of a row].

    Args:
        rows_RD: [R, D] fp32, bf16 or fp16; dense rows, any row stride.
        per_row: one scale per row, else one per ``BLOCK`` channels.
        power_of_two: round scales up to powers of two.
    """
    check_tensors("quantize", rows_RD)
    check_rows("quantize", "rows", rows_RD)
    return _quantized(rows_RD, rows_RD.shape[1], False, per_row, power_of_two)


def swiglu_quantize(h_RG: Tensor) -> Tensor:
    """Return ``quantize(swiglu(h))``, with the same bits; raises the errors of ``check_swiglu``."""
    check_swiglu("swiglu_quantize", h_RG)
    return _quantized(h_RG, h_RG.shape[1] // 2, True, False, False)


def dequantize_rows(
    values_RD: Tensor, scale_RS: Tensor, dtype: torch.dtype, *, per_row: bool = False, counts: Tensor | None = None
) -> Tensor:
    """Return [R, D] of ``dtype`` from e4m3 values and their scales: the inverse of ``quantize`` up to rounding.

    Args:
        values_RD: [R, D] uint8; dense rows, any row stride.
        scale_RS: [R, S] fp32 scales of a row; dense rows, any row stride.
        dtype: fp32, bf16 or fp16.
        per_row: S is 1, else D / ``BLOCK``, rounded up.
        counts: int64 on the device, of any shape with C elements, where C divides R. Of each R / C consecutive rows
            only the first ``counts[i]`` are read and written. None: all rows.
    """
    check_tensors("dequantize", values_RD, scale_RS, counts)
    rows, hidden = values_RD.shape
    fits = values_RD.dtype == torch.uint8 and scale_RS.dtype == torch.float32 and dtype in DTYPES
    groups, num_scales = counts.numel() if counts is not None else 1, 1 if per_row else -(-hidden // BLOCK)
    if not fits or scale_RS.shape != (rows, num_scales) or (rows and (not groups or rows % groups)):
        raise InputError(
            f"dequantize to {', '.join(map(str, DTYPES))} needs values [R, D] of uint8, fp32 scales "
            f"[R, {num_scales}], and a number of counts that divides R; got {tuple(values_RD.shape)} of "
            f"{values_RD.dtype}, {tuple(scale_RS.shape)} of {scale_RS.dtype}, {groups} counts, and {dtype}"
        )
    y_RD = torch.empty(rows, hidden, dtype=dtype, device=values_RD.device)
    if not y_RD.numel():
        return y_RD
    blocks = _blocks(hidden)
    with on_device_of(values_RD):
        dequantize_kernel[(rows, triton.cdiv(hidden, BLOCK * blocks))](
            values_RD, values_RD.stride(0), scale_RS, scale_RS.stride(0), counts if counts is not None else scale_RS,
            y_RD, hidden, rows // groups, torch.finfo(dtype).max,
            ELEMENT=DTYPES[dtype], PER_ROW=per_row, COUNTED=counts is not None, BLOCK=BLOCK, BLOCKS=blocks,
            **options(values_RD, num_warps=4),
        )  # fmt: skip
    return y_RD


def _quantized(x_RX: Tensor, width: int, swiglu: bool, per_row: bool, power_of_two: bool) -> Tensor:
    rows, num_scales = x_RX.shape[0], 1 if per_row else -(-width // BLOCK)
    row_bytes = _up(_up(width, 4) + 4 * num_scales, 16) if width else 0
    packed_RB = torch.empty(rows, row_bytes, dtype=torch.uint8, device=x_RX.device)
    if not packed_RB.numel():
        return packed_RB
    with on_device_of(x_RX):
        quantize_kernel[(rows,)](
            x_RX, x_RX.stride(0), packed_RB, packed_RB.view(torch.float32),
            width, _up(width, 4), row_bytes,
            ELEMENT=DTYPES[x_RX.dtype], SWIGLU=swiglu, PER_ROW=per_row, POWER_OF_TWO=power_of_two,
            CONVERTS=capability(x_RX) >= CONVERTS_FROM, BLOCK=BLOCK, BLOCKS=_blocks(width),
            **options(x_RX, num_warps=4, enable_fp_fusion=False),
        )  # fmt: skip
    return packed_RB


def _blocks(width: int) -> int:
    """Return the number of blocks that a program processes at once."""
    return min(TILE_ELEMENTS // BLOCK, 1 << (-(-width // BLOCK) - 1).bit_length())


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
