"""Rows and weights in e4m3 with fp32 scales per 128 values, and their grouped GEMM, in the convention of DeepSeek-V3.

    rows     e4m3 [R, K], scales [R, K / 128]              one scale per row and 128 channels, as on the wire
    weights  e4m3 [E, N, K], scales [E, N / 128, K / 128]  one scale per block of 128 x 128

    out[r, n] = sum over blocks b of  scale[r, b] * scale[e, n / 128, b] * (sum over k in b of rows[r, k] * w[e, n, k])

All sums are in fp32, and blocks are added in order. Plain torch is the reference. On a GPU,
``triton/grouped_mm_fp8.py`` computes the same sums; inside a block it adds in another order, so the bits differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.kernels.autograd import without_autocast
from moe_comm.kernels.native import for_triton
from moe_comm.kernels.row_invariant import row_invariant_mm

GemmDtype = Literal["same", "fp8"]
"""Operands of the experts' forward GEMMs: in the dtype of the rows, or e4m3 with scales per 128 values."""
BLOCK = 128
"""Number of channels that share a scale."""
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
TINIEST = 2.0**-126
"""Smallest scale. Below it fp32 is subnormal and the scale loses bits."""
FRACTION = 0x7FFFFF
"""The fraction bits of fp32."""
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Row dtypes with a one-pass fp8 kernel on GPUs. It gives the same bytes, except for the sign of NaN."""


@dataclass(frozen=True, eq=False, slots=True)
class ScaledRows:
    """Rows in e4m3 with one scale per 128 channels. Both tensors may be views of a receive buffer.

    Attributes:
        values_RD: [R, D] float8_e4m3fn with unit stride along D.
        scale_RB: [R, D / 128] fp32, any strides. The stride along the blocks is 0 if a row has one scale.
    """

    values_RD: Tensor
    scale_RB: Tensor

    def __getitem__(self, rows: slice) -> ScaledRows:
        """Return a view of ``rows``."""
        return ScaledRows(self.values_RD[rows], self.scale_RB[rows])

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return [R, D] of ``dtype``: values times scales in fp32, saturated at the largest finite number."""
        hidden = self.values_RD.shape[1]
        if dtype in TRITON_DTYPES and for_triton(self.values_RD):
            from moe_comm.kernels.triton.quantize import dequantize_rows  # needs Triton

            return dequantize_rows(self.values_RD.view(torch.uint8), self.scale_RB.contiguous(), dtype)
        wide_RBK = in_blocks(self.values_RD.to(torch.float32)).mul_(self.scale_RB.unsqueeze(2))
        rows_RD: Tensor = saturating_cast(wide_RBK, dtype).flatten(1)[:, :hidden].contiguous()
        return rows_RD


def check_gemm_dtype(gemm_dtype: GemmDtype, hidden: int) -> None:
    """Raise ConfigError unless experts of hidden size ``hidden`` can use ``gemm_dtype``."""
    if gemm_dtype not in get_args(GemmDtype):
        raise ConfigError(f"expert_gemm_dtype must be one of {', '.join(get_args(GemmDtype))}; got {gemm_dtype!r}")
    if gemm_dtype == "fp8" and hidden % BLOCK:
        raise ConfigError(
            f"expert_gemm_dtype='fp8' has one scale per {BLOCK} channels, so hidden must be a multiple of {BLOCK}; got "
            f"{hidden}"
        )


def scales_for(amax: Tensor, power_of_two: bool) -> Tensor:
    """Return the fp32 scales of blocks with largest magnitudes ``amax`` (fp32). NaN where that is NaN or infinite."""
    scale = (amax / E4M3_MAX).clamp(min=TINIEST)
    if power_of_two:
        # Round up to a power of two: a carry out of the fraction increments the exponent.
        scale = ((scale.view(torch.int32) + FRACTION) & ~FRACTION).view(torch.float32)
    return torch.where(amax.isfinite(), scale, torch.nan)


