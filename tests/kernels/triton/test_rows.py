"""Gathers, weighted sums and their gradients have the bits of ``dispatch/slots/plain.py``, in all dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_comm.dispatch.slots import plain
from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels import row_weights
from tests.kernels.triton.common import DTYPES, drawn, kernels, some_ids
from tests.overlap.triton.common import needs_triton
from tests.pool import RankPool, on_ranks

pytestmark = needs_triton
WIDTHS = (1, 33, 130)
DTYPES_AND_WIDTHS = [(torch.bfloat16, 1), (torch.bfloat16, 130), (torch.float32, 33), (torch.float16, 33)]
CASES = {"top 3 of 6": (9, 3, 6), "every expert": (5, 4, 4), "top 17": (1, 17, 20), "one expert": (4, 1, 1)}


@on_ranks(1, timeout=60)
def test_take_rows_selects_rows_by_index_for_every_dtype_and_width() -> None:
    take_rows = kernels("rows").take_rows
    index_R = torch.tensor([3, 0, 3, 8, 1])
    for dtype in (*DTYPES, torch.int64, torch.uint8):
        for width in WIDTHS:
            x_ND = (drawn(9, width + 3) * 50).to(dtype)[:, :width]  # rows are further apart than they are wide
            assert torch.equal(take_rows(x_ND, index_R), x_ND[index_R]), (dtype, width)
            with_gap = take_rows(x_ND, torch.tensor([2, -1, 0]))
            assert torch.equal(with_gap[::2], x_ND[[2, 0]]) and not with_gap[1].any()
    assert take_rows(drawn(0, 4), torch.tensor([-1, -1])).tolist() == [[0.0] * 4] * 2
    assert take_rows(drawn(3, 4), index_R[:0]).shape == (0, 4)


@on_ranks(1, timeout=60)
def test_slots_are_ordered_as_by_a_stable_sort() -> None:
    slot_order = kernels("slot_order")
    order_slots = slot_order.order_slots
    for tokens, top_k, experts in ((9, 3, 6), (300, 2, 3), (70, 8, 130), (5, 1, 1), (0, 4, 5), (3, 0, 5), (40, 2, 0)):
        ids_TK = torch.randint(-1, experts, (tokens, top_k), generator=torch.Generator().manual_seed(tokens))
        if experts == 3:
            ids_TK[::7, 0], ids_TK[1::7, 1] = 3, -2  # invalid
        for dtype, few in ((torch.int64, 1000), (torch.int32, 1000), (torch.int64, 0)):
            slot_order.FEW = few
            order, place_TK, actual = order_slots(ids_TK.to(dtype), experts)
            plain_order, plain_place_TK = plain.order_slots(ids_TK, experts)
            counts = plain.count_slots(ids_TK, experts)[: experts + 2]
            assert torch.equal(actual, counts), (tokens, dtype)
            assert torch.equal(place_TK, plain_place_TK), (tokens, dtype)
            num_rows = int(counts[:experts].sum())
            assert torch.equal(order[:num_rows], plain_order[:num_rows]), (tokens, dtype)
            assert torch.equal(order.sort().values, torch.arange(tokens * top_k))
            fault = torch.zeros(3, dtype=torch.int64)
            reported_TK, actual, ordered = slot_order.place_slots(ids_TK.to(dtype), experts, fault, ordered=True)
            assert ordered is not None and torch.equal(ordered[:num_rows], order[:num_rows])
            invalid_TK = (ids_TK < -1) | (ids_TK >= experts)
            first = int(invalid_TK.view(-1).to(torch.uint8).argmax()) if invalid_TK.any() else 0
            assert torch.equal(actual, counts) and fault[0] == invalid_TK.sum()
            assert fault.tolist()[1:] == ([first, ids_TK.view(-1)[first].item()] if fault[0] else [0, 0])
            assert torch.equal(reported_TK, plain_place_TK.masked_fill(invalid_TK, slot_order.INVALID))
    with pytest.raises(InputError, match="got torch"):
        order_slots(drawn(2, 2), 4)


@on_ranks(1, timeout=60)
def test_copy_rows_writes_the_row_of_each_slot() -> None:
    copy_rows = kernels("rows").copy_rows
    for tokens, top_k, experts in CASES.values():
        ids_TK = some_ids(tokens, top_k, experts)
        order, place_TK = plain.order_slots(ids_TK, experts)
        order_R = order[: int((ids_TK >= 0).sum())]
        for dtype in (torch.bfloat16, torch.float32, torch.uint8):
            for width in WIDTHS:
                x_TD = (drawn(tokens, width + 3) * 50).to(dtype)[:, :width]
                assert torch.equal(copy_rows(x_TD, place_TK, len(order_R)), x_TD[order_R // top_k]), (dtype, width)
    assert copy_rows(drawn(0, 4), torch.zeros(0, 2, dtype=torch.int64), 0).shape == (0, 4)
    with pytest.raises(InputError, match="places"):
        copy_rows(drawn(3, 4), torch.zeros(2, 2, dtype=torch.int64), 4)


def _sums(rank: int, world: int, arg: tuple[int, int, int]) -> None:
    tokens, top_k, experts = arg
    on_gpu = kernels("rows")
    ids_TK = some_ids(tokens, top_k, experts)
    place_TK = plain.order_slots(ids_TK, experts)[1]
    num_rows = int((ids_TK >= 0).sum())
    weights_TK = drawn(tokens, top_k, seed=1)
    weights_TK[place_TK < 0] = float("nan")  # weights of dropped slots are ignored
    for dtype, width in DTYPES_AND_WIDTHS:
        rows_RD = drawn(num_rows, width, dtype=dtype, seed=2)
        grad_TD = drawn(tokens, width, dtype=dtype, seed=3)
        for weights in (weights_TK, None):
            y_TD = on_gpu.weighted_sum(rows_RD, place_TK, weights)
            assert torch.equal(y_TD, plain.weighted_sum(rows_RD, place_TK, weights)), (dtype, width)
        grad_RD, grad_TK = on_gpu.spread(grad_TD, place_TK, weights_TK, num_rows, rows_RD)
        assert torch.equal(grad_RD, plain.spread(grad_TD, place_TK, weights_TK, num_rows)), (dtype, width)
        assert torch.equal(grad_TK, plain.weight_grad(grad_TD, rows_RD, place_TK)), (dtype, width)
        scaled_RD, factor_R = rows_RD.clone(), drawn(num_rows, seed=4)
        partner_RD = drawn(num_rows, width + 1, dtype=dtype, seed=5)[:, :width]
        dots_R = on_gpu.scale_rows_(scaled_RD, factor_R, partner_RD)
        assert torch.equal(scaled_RD, row_weights.scale(rows_RD, factor_R)), (dtype, width)
        assert torch.equal(dots_R, row_weights.lane_dot(rows_RD, partner_RD)), (dtype, width)
        assert on_gpu.scale_rows_(scaled_RD, factor_R) is None


@pytest.mark.parametrize("case", CASES)
def test_sums_scaled_rows_and_dot_products_have_the_bits_of_plain_torch(interpreter: RankPool, case: str) -> None:
    interpreter.run(_sums, CASES[case], timeout=120)


@on_ranks(1, timeout=60)
def test_swiglu_times_weights_has_the_bits_of_separate_kernels() -> None:
    swiglu, on_gpu = kernels("swiglu"), kernels("rows")
    dtypes, widths = (*DTYPES, torch.bfloat16), (33, 130, 5, 64)
    glus = ((0.0, 0.0), (1.702, 1.0)) * 2
    for (tokens, top_k, experts), dtype, width, glu in zip(CASES.values(), dtypes, widths, glus, strict=True):
        ids_TK = some_ids(tokens, top_k, experts)
        place_TK, rows = plain.order_slots(ids_TK, experts)[1], int((ids_TK >= 0).sum())
        weights_TK, live = drawn(tokens, top_k, seed=1), place_TK >= 0
        h_RG, grad_RF = drawn(rows, 2 * width, dtype=dtype), drawn(rows, width, dtype=dtype, seed=2)
        expected_RG, act_RF = torch.empty_like(h_RG), torch.empty_like(grad_RF)
        swiglu.swiglu_backward(h_RG, grad_RF, expected_RG, act_RF, glu)
        weights_R = torch.empty(rows)
        weights_R[place_TK[live]] = weights_TK[live]
        dots_R = on_gpu.scale_rows_(act_RF, weights_R, grad_RF)
        on_gpu.scale_rows_(expected_RG, weights_R)
        dots_TK = torch.zeros(tokens, top_k).masked_scatter(live, dots_R[place_TK[live]])
        weights_TK[~live] = float("nan")  # not read
        for given, dots in (((weights_TK, place_TK), dots_TK), ((weights_R, None), dots_R), ((weights_R, None), None)):
            buffer_RF, grad_h_RG = grad_RF.clone(), torch.empty_like(h_RG)
            result = None if dots is None else torch.full_like(dots, 7)
            weights = row_weights.RowWeights(*given, result)
            swiglu.swiglu_backward_weighted(h_RG, buffer_RF, grad_h_RG, buffer_RF, weights, glu)
            assert torch.equal(grad_h_RG, expected_RG) and torch.equal(buffer_RF, act_RF), (dtype, width)
            assert result is None or torch.equal(result, dots)
        wrong = row_weights.RowWeights(weights_R.double())
        with pytest.raises(InputError, match="of each slot"):
            swiglu.swiglu_backward_weighted(h_RG, buffer_RF, grad_h_RG, buffer_RF, wrong)


def _results_without_rows(rank: int, world: int, arg: None) -> list[Any]:
    on_gpu = kernels("rows")
    place_TK = torch.full((2, 3), -1)
    no_rows = drawn(0, 5)
    grad_RD, grad_TK = on_gpu.spread(drawn(2, 5), place_TK, drawn(2, 3), 0, no_rows)
    return [
        on_gpu.weighted_sum(no_rows, place_TK, drawn(2, 3)).tolist(),
        on_gpu.weighted_sum(drawn(4, 5), place_TK[:0], None).shape,
        on_gpu.weighted_sum(drawn(4, 5), place_TK, None).tolist(),
        grad_RD.shape,
        grad_TK.tolist(),
    ]


@on_ranks(1, timeout=60)
def test_an_expanded_gradient_without_rows_is_accepted() -> None:
    """Run a rank without rows whose caller sums the result: the gradient is one number, expanded to no rows."""
    kernels("rows")  # enables the interpreter before the first import
    from moe_comm.dispatch.slots import sums
    from moe_comm.kernels import native

    native.TRITON_DEVICES.add("cpu")
    try:
        empty_RD = torch.ones(()).expand(0, 5)
        assert empty_RD.stride() == (0, 0) == empty_RD.contiguous().stride()
        dropped_TK, weights_TK = torch.full((2, 3), -1), drawn(2, 3)
        assert not sums.weighted_sum(empty_RD, dropped_TK, weights_TK).any()
        assert sums.take(empty_RD, dropped_TK[0]).tolist() == [[0.0] * 5] * 3
        assert row_weights.scale_(drawn(0, 5), drawn(0), empty_RD).shape == (0,)
        grad_RD, grad_TK = sums.spread(empty_RD, dropped_TK[:0], weights_TK[:0], 4, drawn(4, 5))
        assert grad_RD.shape == (4, 5) and grad_TK.shape == (0, 3)
        counts_E, w_END = torch.zeros(2, dtype=torch.int64), drawn(2, 7, 5, dtype=torch.bfloat16)
        empty_RD, out_END = empty_RD.to(torch.bfloat16), drawn(2, 5, 7, dtype=torch.bfloat16)
        kernels("grouped_mm").grouped_mm_into(empty_RD, w_END, counts_E, drawn(0, 7, dtype=torch.bfloat16))
        kernels("grouped_mm").grouped_weight_grad_into(empty_RD, drawn(0, 7, dtype=torch.bfloat16), counts_E, out_END)
        assert not out_END.any()
    finally:
        native.TRITON_DEVICES.discard("cpu")


def test_tokens_without_rows_get_zeros(interpreter: RankPool) -> None:
    zeros = [[0.0] * 5] * 2
    assert interpreter.run(_results_without_rows)[0] == [zeros, (0, 5), zeros, (0, 5), [[0.0] * 3] * 2]


@on_ranks(1)
def test_wrong_shapes_and_dtypes_are_input_errors() -> None:
    on_gpu = kernels("rows")
    rows_RD, place_TK = drawn(6, 5), torch.zeros(2, 3, dtype=torch.int64)
    for call in (
        lambda: on_gpu.take_rows(rows_RD, place_TK),
        lambda: on_gpu.take_rows(rows_RD, place_TK[0].int()),
        lambda: on_gpu.take_rows(rows_RD.t(), place_TK[0]),
        lambda: on_gpu.weighted_sum(rows_RD.double(), place_TK, None),
        lambda: on_gpu.weighted_sum(rows_RD, place_TK, drawn(3, 2)),
        lambda: on_gpu.weighted_sum(rows_RD, place_TK, drawn(2, 3).bfloat16()),
        lambda: on_gpu.weighted_sum(rows_RD, place_TK.t(), None),
        lambda: on_gpu.spread(drawn(3, 5), place_TK, drawn(2, 3), 6),
        lambda: on_gpu.spread(drawn(2, 5), place_TK, drawn(2, 3), 6, drawn(5, 5)),
        lambda: on_gpu.scale_rows_(rows_RD, drawn(5)),
        lambda: on_gpu.scale_rows_(rows_RD, drawn(6), drawn(6, 4)),
    ):
        with pytest.raises(InputError, match="got"):
            call()


def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    from moe_comm.kernels.triton.rows import take_rows

    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        take_rows(torch.zeros(2, 2), torch.zeros(1, dtype=torch.int64))
