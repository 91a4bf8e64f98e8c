"""SwiGLU, native and reference, and the other activations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.activations import ACTIVATIONS, Activation, activation_of
from moe_comm.kernels.swiglu import (
    swiglu,
    swiglu_backward,
    swiglu_backward_reference,
    swiglu_forward,
    swiglu_forward_reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-12}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def exact(h: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = h.double().requires_grad_()
    gate, up = leaf.chunk(2, 1)
    act = F.silu(gate) * up
    act.backward(grad.double())
    assert leaf.grad is not None
    return act.detach(), leaf.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 32, 40, 129])
@pytest.mark.parametrize("rows", [0, 1, 5, 70])
def test_forward_and_backward_match_float64(dtype: torch.dtype, width: int, rows: int) -> None:
    h, grad = draw(rows, 2 * width, dtype=dtype), draw(rows, width, dtype=dtype, seed=1)
    act_ref, grad_ref = exact(h, grad)
    tolerance = TOLERANCE[dtype]
    for forward, backward in (
        (swiglu_forward, swiglu_backward),
        (swiglu_forward_reference, swiglu_backward_reference),
    ):
        out, recomputed, grad_h = (torch.full_like(t, float("nan")) for t in (grad, grad, h))
        forward(h, out)
        backward(h, grad, grad_h, recomputed)
        assert torch.equal(recomputed, out)
        torch.testing.assert_close(out.double(), act_ref, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(grad_h.double(), grad_ref, rtol=tolerance, atol=4 * tolerance)


def test_the_activation_may_overwrite_its_gradient() -> None:
    h, grad = draw(20, 2 * 40), draw(20, 40, seed=1)
    for backward in (swiglu_backward, swiglu_backward_reference):
        act, grad_h, shared, grad_h2 = torch.empty(20, 40), torch.empty(20, 80), grad.clone(), torch.empty(20, 80)
        backward(h, grad, grad_h, act)
        backward(h, shared, grad_h2, shared)
        assert torch.equal(grad_h, grad_h2) and torch.equal(act, shared)


@pytest.mark.parametrize("width", [5, 33, 64])
def test_a_row_has_the_same_bits_in_every_batch(width: int) -> None:
    h, grad = draw(200, 2 * width), draw(200, width, seed=1)
    plain = swiglu_forward_reference, swiglu_backward_reference
    for forward, backward in ((swiglu_forward, swiglu_backward), plain):
        full, full_grad = torch.empty(200, width), torch.empty(200, 2 * width)
        forward(h, full)
        backward(h, grad, full_grad, None)
        for start, rows in ((0, 1), (0, 3), (7, 1), (7, 64), (199, 1), (0, 199)):
            part, part_grad = torch.empty(rows, width), torch.empty(rows, 2 * width)
            forward(h[start : start + rows], part)
            backward(h[start : start + rows], grad[start : start + rows].clone(), part_grad, None)
            assert torch.equal(part, full[start : start + rows])
            assert torch.equal(part_grad, full_grad[start : start + rows])


def test_autograd_form_is_correct_and_accepts_strided_rows() -> None:
    h = draw(9, 2 * 6, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(swiglu, h)
    wide = draw(9, 100)
    torch.testing.assert_close(swiglu(wide[:, :64]), F.silu(wide[:, :32]) * wide[:, 32:64])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(InputError, match=r"\(4, 7\)"):
        swiglu_forward(torch.zeros(4, 7), torch.zeros(4, 3))
    with pytest.raises(InputError):
        swiglu_backward(torch.zeros(4, 8), torch.zeros(3, 4), torch.zeros(4, 8), None)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_outputs_and_gradients_of_all_activations_match_autograd(name: str) -> None:
    activation = activation_of(name)
    h = draw(6, 8, dtype=torch.float64)
    grad = draw(6, 4 if activation.gated else 8, dtype=torch.float64, seed=1)
    leaf = h.clone().requires_grad_()
    expected = activation.fn(leaf)
    expected.backward(grad)
    out, grad_h = torch.empty_like(grad), torch.empty_like(h)
    activation.forward(h, out)
    shared = grad.clone()
    activation.backward(h, shared, grad_h, shared)
    assert leaf.grad is not None
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(shared, expected.detach())
    torch.testing.assert_close(grad_h, leaf.grad)


def test_custom_activations_are_accepted_and_unknown_names_are_refused() -> None:
    assert activation_of(Activation("mine", torch.tanh, gated=False)).name == "mine"
    with pytest.raises(ConfigError, match="swiglu"):
        activation_of("swigloo")