def saturating_cast(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast fp32 ``wide`` to ``dtype``, clamped to finite values; NaN stays NaN. Overwrites ``wide``."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return wide.clamp_(-limit, limit).to(dtype)


def in_blocks(rows_RD: Tensor) -> Tensor:
    """View rows as [R, D / 128, 128]. Zeros pad the last block, in a copy."""
    padding = -rows_RD.shape[1] % BLOCK
    padded_RD: Tensor = F.pad(rows_RD, (0, padding)) if padding else rows_RD
    return padded_RD.view(padded_RD.shape[0], padded_RD.shape[1] // BLOCK, BLOCK)


def quantize_rows(rows_RD: Tensor) -> ScaledRows:
    """Return rows in e4m3. The bits are those of the wire dtype "fp8_block", on every device.

    Args:
        rows_RD: [R, D] floating point, any strides. 64-bit rows are rounded to fp32 first.
    """
    if rows_RD.dtype in TRITON_DTYPES and for_triton(rows_RD):
        from moe_comm.kernels.triton.quantize import quantize  # needs Triton

        return of_packed(quantize(rows_RD.contiguous()), rows_RD.shape[1])
    rows_RBK = in_blocks(rows_RD.to(torch.float32))
    scale_RB = scales_for(rows_RBK.abs().amax(2), power_of_two=False)
    return ScaledRows((rows_RBK / scale_RB.unsqueeze(2)).to(E4M3).flatten(1)[:, : rows_RD.shape[1]], scale_RB)


def of_packed(packed_RB: Tensor, hidden: int, num_scales: int | None = None) -> ScaledRows:
    """Return views of packed rows: ``hidden`` values, padding to 4 bytes, scales (``dispatch/wire_dtype.py``).

    Args:
        packed_RB: uint8, rows of a multiple of 4 bytes.
        num_scales: scales of a row. None: one per 128 channels.
    """
    first = -(-hidden // 4)
    last = first + (-(-hidden // BLOCK) if num_scales is None else num_scales)
    return ScaledRows(packed_RB[:, :hidden].view(E4M3), packed_RB.view(torch.float32)[:, first:last])


def quantize_weights(w_ENK: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 values [E, N, K] and fp32 scales [E, N / 128, K / 128] of weights; fractions are rounded up.

    A scale is the largest magnitude of its block divided by 448.

    Args:
        w_ENK: floating point, any strides.
    """
    if w_ENK.dtype in TRITON_DTYPES and for_triton(w_ENK):
        from moe_comm.kernels.triton.quantize import quantize_weights as on_gpu  # needs Triton

        return on_gpu(w_ENK.detach())
    experts, columns, inner = w_ENK.shape
    blocks_n, blocks_k = -(-columns // BLOCK), -(-inner // BLOCK)
    padded = w_ENK.new_zeros(experts, blocks_n * BLOCK, blocks_k * BLOCK, dtype=torch.float32)
    padded[:, :columns, :inner] = w_ENK
    tiles = padded.view(experts, blocks_n, BLOCK, blocks_k, BLOCK)
    scale_ECB = scales_for(tiles.abs().amax((2, 4)), power_of_two=False)
    values = (tiles / scale_ECB[:, :, None, :, None]).to(E4M3).view(padded.shape)
    return values[:, :columns, :inner].contiguous(), scale_ECB


def scaled_grouped_mm_into(
    rows: ScaledRows, weights: tuple[Tensor, Tensor], rows_per_expert: Sequence[int], out_RN: Tensor
) -> None:
    """Write out[r] = rows[r] @ w[e].T for each row r of expert e. No autograd.

    Args:
        rows: [R, K], grouped by expert.
        weights: from ``quantize_weights``.
        rows_per_expert: E row counts; their sum is R.
        out_RN: [R, N] fp32, bf16 or fp16; dense rows. On the CPU a row has the same bits for every R.
    """
    if for_triton(rows.values_RD):
        from moe_comm.kernels.triton.grouped_mm_fp8 import grouped_mm_fp8_into  # needs Triton

        counts_E = torch.tensor(rows_per_expert, dtype=torch.int64, device="cpu").to(out_RN.device, non_blocking=True)
        grouped_mm_fp8_into((rows.values_RD, rows.scale_RB), weights, counts_E, out_RN)
        return
    with without_autocast(out_RN):
        _scaled_grouped_mm(rows, weights, rows_per_expert, out_RN)


def _scaled_grouped_mm(
    rows: ScaledRows, weights: tuple[Tensor, Tensor], rows_per_expert: Sequence[int], out_RN: Tensor
) -> None:
    w_ENK, w_scale_ECB = weights
    columns = w_ENK.shape[1]
    rows_BRK, scale_BR1 = _by_block(rows.values_RD), rows.scale_RB.t().unsqueeze(2)
    last = 0
    for expert, size in enumerate(rows_per_expert):
        of_expert = slice(last, last := last + size)
        if not size:
            continue
        w_BNK = _by_block(w_ENK[expert])
        w_scale_BN = w_scale_ECB[expert].t().repeat_interleave(BLOCK, 1)[:, :columns]
        total_rN = rows_BRK.new_zeros(size, columns)
        product_rN = torch.empty_like(total_rN)
        for block, w_NK in enumerate(w_BNK):
            row_invariant_mm(rows_BRK[block, of_expert], w_NK.t(), product_rN)
            total_rN += product_rN * (scale_BR1[block, of_expert] * w_scale_BN[block])
        out_RN[of_expert] = total_rN


def _by_block(values_RD: Tensor) -> Tensor:
    """Return [D / 128, R, 128] fp32."""
    return in_blocks(values_RD.to(torch.float32)).transpose(0, 1)
