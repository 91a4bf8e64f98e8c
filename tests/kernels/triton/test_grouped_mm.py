"""The grouped GEMM and both gradients, compared with float64 expert by expert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_comm.errors import InputError
from tests.kernels.triton.common import DTYPES, drawn, kernels
from tests.overlap.triton.common import needs_triton
from tests.pool import RankPool, on_ranks

pytestmark = needs_triton
CASES = {
    "uneven": ([3, 0, 20, 1], 5, 7),
    "blocks": ([16, 16], 16, 16),
    "beyond blocks": ([17, 18, 0], 20, 17),
    "more tiles than programs": ([20, 1, 17], 18, 34),
    "several tiles": ([33, 48, 49, 64, 80], 32, 20),
    "no rows": ([0, 0], 16, 16),
    "one row": ([0, 0, 1], 3, 2),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def _reference(rows_RD: Tensor, w_END: Tensor, counts: list[int], grad_RN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, w = rows_RD.detach().double().requires_grad_(), w_END.detach().double().requires_grad_()
    out_RN = torch.cat([part @ w[e].T for e, part in enumerate(rows.split(counts))])
    out_RN.backward(grad_RN.double())
    assert rows.grad is not None and w.grad is not None
    return out_RN.detach(), rows.grad, w.grad


@on_ranks(1, timeout=60)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, DTYPES[(i + j) % 3]) for i, case in enumerate(CASES) for j in range(3 if i == 0 else 1)],
    ids=str,
)
def test_products_and_gradients_agree_with_float64(case: str, dtype: torch.dtype) -> None:
    module = kernels("grouped_mm")
    counts, inner, columns = CASES[case]
    counts_E = torch.tensor(counts)
    close = {"rtol": TOLERANCE[dtype], "atol": 4 * TOLERANCE[dtype]}
    for transposed in (False, True):
        w_END = drawn(len(counts), columns, inner, dtype=dtype, seed=1)
        if transposed:
            w_END = w_END.transpose(1, 2).contiguous().transpose(1, 2)
        rows_RD = drawn(sum(counts), inner + 2, dtype=dtype)[:, :inner]
        grad_RN = drawn(sum(counts), columns, dtype=dtype, seed=2)
        out_RN, grad_RD, grad_END = torch.empty_like(grad_RN), torch.empty_like(rows_RD), torch.empty_like(w_END)
        module.grouped_mm_into(rows_RD, w_END, counts_E, out_RN)
        module.grouped_mm_into(grad_RN, w_END.transpose(1, 2), counts_E, grad_RD)
        module.grouped_weight_grad_into(grad_RN, rows_RD, counts_E, grad_END)
        results = zip((out_RN, grad_RD, grad_END), _reference(rows_RD, w_END, counts, grad_RN), strict=True)
        for actual, expected in results:
            torch.testing.assert_close(actual.double(), expected, **close)
        for e, count in enumerate(counts):
            assert count or not grad_END[e].any()


@on_ranks(1)
def test_an_experts_bits_do_not_depend_on_the_other_experts() -> None:
    module = kernels("grouped_mm")
    counts = [5, 19, 0, 2]
    rows_RD, w_END = drawn(26, 24, dtype=torch.bfloat16), drawn(4, 18, 24, dtype=torch.bfloat16, seed=1)
    whole_RN = rows_RD.new_empty(26, 18)
    module.grouped_mm_into(rows_RD, w_END, torch.tensor(counts), whole_RN)
    start = 0
    for e, count in enumerate(counts):
        rows = slice(start, start + count)
        alone_RN = rows_RD.new_empty(count, 18)
        module.grouped_mm_into(rows_RD[rows], w_END[e : e + 1], torch.tensor([count]), alone_RN)
        assert torch.equal(alone_RN, whole_RN[rows])
        start += count


@on_ranks(1, timeout=60)
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES if dtype != torch.bfloat16)],
    ids=str,
)
def test_tma_has_the_same_bits(dtype: torch.dtype) -> None:
    module = kernels("grouped_mm")
    counts = [33, 0, 5, 50]
    counts_E = torch.tensor(counts)
    launched: list[bool] = []
    support = module.tma_supports
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "tma_supports", lambda *args: launched.append(support(*args)) or launched[-1])  # type: ignore
        shapes = ((48, 32, 4), (48, 24, 2), (24, 16, 2), (16, 18, 1))
        for inner, columns, launches in shapes if dtype == torch.bfloat16 else shapes[:1]:
            rows_RD = drawn(sum(counts) + 3, inner + 8, dtype=dtype)[:, :inner]
            grad_RN = drawn(sum(counts) + 3, columns, dtype=dtype, seed=2)
            rows_RD[sum(counts) :] = float("nan")  # a tile of the last expert loads them
            w_END = drawn(len(counts), columns, inner, dtype=dtype, seed=1)
            for w in (w_END, w_END.transpose(1, 2).contiguous().transpose(1, 2)):
                results = []
                for use_tma in (False, True):
                    out_RN, grad_RD = torch.empty_like(grad_RN), torch.empty_like(rows_RD)
                    module.grouped_mm_into(rows_RD, w, counts_E, out_RN, tma=use_tma)
                    module.grouped_mm_into(grad_RN, w.transpose(1, 2), counts_E, grad_RD, tma=use_tma)
                    results.append((out_RN[: sum(counts)], grad_RD[: sum(counts)]))
                assert all(map(torch.equal, *results))
            # Up to two for each layout, forward and gradient of rows, where strides and steps of 16 allow TMA.
            assert sum(launched) == (0 if dtype == torch.float32 else launches), (inner, columns)
            launched.clear()


@on_ranks(1)
def test_tma_needs_aligned_strides_and_whole_steps() -> None:
    supported = kernels("grouped_mm").tma_supports
    rows_RD, w_END = torch.zeros(5, 64, dtype=torch.bfloat16), torch.zeros(3, 40, 64, dtype=torch.bfloat16)
    assert supported(rows_RD, w_END, 64)
    assert not supported(rows_RD, w_END, 48)  # steps of 48 do not divide 64
    assert not supported(rows_RD[:0], w_END, 64)
    assert not supported(rows_RD, w_END[:, 1:], 64)  # a gap between the experts
    assert supported(rows_RD, w_END[1:2, 1:], 64)
    assert not supported(torch.zeros(5, 68, dtype=torch.bfloat16)[:, :64], w_END, 64)  # rows of 136 bytes
    assert not supported(rows_RD, w_END.expand(3, 40, 64).as_strided((3, 40, 64), (0, 64, 1)), 64)
    module = kernels("grouped_mm")
    tiling = module.tiling_for(torch.bfloat16, 90, 1000)
    assert [module.uses_tma(rows_RD, w_END, tiling, at) for at in (80, 90, 100, 120)] == [False, True, True, False]


@on_ranks(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_gradients_are_added_in_fp32(dtype: torch.dtype) -> None:
    module = kernels("grouped_mm")
    counts = [5, 0, 33]
    rows_RD, grad_RN = drawn(38, 24, dtype=dtype), drawn(38, 18, dtype=dtype, seed=1)
    before_END = drawn(3, 18, 24, seed=2)
    exact = torch.stack(
        [g.double().T @ x.double() for g, x in zip(grad_RN.split(counts), rows_RD.split(counts), strict=True)]
    )
    for start_END in (before_END, before_END.transpose(1, 2).contiguous().transpose(1, 2)):
        total_END = start_END.clone()
        module.grouped_weight_grad_into(grad_RN, rows_RD, torch.tensor(counts), total_END, add=True)
        torch.testing.assert_close(total_END.double(), before_END.double() + exact, rtol=1e-5, atol=1e-4)
        assert torch.equal(total_END[1], before_END[1])
    wide_END = torch.empty(3, 18, 24)
    module.grouped_weight_grad_into(grad_RN, rows_RD, torch.tensor(counts), wide_END)
    assert torch.equal(wide_END[0] + before_END[0], total_END[0]) and not wide_END[1].any()


@on_ranks(1)
def test_rows_beyond_the_counts_are_neither_read_nor_written() -> None:
    module = kernels("grouped_mm")
    rows_RD, w_END, counts_E = drawn(9, 8), drawn(2, 6, 8, seed=1), torch.tensor([3, 2])
    rows_RD[5:] = float("nan")  # a buffer may contain anything beyond its rows
    out_RN = torch.full((9, 6), 7.0)
    module.grouped_mm_into(rows_RD, w_END, counts_E, out_RN)
    assert (out_RN[5:] == 7).all() and out_RN[:5].isfinite().all()
    grad_END = torch.empty(2, 6, 8)
    module.grouped_weight_grad_into(out_RN, rows_RD, counts_E, grad_END)
    assert grad_END.isfinite().all()


@on_ranks(1)
def test_wrong_shapes_and_dtypes_are_input_errors() -> None:
    module = kernels("grouped_mm")
    rows_RD, w_END, counts_E, out_RN = drawn(4, 8), drawn(2, 6, 8), torch.tensor([3, 1]), drawn(4, 6)
    for call in (
        lambda: module.grouped_mm_into(rows_RD, w_END[:, :, 1:], counts_E, out_RN),
        lambda: module.grouped_mm_into(rows_RD, w_END.bfloat16(), counts_E, out_RN),
        lambda: module.grouped_mm_into(rows_RD, w_END, counts_E[:1], out_RN),
        lambda: module.grouped_mm_into(rows_RD, w_END, counts_E.int(), out_RN),
        lambda: module.grouped_mm_into(rows_RD[0], w_END, counts_E, out_RN),
        lambda: module.grouped_mm_into(rows_RD, w_END, counts_E, out_RN[:3]),
        lambda: module.grouped_weight_grad_into(out_RN, rows_RD, counts_E, w_END[:, :5]),
        lambda: module.grouped_weight_grad_into(out_RN[:3], rows_RD, counts_E, w_END),
        lambda: module.grouped_weight_grad_into(out_RN, rows_RD, counts_E, w_END.bfloat16()),
        lambda: module.grouped_weight_grad_into(
            out_RN.bfloat16(), rows_RD.bfloat16(), counts_E, w_END.bfloat16(), add=True
        ),
    ):
        with pytest.raises(InputError, match="got"):
            call()


def _compare_tilings(rank: int, world: int, arg: None) -> list[bool]:
    mm = kernels("grouped_mm")
    tiling = mm.tiling_for
    same = [tiling(torch.bfloat16, 120, 500, kind) == tiling(torch.bfloat16, 80, 500, kind) for kind in mm.TILINGS]
    nearest = [
        tiling(torch.bfloat16, sm, 500) == mm.TILINGS["rows"][expected_sm]
        for sm, expected_sm in ((89, 80), (90, 90), (103, 100))
    ]
    few = [tiling(torch.bfloat16, 90, rows) == mm.SMALL for rows in (64, 65)]
    return [*same, *nearest, few[0], not few[1]]


def test_tilings_follow_the_generation_with_the_same_shared_memory(interpreter: RankPool) -> None:
    """sm_120 has less shared memory than sm_90 and sm_100."""
    assert interpreter.run(_compare_tilings)[0] == [True] * 8
