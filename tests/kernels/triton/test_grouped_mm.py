"""The grouped GEMM and both gradients, compared with float64 expert by expert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_comm.errors import InputError
from tests.kernels.triton.common import DTYPES, drawn, kernels
from tests.overlap.triton.common import needs_triton
from tests.pool import RankPool

pytestmark = needs_triton
CASES = {
    "uneven": ([3, 0, 20, 1], 5, 7),
    "blocks": ([16, 16], 16, 16),
    "beyond blocks": ([17, 18, 0], 20, 17),
    "more tiles than programs": ([20, 1, 17], 18, 34),
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


def _compare_with_float64(rank: int, world: int, arg: tuple[str, torch.dtype]) -> None:
    case, dtype = arg
    grouped_mm = kernels("grouped_mm").grouped_mm
    counts, inner, columns = CASES[case]
    close = {"rtol": TOLERANCE[dtype], "atol": 4 * TOLERANCE[dtype]}
    for transposed in (False, True):
        w_END = drawn(len(counts), columns, inner, dtype=dtype, seed=1)
        if transposed:
            w_END = w_END.transpose(1, 2).contiguous().transpose(1, 2)
        w_END.requires_grad_()
        rows_RD = drawn(sum(counts), inner + 2, dtype=dtype)[:, :inner].requires_grad_()
        grad_RN = drawn(sum(counts), columns, dtype=dtype, seed=2)
        out_RN = grouped_mm(rows_RD, w_END, torch.tensor(counts))
        grads = torch.autograd.grad(out_RN, (rows_RD, w_END), grad_RN)
        for actual, expected in zip((out_RN, *grads), _reference(rows_RD, w_END, counts, grad_RN), strict=True):
            torch.testing.assert_close(actual.double(), expected, **close)
        assert grads[1].stride() == w_END.stride()
        for e, count in enumerate(counts):
            assert count or not grads[1][e].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_products_and_gradients_agree_with_float64(interpreter: RankPool, case: str, dtype: torch.dtype) -> None:
    interpreter.run(_compare_with_float64, (case, dtype), timeout=60)


def _compare_each_expert_alone(rank: int, world: int, arg: None) -> None:
    grouped_mm = kernels("grouped_mm").grouped_mm
    counts = [5, 19, 0, 2]
    rows_RD, w_END = drawn(26, 24, dtype=torch.bfloat16), drawn(4, 18, 24, dtype=torch.bfloat16, seed=1)
    whole_RN = grouped_mm(rows_RD, w_END, torch.tensor(counts))
    start = 0
    for e, count in enumerate(counts):
        rows = slice(start, start + count)
        assert torch.equal(grouped_mm(rows_RD[rows], w_END[e : e + 1], torch.tensor([count])), whole_RN[rows])
        start += count


def test_an_experts_bits_do_not_depend_on_the_other_experts(interpreter: RankPool) -> None:
    interpreter.run(_compare_each_expert_alone)


def _run_with_unused_rows(rank: int, world: int, arg: None) -> None:
    module = kernels("grouped_mm")
    rows_RD, w_END, counts_E = drawn(9, 8), drawn(2, 6, 8, seed=1), torch.tensor([3, 2])
    rows_RD[5:] = float("nan")  # a buffer may contain anything beyond its rows
    out_RN = torch.full((9, 6), 7.0)
    module.grouped_mm_into(rows_RD, w_END, counts_E, out_RN)
    assert (out_RN[5:] == 7).all() and out_RN[:5].isfinite().all()
    grad_END = torch.empty(2, 6, 8)
    module.grouped_weight_grad_into(out_RN, rows_RD, counts_E, grad_END)
    assert grad_END.isfinite().all()


def test_rows_beyond_the_counts_are_neither_read_nor_written(interpreter: RankPool) -> None:
    interpreter.run(_run_with_unused_rows)


def _call_with_wrong_inputs(rank: int, world: int, arg: None) -> None:
    module = kernels("grouped_mm")
    rows_RD, w_END, counts_E, out_RN = drawn(4, 8), drawn(2, 6, 8), torch.tensor([3, 1]), drawn(4, 6)
    for call in (
        lambda: module.grouped_mm(rows_RD, w_END[:, :, 1:], counts_E),
        lambda: module.grouped_mm(rows_RD, w_END.bfloat16(), counts_E),
        lambda: module.grouped_mm(rows_RD, w_END, counts_E[:1]),
        lambda: module.grouped_mm(rows_RD, w_END, counts_E.int()),
        lambda: module.grouped_mm(rows_RD[0], w_END, counts_E),
        lambda: module.grouped_mm_into(rows_RD, w_END, counts_E, out_RN[:3]),
        lambda: module.grouped_weight_grad_into(out_RN, rows_RD, counts_E, w_END[:, :5]),
        lambda: module.grouped_weight_grad_into(out_RN[:3], rows_RD, counts_E, w_END),
    ):
        with pytest.raises(InputError, match="got"):
            call()


def test_wrong_shapes_and_dtypes_are_input_errors(interpreter: RankPool) -> None:
    interpreter.run(_call_with_wrong_inputs)


def _compare_tilings(rank: int, world: int, arg: None) -> list[bool]:
    mm = kernels("grouped_mm")
    tiling = mm.tiling_for
    same = [tiling(torch.bfloat16, 120, 500, weights=w) == tiling(torch.bfloat16, 80, 500, weights=w) for w in (0, 1)]
    nearest = [
        tiling(torch.bfloat16, sm, 500) == mm.TILINGS[expected_sm]
        for sm, expected_sm in ((89, 80), (90, 90), (103, 100))
    ]
    return same + nearest


def test_tilings_follow_the_generation_with_the_same_shared_memory(interpreter: RankPool) -> None:
    """sm_120 has less shared memory than sm_90 and sm_100."""
    assert interpreter.run(_compare_tilings)[0] == [True] * 5
