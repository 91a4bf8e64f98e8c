"""The arithmetic of dispatch in plain torch, compared with loops: places, sums in slot order, dot products by lane."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from moe_comm.dispatch.slots import plain
from moe_comm.kernels import row_weights

SEEDED = settings(deadline=None, derandomize=True, max_examples=60)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int]:
    """[T, K] ids, some dropped, and the number of experts."""
    experts, tokens, top_k = draw(st.integers(1, 9)), draw(st.integers(0, 12)), draw(st.integers(1, 5))
    ids = draw(st.lists(st.integers(-1, experts - 1), min_size=tokens * top_k, max_size=tokens * top_k))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return torch.tensor(ids, dtype=dtype).view(tokens, top_k), experts


@SEEDED
@given(routings())
def test_slots_are_ordered_by_expert_then_token_then_slot(routing: tuple[Tensor, int]) -> None:
    ids_TK, experts = routing
    order, place_TK = plain.order_slots(ids_TK, experts)
    counts_E = plain.count_slots(ids_TK, experts)[:experts]
    flat = ids_TK.reshape(-1).tolist()
    expected = sorted((slot for slot, e in enumerate(flat) if e >= 0), key=lambda slot: (flat[slot], slot))
    assert order.tolist()[: len(expected)] == expected
    assert counts_E.tolist() == [flat.count(e) for e in range(experts)]
    assert place_TK.reshape(-1).tolist() == [expected.index(s) if e >= 0 else -1 for s, e in enumerate(flat)]


@SEEDED
@given(routings(), st.sampled_from([-2, -(2**63), 2**31 - 1, 2**63 - 1]), st.data())
def test_bad_ids_are_counted_and_not_dispatched(routing: tuple[Tensor, int], bad: int, data: st.DataObject) -> None:
    ids_TK, experts = routing[0].long(), routing[1]
    if not ids_TK.numel():
        assert plain.count_slots(ids_TK, experts).tolist() == [0] * (experts + 4)
        return
    slot = data.draw(st.integers(0, ids_TK.numel() - 1))
    ids_TK.view(-1)[slot] = bad
    *counts, dropped, num_bad, first, value = plain.count_slots(ids_TK, experts).tolist()
    assert (num_bad, first, value) == (1, slot, bad)
    assert sum(counts) + dropped + 1 == ids_TK.numel() and dropped == int((ids_TK == -1).sum())
    assert int(plain.order_slots(ids_TK, experts)[1].view(-1)[slot]) == -1


@SEEDED
@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_transpose_blocks_is_inverted_by_its_transpose(a: int, b: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=a * b, max_size=a * b))
    counts_AB, total = torch.tensor(sizes).view(a, b), sum(sizes)
    by_ab = [(i, j, n) for i in range(a) for j in range(b) for n in range(counts_AB[i, j])]
    by_ba = [(i, j, n) for j in range(b) for i in range(a) for n in range(counts_AB[i, j])]
    forth = plain.transpose_blocks(counts_AB, total)
    back = plain.transpose_blocks(counts_AB.T, total)
    assert [by_ab[i] for i in forth.tolist()] == by_ba
    assert torch.equal(forth[back], torch.arange(total)) and torch.equal(back[forth], torch.arange(total))


def random_rows(dtype: torch.dtype, hidden: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows [R, D], places [T, K], weights [T, K] and gradient [T, D]. Dropped slots: place -1, weight NaN."""
    g = torch.Generator().manual_seed(seed)
    ids_TK = torch.randint(-1, 5, (11, 4), generator=g)
    _, place_TK = plain.order_slots(ids_TK, 5)
    weights_TK = torch.rand(11, 4, generator=g).to(plain.accumulate_dtype(dtype))
    weights_TK[ids_TK < 0] = float("nan")
    rows_RD = torch.randn(int((ids_TK >= 0).sum()), hidden, generator=g).to(dtype)
    return rows_RD, place_TK, weights_TK, torch.randn(11, hidden, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 3, 32, 33, 257])
