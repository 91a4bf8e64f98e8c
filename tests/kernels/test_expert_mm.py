"""A row of an expert's GEMM has the same bits for every split of the expert's rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from moe_comm.kernels.row_invariant import aligned, expert_mm

CUTS = ((0, 37), (0, 1, 37), (0, 3, 10, 37), (0, 8, 9, 24, 37))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "columns"), [(12, 10), (10, 7), (7, 16), (16, 12), (32, 48), (1, 1)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_rows_have_the_same_bits_for_every_split(inner: int, columns: int, dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(inner * 100 + columns)
    a_MK, w_NK = (torch.randn(rows, inner, generator=generator).to(dtype) for rows in (CUTS[0][-1], columns))
    bias_N = torch.randn(columns, generator=generator).to(dtype) if with_bias else None
    outputs = []
    for cut in CUTS:
        out_MN = torch.full((CUTS[0][-1], columns), torch.nan, dtype=dtype)
        for first, end in pairwise(cut):
            expert_mm(aligned(a_MK[first:end]), aligned(w_NK).t(), out_MN[first:end], bias_N)
        outputs.append(out_MN)
    exact_MN = a_MK.double() @ w_NK.double().t() + (0 if bias_N is None else bias_N.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(outputs[0].double(), exact_MN, rtol=tolerance, atol=tolerance)
    for other in outputs[1:]:
        assert torch.equal(outputs[0], other)
