"""The grouped GEMM of e4m3 rows and weights with block scales, compared with float64 on dequantized operands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.fp8 import quantize_weights
from tests.kernels.triton.common import DTYPES, drawn, kernels
from tests.overlap.triton.common import needs_triton
from tests.pool import RankPool, on_ranks

pytestmark = needs_triton
CASES = {
    "whole blocks": ([17, 0, 50, 33], 256, 128),
    "fractions of blocks": ([3, 20, 1], 200, 150),
    "less than a block": ([40, 2], 24, 18),
    "no rows": ([0, 0], 128, 16),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def _dequantized(values: Tensor, scales: Tensor, row_block: int) -> Tensor:
    """Return float64 values times the scales of blocks [row_block, 128] of the last two dimensions."""
    wide = scales.double().repeat_interleave(row_block, -2).repeat_interleave(128, -1)
    return values.double() * wide[..., : values.shape[-2], : values.shape[-1]]


def _operands(counts: list[int], inner: int, columns: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return packed rows as values and scales in place, as a dispatch delivers them, and quantized weights."""
    quantize = kernels("quantize")
    rows_RK = drawn(sum(counts), inner) * torch.logspace(-2, 2, max(sum(counts), 1))[: sum(counts), None]
    packed_RB = quantize.quantize(rows_RK)
    first = -(-inner // 4)
    scale_RB = packed_RB.view(torch.float32)[:, first : first + -(-inner // 128)]
    w_ENK = drawn(len(counts), columns, inner, seed=1) / inner**0.5
    return (packed_RB[:, :inner], scale_RB), quantize_weights(w_ENK)


@on_ranks(1, timeout=60)
@pytest.mark.parametrize("case", CASES)
def test_products_agree_with_float64_on_dequantized_operands(case: str) -> None:
    counts, inner, columns = CASES[case]
    mm = kernels("grouped_mm_fp8")
    (values_RK, scale_RB), (w_ENK, w_scale_ECB) = _operands(counts, inner, columns)
    rows = _dequantized(values_RK.contiguous().view(torch.float8_e4m3fn), scale_RB, 1)
    w = _dequantized(w_ENK, w_scale_ECB, 128)
    expected_RN = torch.cat([part @ w[e].T for e, part in enumerate(rows.split(counts))])
    counts_E = torch.tensor(counts)
    for dtype in DTYPES:
        actual_RN, again_RN = (torch.empty(sum(counts), columns, dtype=dtype) for _ in range(2))
        mm.grouped_mm_fp8_into((values_RK, scale_RB), (w_ENK, w_scale_ECB), counts_E, actual_RN)
        atol = TOLERANCE[dtype] * float(expected_RN.abs().max()) if expected_RN.numel() else 0
        torch.testing.assert_close(actual_RN.double(), expected_RN, rtol=TOLERANCE[dtype], atol=atol)
        in_bytes = (w_ENK.view(torch.uint8), w_scale_ECB)
        mm.grouped_mm_fp8_into((values_RK.contiguous(), scale_RB), in_bytes, counts_E, again_RN)
        assert torch.equal(again_RN, actual_RN)


@on_ranks(1)
def test_quantized_weights_are_close() -> None:
    w_ENK = drawn(2, 150, 200, dtype=torch.bfloat16)
    w_ENK[1, :128, :128] = 0
    values, scales = quantize_weights(w_ENK)
    assert values.shape == w_ENK.shape and scales.shape == (2, 2, 2)
    back = _dequantized(values, scales, 128)
    assert not back[1, :128, :128].any()
    assert ((back - w_ENK).abs() <= w_ENK.double().abs() / 16 + scales.max() / 512).all()


@on_ranks(1)
def test_rows_beyond_the_counts_are_neither_read_nor_written() -> None:
    mm = kernels("grouped_mm_fp8")
    (values_RK, scale_RB), weights = _operands([5, 4], 128, 16)
    scale_RB[5:] = float("nan")
    out_RN = torch.full((9, 16), 7.0)
    mm.grouped_mm_fp8_into((values_RK, scale_RB), weights, torch.tensor([3, 2]), out_RN)
    assert (out_RN[5:] == 7).all() and out_RN[:5].isfinite().all()


@on_ranks(1, timeout=60)
def test_blocks_of_rows_by_expert_and_source_are_read_in_place() -> None:
    mm = kernels("grouped_mm_fp8")
    counts_EW = torch.tensor([[3, 0], [40, 2], [0, 0]])
    rows_R = torch.arange(240).view(3, 2, 40)[torch.arange(40) < counts_EW.unsqueeze(2)]
    (values_RK, scale_RB), (w_ENK, w_scale_ECB) = _operands([80, 80, 80], 200, 150)
    unused_R = torch.ones(240, dtype=torch.bool).index_fill_(0, rows_R, False)
    values_RK[unused_R] = 0x7F  # NaN
    scale_RB[unused_R] = torch.nan
    compact = values_RK[rows_R], scale_RB[rows_R]
    expected_RN = torch.empty(len(rows_R), 150)
    mm.grouped_mm_fp8_into(compact, (w_ENK, w_scale_ECB), counts_EW.sum(1), expected_RN)
    out_RN = torch.full((240, 150), 7.0)
    mm.grouped_mm_fp8_into((values_RK, scale_RB), (w_ENK, w_scale_ECB), counts_EW, out_RN)
    assert torch.equal(out_RN[rows_R], expected_RN)
    assert (out_RN[unused_R] == 7).all()
    for wrong in (counts_EW[:2], torch.zeros(3, 7, dtype=torch.int64), counts_EW.int()):
        with pytest.raises(InputError, match="got"):
            mm.grouped_mm_fp8_into((values_RK, scale_RB), (w_ENK, w_scale_ECB), wrong, out_RN)
    mm.grouped_mm_fp8_into((values_RK, scale_RB), (w_ENK, w_scale_ECB), torch.empty(3, 0, dtype=torch.int64), out_RN)


@on_ranks(1)
def test_wrong_shapes_and_dtypes_are_input_errors() -> None:
    mm = kernels("grouped_mm_fp8")
    rows, weights = _operands([3, 1], 256, 130)
    counts_E = torch.tensor([3, 1])
    for wrong_rows, wrong_weights, counts in (
        ((rows[0].float(), rows[1]), weights, counts_E),
        ((rows[0], rows[1][:, :1]), weights, counts_E),
        ((rows[0], rows[1].double()), weights, counts_E),
        ((rows[0][:, :128], rows[1][:, :1]), weights, counts_E),
        (rows, (weights[0], weights[1][:, :1]), counts_E),
        (rows, (weights[0].transpose(1, 2), weights[1]), counts_E),
        (rows, weights, counts_E[:1]),
    ):
        with pytest.raises(InputError, match="got"):
            mm.grouped_mm_fp8_into(wrong_rows, wrong_weights, counts, torch.empty(4, 130))
    with pytest.raises(InputError, match="got"):
        mm.grouped_mm_fp8_into(rows, weights, counts_E, torch.empty(3, 130))


def _tilings(rank: int, world: int, arg: None) -> list[bool]:
    mm = kernels("grouped_mm_fp8")
    return [
        128 % mm.fp8_tiling_for(at, rows).columns == 0 and mm.fp8_tiling_for(at, rows).inner == 128
        for at in (0, 80, 89, 90, 100, 120)
        for rows in (1, 128, 4096)
    ]


def test_tiles_do_not_span_scale_blocks(interpreter: RankPool) -> None:
    assert all(interpreter.run(_tilings)[0])
