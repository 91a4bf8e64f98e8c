"""The bits of a row do not depend on other rows: sigmoid, SwiGLU and the row-invariant linear."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.kernels.pointwise import sigmoid
from moe_comm.kernels.row_invariant import row_invariant_linear, row_invariant_mm

ROWS = [*range(40), 63, 64, 65, 127, 129, 255, 257, 511, 513, 1000]
STARTS = [0, 1, 2, 3, 5, 8, 13, 31]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 8), (48, 7), (33, 5), (256, 1), (1024, 64), (1000, 20), (7, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_of_a_linear_has_the_same_bits_in_every_batch(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, w = draw(1040, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype, seed=1)
    full = row_invariant_mm(x, w.t())
    exact, sizes = x.double() @ w.double().t(), x.double().abs() @ w.double().abs().t()
    bound = 8 * torch.finfo(dtype).eps * sizes
    assert ((full - exact).abs() <= bound).all(), "the error exceeds the rounding bound of a sum"
    for rows in ROWS:
        assert torch.equal(row_invariant_mm(x[:rows], w.t()), full[:rows]), rows
    for start in STARTS:
        assert torch.equal(row_invariant_mm(x[start : start + 97], w.t()), full[start : start + 97]), start
        assert torch.equal(row_invariant_mm(x[start : start + 2].clone(), w.t()), full[start : start + 2]), start


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 7), (64, 64), (33, 5)])
def test_a_row_of_a_linears_input_gradient_has_the_same_bits_in_every_batch(inputs: int, outputs: int) -> None:
    x, w, g = draw(300, inputs), draw(outputs, inputs, seed=1), draw(300, outputs, seed=2)

    def grad(rows: slice) -> Tensor:
        leaf = x[rows].clone().requires_grad_()
        row_invariant_linear(leaf, w).backward(g[rows])
        assert leaf.grad is not None
        return leaf.grad

    full = grad(slice(None))
    for rows in (1, 2, 3, 4, 7, 16, 17, 100, 299):
        assert torch.equal(grad(slice(0, rows)), full[:rows]), rows
        assert torch.equal(grad(slice(300 - rows, 300)), full[300 - rows :]), rows


@pytest.mark.parametrize("rows", [0, 1, 5, 32])
def test_the_linear_passes_gradcheck(rows: int) -> None:
    x, w, b = (draw(*s, dtype=torch.float64, seed=i).requires_grad_() for i, s in enumerate([(rows, 6), (3, 6), (3,)]))
    assert torch.autograd.gradcheck(row_invariant_linear, (x, w, b))
    assert torch.autograd.gradcheck(lambda x, w: row_invariant_linear(x, w), (x, w))


@pytest.mark.parametrize("width", [7, 37, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigmoid_has_the_same_bits_in_every_batch(width: int, dtype: torch.dtype) -> None:
    x = draw(501, width, dtype=dtype) * 5
    full = sigmoid(x)
    torch.testing.assert_close(full, torch.sigmoid(x))
    for rows in ROWS[1:]:
        assert torch.equal(sigmoid(x[:rows]), full[:rows]), rows
        assert torch.equal(sigmoid(x[501 - rows :].clone()), full[501 - rows :]) or rows > 501, rows


def test_sigmoid_and_its_gradient_are_finite_for_large_inputs() -> None:
    x = torch.tensor([-1e4, -100.0, -88.5, 0.0, 88.5, 100.0, 1e4, float("-inf"), float("inf")], requires_grad=True)
    y = sigmoid(x)
    y.sum().backward()
    assert y.isfinite().all() and x.grad is not None and x.grad.isfinite().all()
    assert y[-2] == 0 and y[-1] == 1
    assert torch.autograd.gradcheck(sigmoid, draw(3, 4, dtype=torch.float64).requires_grad_())


def test_linear_ignores_autocast() -> None:
    x, w = draw(20, 32).requires_grad_(), draw(5, 32, seed=1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = row_invariant_linear(x, w)
        y.sum().backward()
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, F.linear(x, w))
    assert w.grad is not None
    torch.testing.assert_close(w.grad, x.detach().sum(0).expand(5, 32))
