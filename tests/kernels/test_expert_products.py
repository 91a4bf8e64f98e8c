"""Products of rows by expert, and gradients of weights: values, and the bits of a row for every split of its rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from moe_comm.kernels.cpu_gemm import ExpertWeights, weight_gradients
from moe_comm.kernels.row_invariant import row_invariant_linear, row_invariant_mm

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3, torch.float64: 1e-12}
SIZES = (5, 0, 37, 1)
CUTS = ((0, 37), (0, 1, 37), (0, 3, 10, 37), (0, 8, 9, 24, 37))


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def weights(strides: str, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    if strides == "dense":
        return draw(len(SIZES), outputs, inputs, dtype=dtype)
    if strides == "transposed":
        return draw(len(SIZES), inputs, outputs, dtype=dtype).transpose(1, 2)
    return draw(len(SIZES), outputs, 2 * inputs, dtype=dtype)[:, :, ::2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strides", ["dense", "transposed", "every second"])
@pytest.mark.parametrize(("inputs", "outputs"), [(12, 10), (7, 16), (32, 48), (1, 1), (130, 70)])
def test_products_of_experts(inputs: int, outputs: int, strides: str, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    x, w, bias = (
        draw(sum(SIZES), inputs, dtype=dtype),
        weights(strides, outputs, inputs, dtype),
        draw(4, outputs, dtype=dtype),
    )
    out = torch.empty(sum(SIZES), outputs, dtype=dtype)
    ExpertWeights(w, bias).multiply(x, out, SIZES)
    parts = [(part.double(), w[e].double(), bias[e].double()) for e, part in enumerate(x.split(SIZES))]
    expected = torch.cat([part @ w_NK.t() + bias_N for part, w_NK, bias_N in parts])
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    # The rows of expert 2 alone, in pieces, in a wider matrix.
    wide = torch.cat([x[5:42]] * 2, 1)[:, :inputs]
    for cut in CUTS:
        some = torch.full((37, outputs), torch.nan, dtype=dtype)
        for first, end in pairwise(cut):
            ExpertWeights(w, bias).multiply(wide[first:end], some[first:end], (end - first,), 2)
        assert torch.equal(some, out[5:42]), cut
    added = torch.ones_like(out)
    ExpertWeights(w).add(x, added, SIZES)
    expected = 1 + torch.cat([part @ w_NK.t() for part, w_NK, _ in parts])
    torch.testing.assert_close(added.double(), expected, rtol=tolerance, atol=tolerance)
    grads = torch.empty_like(w)
    weight_gradients(out, x, grads, SIZES)
    exact = torch.stack([a.double().t() @ b.double() for a, b in zip(out.split(SIZES), x.split(SIZES), strict=True)])
    torch.testing.assert_close(grads.double(), exact, rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_any_strides_have_the_bits_of_dense_rows(dtype: torch.dtype) -> None:
    """The gradient of ``sum()`` is one expanded number."""
    x, w = torch.randn(70, 40, dtype=dtype), torch.randn(24, 40, dtype=dtype)
    grads = []
    for scale in (False, True):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = row_invariant_linear(*leaves)
        (y * 1 if scale else y).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_no_rows_no_inputs_and_no_outputs(dtype: torch.dtype) -> None:
    for rows, outputs, inputs in ((0, 3, 4), (5, 0, 4), (5, 3, 0), (0, 0, 0)):
        x, w, bias = (draw(*shape, dtype=dtype) for shape in ((rows, inputs), (2, outputs, inputs), (2, outputs)))
        out, sizes = torch.full((rows, outputs), torch.nan, dtype=dtype), (rows, 0)
        ExpertWeights(w, bias).multiply(x, out, sizes)
        assert torch.equal(out, x @ w[0].t() + bias[0])
        ExpertWeights(w).add(x, out, sizes)
        grads = torch.full_like(w, torch.nan)
        weight_gradients(out, x, grads, sizes)
        assert torch.equal(grads[1], torch.zeros_like(w[1])) and grads.shape == w.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_negative_views_and_zero_tensors_have_the_bits_of_their_values(dtype: torch.dtype) -> None:
    x, w, y = draw(9, 20, dtype=dtype), draw(1, 6, 20, dtype=dtype), draw(9, 6, dtype=dtype)

    def products(x: Tensor, w: Tensor, y: Tensor) -> list[Tensor]:
        out, grads = torch.empty_like(y), torch.empty(1, 6, 20, dtype=dtype)
        ExpertWeights(w).multiply(x, out, (9,))
        weight_gradients(y, x, grads, (9,))
        return [out, grads, row_invariant_mm(y, w[0])]

    def negative(t: Tensor) -> Tensor:
        return torch._neg_view(-t)

    for view in (negative, lambda t: torch._efficientzerotensor(t.shape, dtype=dtype, device="cpu")):
        for number in range(3):
            given = [view(t) if i == number else t for i, t in enumerate((x, w, y))]
            values = [t.resolve_neg().clone() for t in given]
            assert all(torch.equal(a, b) for a, b in zip(products(*given), products(*values), strict=True)), number


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_biases_may_have_any_strides(dtype: torch.dtype) -> None:
    x, w = draw(5, 8, dtype=dtype), draw(2, 6, 8, dtype=dtype)
    biases = (
        draw(1, 1, dtype=dtype).expand(2, 6),
        draw(2, 1, dtype=dtype).expand(2, 6),
        draw(1, 6, dtype=dtype).expand(2, 6),
        draw(6, 2, dtype=dtype).t(),
        draw(2, 12, dtype=dtype)[:, ::2],
    )
    for bias in biases:
        out, dense = (torch.empty(5, 6, dtype=dtype) for _ in range(2))
        ExpertWeights(w, bias).multiply(x, out, (3, 2))
        ExpertWeights(w, bias.clone(memory_format=torch.contiguous_format)).multiply(x, dense, (3, 2))
        assert torch.equal(out, dense)