def test_sums_products_and_gradients_agree_with_float64(dtype: torch.dtype, hidden: int) -> None:
    rows_RD, place_TK, weights_TK, grad_TD = random_rows(dtype, hidden)
    rows, grad, weights = rows_RD.double(), grad_TD.double(), weights_TK.double()
    y, y_plain, w_grad = torch.zeros(11, hidden).double(), torch.zeros(11, hidden).double(), torch.zeros(11, 4).double()
    grad_rows = torch.zeros_like(rows)
    for t in range(11):
        for k in range(4):
            if (r := int(place_TK[t, k])) >= 0:
                y[t] += weights[t, k] * rows[r]
                y_plain[t] += rows[r]
                w_grad[t, k] = grad[t] @ rows[r]
                grad_rows[r] = grad[t] * weights[t, k]
    eps = torch.finfo(dtype).eps
    close = {"rtol": 4 * eps, "atol": 16 * eps, "check_dtype": False}
    torch.testing.assert_close(plain.weighted_sum(rows_RD, place_TK, weights_TK), y.to(dtype), **close)
    torch.testing.assert_close(plain.weighted_sum(rows_RD, place_TK, None), y_plain.to(dtype), **close)
    torch.testing.assert_close(
        plain.spread(grad_TD, place_TK, weights_TK, rows_RD.shape[0]), grad_rows.to(dtype), **close
    )
    wide = torch.finfo(plain.accumulate_dtype(dtype)).eps
    torch.testing.assert_close(
        plain.weight_grad(grad_TD, rows_RD, place_TK), w_grad, rtol=0, atol=64 * wide * hidden**0.5, check_dtype=False
    )


def test_the_weighted_sum_rounds_every_product_and_addition_in_slot_order() -> None:
    rows_RD, place_TK, weights_TK, _ = random_rows(torch.float32, 65)
    rows, weights = rows_RD.numpy(), weights_TK.numpy()
    expected = np.zeros((11, 65), np.float32)
    for t in range(11):
        for k in range(4):
            if (r := int(place_TK[t, k])) >= 0:
                expected[t] = (expected[t] + (weights[t, k] * rows[r]).astype(np.float32)).astype(np.float32)
    assert np.array_equal(plain.weighted_sum(rows_RD, place_TK, weights_TK).numpy(), expected)


@pytest.mark.parametrize("hidden", [1, 3, 31, 32, 33, 100, 1024])
def test_dot_products_add_32_lanes_in_order_and_then_fold_them_in_halves(hidden: int) -> None:
    g = torch.Generator().manual_seed(hidden)
    a, b = torch.randn(3, hidden, generator=g), torch.randn(3, hidden, generator=g)
    lanes = np.zeros((3, 32), np.float32)
    for i in range(hidden):
        lanes[:, i % 32] += a[:, i].numpy() * b[:, i].numpy()
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    assert np.array_equal(row_weights.lane_dot(a, b).numpy(), lanes[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_without_rows_are_zero(dtype: torch.dtype) -> None:
    rows_RD, place_TK = torch.empty(0, 5, dtype=dtype), torch.full((3, 2), -1)
    weights_TK = torch.full((3, 2), float("inf"))
    assert torch.equal(plain.weighted_sum(rows_RD, place_TK, weights_TK), torch.zeros(3, 5, dtype=dtype))
    assert not plain.weight_grad(torch.ones(3, 5, dtype=dtype), rows_RD, place_TK).any()
    assert plain.spread(torch.ones(3, 5, dtype=dtype), place_TK, weights_TK, 0).shape == (0, 5)


def test_weight_gradients_of_dropped_slots_are_zero_for_infinite_output_gradients() -> None:
    grad_TD = torch.full((1, 4), float("inf"))
    grad_TK = plain.weight_grad(grad_TD, torch.ones(1, 4), torch.tensor([[-1, 0]]))
    assert grad_TK.tolist() == [[0.0, float("inf")]]
