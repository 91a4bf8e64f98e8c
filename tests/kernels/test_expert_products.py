"""Products of rows by expert, and gradients of weights: values, and the bits of a row for every split of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.cpu_gemm import ExpertWeights, weight_gradients
from moe_comm.kernels.expert_mlp import BackwardInputs, ExpertMLP
from moe_comm.kernels.row_invariant import row_invariant_linear, row_invariant_mm
from moe_comm.kernels.row_weights import scale_
from moe_comm.kernels.swiglu import swiglu_backward, swiglu_forward
from moe_comm.runtime.memory import warm_rows

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


@dataclass
class Passes:
    """Inputs of the experts of a pass. keep: h is kept. trained: weights need gradients, in which dtype."""

    mlp: ExpertMLP
    rows: Tensor
    grad: Tensor
    routing: Tensor | None
    dots: bool
    keep: bool
    grad_dtype: torch.dtype | None

    def run(self, sizes: tuple[int, ...], at_once: bool) -> list[Tensor]:
        """Return outputs and gradients of one pass each; in row ranges of the largest expert unless ``at_once``."""
        rows, out, grad_rows = self.rows, torch.empty_like(self.rows), torch.empty_like(self.rows)
        forward = self.mlp.forward(rows, out, sizes, self.keep, warm_rows)
        start, count = sum(sizes[:2]), sizes[2]
        ranges = [(e, slice(sum(sizes[:e]), sum(sizes[: e + 1]))) for e in range(len(sizes)) if e != 2]
        ranges += [(2, slice(start + a, start + b)) for a, b in ((40, count), (0, 7), (7, 40))]
        dots = None if self.routing is None or not self.dots else torch.full_like(self.routing, torch.nan)
        needs = self.grad_dtype is not None
        grads = [torch.full_like(t, torch.nan, dtype=self.grad_dtype) if needs else None for t in self.mlp.tensors[:2]]
        if at_once:
            forward.all_rows()
        else:
            for expert, of_expert in ranges:
                forward.row_range(expert, of_expert)
        backward = self.mlp.backward(
            BackwardInputs(
                rows,
                forward.saved[2],
                self.grad,
                sizes,
                grad_rows,
                (needs, needs, False, False),
                warm_rows,
                at_once,
                self.routing,
                dots,
            )
        )
        if at_once:
            backward.all_rows((*grads, None, None))
        else:
            for expert, of_expert in ranges:
                backward.row_range(expert, of_expert)
            for expert in range(len(sizes)):
                backward.weights_of(expert, (*grads, None, None))
        return [t for t in (out, grad_rows, dots, *grads) if t is not None]

    def steps(self, sizes: tuple[int, ...]) -> list[Tensor]:
        """Return the same of all rows, one operator after the other."""
        w13, w2 = ExpertWeights(self.mlp.tensors[0]), ExpertWeights(self.mlp.tensors[1])
        rows, width = self.rows, self.mlp.tensors[1].shape[2]
        h, act = rows.new_empty(len(rows), 2 * width), rows.new_empty(len(rows), width)
        grad_act, grad_h = torch.empty_like(act), torch.empty_like(h)
        out, grad_rows, dots = torch.empty_like(rows), torch.empty_like(rows), None
        w13.multiply(rows, h, sizes)
        swiglu_forward(h, act)
        w2.multiply(act, out, sizes)
        w2.transposed.multiply(self.grad, grad_act, sizes)
        swiglu_backward(h, grad_act, grad_h, act)
        if self.routing is not None:
            dots = scale_(act, self.routing, grad_act)
            scale_(grad_h, self.routing)
        w13.transposed.multiply(grad_h, grad_rows, sizes)
        grads = [torch.empty_like(t, dtype=self.grad_dtype) for t in self.mlp.tensors[:2] if self.grad_dtype]
        if grads:
            weight_gradients(grad_h, rows, grads[0], sizes)
            weight_gradients(self.grad, act, grads[1], sizes)
        return [t for t in (out, grad_rows, dots if self.dots else None, *grads) if t is not None]


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize(("hidden", "ffn"), [(40, 64), (33, 17), (7, 48)])
def test_passes_of_swiglu_experts_have_the_bits_of_their_steps(hidden: int, ffn: int, dtype: torch.dtype) -> None:
    sizes = (5, 0, 270, 1, 33)
    count = sum(sizes)
    for case in range(6):
        w13, w2 = draw(5, 2 * ffn, hidden, dtype=dtype), draw(5, hidden, ffn, dtype=dtype)
        if case == 1:
            w13, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w13, w2))
        rows, grad = draw(count, hidden, dtype=dtype), draw(count, hidden + 1, dtype=dtype)[:, 1:]
        rows[3, 0], rows[4, 0], grad[5, 1] = float("nan"), float("inf"), 1e-39
        routing = None if case == 3 else draw(count, dtype=torch.float32)
        grad_dtype = (dtype, torch.float32, dtype, dtype, None, dtype)[case]
        mlp = ExpertMLP((w13, w2, None, None), activation_of("swiglu"), recompute=case == 2)
        passes = Passes(mlp, rows, grad, routing, case != 5, case != 2, grad_dtype)
        expected = passes.steps(sizes)
        for at_once in (True, False):
            for got, wanted in zip(passes.run(sizes, at_once), expected, strict=True):
                same = torch.equal(got.nan_to_num(7), wanted.nan_to_num(7))
                assert same, (case, at_once, got.shape)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_experts_apart_from_the_stacks_have_the_bits_of_those_in_stacks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, hidden, ffn = (5, 0, 270, 1, 33), 40, 64
    w13, w2 = draw(5, 2 * ffn, hidden, dtype=dtype), draw(5, hidden, ffn, dtype=dtype)
    rows, grad = (draw(sum(sizes), hidden + more, dtype=dtype)[:, more:] for more in (0, 1))
    settings = draw(sum(sizes), dtype=torch.float32), True, True, dtype
    expected = Passes(ExpertMLP((w13, w2, None, None), activation_of("swiglu")), rows, grad, *settings).run(sizes, True)
    others = tuple((w13[e : e + 1].clone(), w2[e : e + 1].clone(), None, None) for e in (3, 4))
    grads = [torch.empty_like(w[:2], dtype=torch.float32) for w in (w13, w2)]
    mlp = ExpertMLP(
        (w13[:3], w2[:3], None, None),
        activation_of("swiglu"),
        others=others,
        wide=lambda: ((), (*grads, None, None)),
    )
    for at_once in (False, True):
        if at_once:  # each pass is one native call for the stacks, and one for each other expert
            monkeypatch.setattr(ExpertWeights, "multiply", None)
        *got, grad_w13, grad_w2 = Passes(mlp, rows, grad, *settings).run(sizes, at_once)
        assert all(map(torch.equal, got, expected))
        for stack, other, whole in zip((grad_w13, grad_w2), grads, expected[3:], strict=True):
            assert torch.equal(torch.cat([stack, other.to(dtype)]), whole)
            other.fill_(torch.nan)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_outputs_of_swiglu_experts_with_biases_and_denormals_have_the_bits_of_their_steps(dtype: torch.dtype) -> None:
    sizes, hidden, ffn = (3, 45), 40, 48
    w13, w2 = draw(2, 2 * ffn, hidden, dtype=dtype), draw(2, hidden, ffn, dtype=dtype)
    b13, b2 = draw(2, 2 * ffn, dtype=dtype), draw(2, hidden, dtype=dtype)
    low = -6 if dtype is torch.float16 else -86  # SwiGLU gives a denormal
    b13[:, :ffn:3], b13[:, ffn : 2 * ffn : 3], b13[0, 1], b13[1, 2] = low, 1e-3, 1e-39, -1e-39
    rows = draw(sum(sizes), hidden, dtype=dtype)
    rows[::2], w13[:, 1], w2[:, 1] = 0, 0, torch.finfo(dtype).tiny / 2
    out, expected, act = torch.empty_like(rows), torch.empty_like(rows), rows.new_empty(len(rows), ffn)
    for keep in (False, True):
        passed = ExpertMLP((w13, w2, b13, b2), activation_of("swiglu")).forward(rows, out, sizes, keep, warm_rows)
        passed.all_rows()
        h = rows.new_empty(len(rows), 2 * ffn)
        ExpertWeights(w13, b13).multiply(rows, h, sizes)
        swiglu_forward(h, act)
        assert (act.abs() < torch.finfo(dtype).tiny).logical_and(act != 0).any()
        ExpertWeights(w2, b2).multiply(act, expected, sizes)
        assert torch.equal(out, expected)
        assert not keep or torch.equal(passed.saved[2], h)
