"""RMSNorm and RoPE's rotation in the native core against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_comm.kernels import rms_norm as norm_module
from moe_comm.kernels.native import core
from moe_comm.kernels.rms_norm import rms_norm, rms_norm_reference
from moe_comm.kernels.rotate import rotate_halves, rotate_halves_reference

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grad_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def ran_native(y: Tensor) -> bool:
    return type(y.grad_fn).__name__ in ("_RMSNormBackward", "_RotateBackward")


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 2, 32), (300, 40), (2, 130, 129)])
def test_norm_forward_and_backward_match_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, grad = draw(*shape, dtype=dtype).requires_grad_(), draw(*shape, dtype=dtype, seed=1)
    weight = (1 + draw(shape[-1], dtype=dtype, seed=2)).requires_grad_()
    y = rms_norm(x, weight, 1e-6)
    y.backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = rms_norm_reference(wide[0], wide[1], 1e-6)
    expected.backward(grad.double())
    assert ran_native(y) and y.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=2 * tolerance)
    torch.testing.assert_close(grad_of(x).double(), grad_of(wide[0]), rtol=tolerance, atol=20 * tolerance)
    torch.testing.assert_close(grad_of(weight).double(), grad_of(wide[1]), rtol=4 * tolerance, atol=60 * tolerance)


def test_a_row_of_the_norm_has_the_same_bits_for_every_batch_and_thread_count() -> None:
    x, weight, grad = draw(500, 96), draw(96, seed=1), draw(500, 96, seed=2)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            leaf, scale = x.clone().requires_grad_(), weight.clone().requires_grad_()
            y = rms_norm(leaf, scale, 1e-6)
            y.backward(grad)
            results.append((y, grad_of(leaf), grad_of(scale)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    part = x[37:90].clone().requires_grad_()
    y = rms_norm(part, weight, 1e-6)
    y.backward(grad[37:90])
    assert torch.equal(y, results[0][0][37:90]) and torch.equal(grad_of(part), results[0][1][37:90])


def test_every_instruction_set_gives_the_same_bits() -> None:
    native = core()
    x, weight, grad = draw(40, 70), draw(70, seed=1), draw(40, 70, seed=2)
    heads, angles = draw(2, 5, 3, 24), draw(1, 5, 12, seed=3)
    results = []
    best = native.isa()
    try:
        for name in native.isas():
            assert native.set_isa(name)
            leaf, scale = x.clone().requires_grad_(), weight.clone().requires_grad_()
            y = rms_norm(leaf, scale, 1e-6)
            y.backward(grad)
            results.append((y, grad_of(leaf), grad_of(scale), rotate_halves(heads, angles.cos(), angles.sin())))
    finally:
        native.set_isa(best)
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


def test_norm_with_weights_of_another_dtype_returns_the_dtype_of_the_tokens() -> None:
    x, weight = draw(4, 64, dtype=torch.bfloat16), draw(64, seed=1).requires_grad_()
    y = rms_norm(x, weight, 1e-6)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and grad_of(weight).dtype == torch.float32


def test_norm_falls_back_to_plain_torch_for_unsupported_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(8)
    for x in (draw(3, 8, dtype=torch.float64), draw(0, 8)):
        assert not ran_native(rms_norm(x.requires_grad_(), weight, 1e-6))
    x = draw(3, 8).requires_grad_()
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    monkeypatch.setattr(norm_module, "on_cpu", lambda *tensors: False)
    assert not ran_native(rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("width", [2, 10, 64, 128])
def test_rotation_forward_and_backward_have_the_bits_of_plain_torch_at_any_strides(width: int, batched: bool) -> None:
    angles = draw(3 if batched else 1, 5, width // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    plain = draw(3, 5, 4, width)
    for x in (plain, draw(3, 4, 5, width).transpose(1, 2), draw(3, 5, 4, width + 6)[..., 3 : 3 + width]):
        x = x.detach().requires_grad_()
        y, expected = rotate_halves(x, cos, sin), rotate_halves_reference(x, cos, sin)
        assert ran_native(y) and torch.equal(y, expected)
        grad = draw(3, 4, 5, width, seed=2).transpose(1, 2)
        (native_grad,) = torch.autograd.grad(y, x, grad)
        (plain_grad,) = torch.autograd.grad(expected, x, grad)
        assert torch.equal(native_grad, plain_grad)
