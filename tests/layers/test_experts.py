"""Experts: grouped_mlp compared with float64 and gradcheck; strides, biases, empty experts, autocast, memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_comm.dispatch.expert_call import run_mlp
from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.activations import ACTIVATIONS, Activation, activation_of
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.layers import Experts, grouped_mlp
from tests.layers.reference import draw, silu_glu

SIZES = [(3, 0, 1, 7), (0, 0, 0, 0), (11, 0, 0, 0), (0, 0, 0, 9), (1, 1, 1, 1), (40, 17, 2, 64)]


def run(experts: Experts, rows: Tensor, sizes: tuple[int, ...], grad: Tensor) -> dict[str, Tensor]:
    leaf = rows.clone().requires_grad_()
    experts.zero_grad()
    out = experts(leaf, sizes)
    out.backward(grad.to(out.dtype))
    grads = {name: p.grad for name, p in experts.named_parameters()}
    assert leaf.grad is not None and all(g is not None for g in grads.values())
    return {"out": out.detach(), "rows": leaf.grad, **{n: g for n, g in grads.items() if g is not None}}


def reference(experts: Experts, rows: Tensor, sizes: tuple[int, ...], grad: Tensor) -> dict[str, Tensor]:
    """Return the results of ``run`` in float64 with autograd, computed one expert at a time."""
    leaf = rows.double().requires_grad_()
    p = {n: v.detach().double().requires_grad_() for n, v in experts.named_parameters()}
    parts = []
    for e, part in enumerate(leaf.split(sizes)):
        w13, w2 = (p[n][e] if experts.transposed else p[n][e].t() for n in ("w13", "w2"))
        h = part @ w13
        out = experts.activation.fn(h + p["b13"][e] if "b13" in p else h) @ w2
        parts.append(out + p["b2"][e] if "b2" in p else out)
    torch.cat(parts).backward(grad.double())
    grads = {n: torch.zeros_like(v) if v.grad is None else v.grad for n, v in p.items()}
    assert leaf.grad is not None
    return {"out": torch.cat(parts).detach(), "rows": leaf.grad, **grads}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"transposed": True, "bias": True}, {"recompute": True}])
def test_output_and_all_gradients_match_float64(sizes: tuple[int, ...], options: dict[str, bool]) -> None:
    experts = Experts(4, 24, 10, **{name: value for name, value in options.items() if name != "recompute"})
    experts.recompute = "recompute" in options
    for name, p in experts.named_parameters():
        p.data.copy_(draw(*p.shape, seed=len(name)) * 0.3)
    rows, grad = draw(sum(sizes), 24), draw(sum(sizes), 24, seed=1)
    actual, expected = run(experts, rows, sizes, grad), reference(experts, rows, sizes, grad)
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name].double(), expected[name], rtol=1e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_every_activation_passes_gradcheck(name: str) -> None:
    activation = activation_of(name)
    width_h = 6 if activation.gated else 3
    args = [
        draw(*shape, seed=seed, dtype=torch.float64).requires_grad_()
        for seed, shape in enumerate([(5, 4), (3, width_h, 4), (3, 4, 3), (3, width_h), (3, 4)])
    ]
    assert torch.autograd.gradcheck(lambda *a: grouped_mlp(a[0], (2, 0, 3), ExpertMLP(a[1:], activation, False)), args)


def test_experts_without_rows_have_zero_gradients() -> None:
    experts = Experts(3, 8, 4, bias=True)
    results = run(experts, draw(5, 8), (0, 5, 0), torch.ones(5, 8))
    for name in ("w13", "w2", "b13", "b2"):
        assert not results[name][0].any() and not results[name][2].any() and results[name][1].any()


def test_a_rank_without_experts_runs() -> None:
    experts = Experts(0, 8, 4)
    rows = torch.zeros(0, 8, requires_grad=True)
    out = experts(rows, ())
    out.sum().backward()
    assert out.shape == (0, 8) and rows.grad is not None and experts.w13.grad is not None


def test_recompute_changes_no_bit() -> None:
    plain, recomputing = Experts(3, 32, 16), Experts(3, 32, 16)
    recomputing.recompute = True
    recomputing.load_state_dict(plain.state_dict())
    rows, grad = draw(50, 32), draw(50, 32, seed=1)
    expected, actual = (run(e, rows, (20, 0, 30), grad) for e in (plain, recomputing))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_weights_and_gradients_keep_the_layout_of_their_storage() -> None:
    experts = Experts(2, 16, 8, transposed=True)
    run(experts, draw(6, 16), (2, 4), draw(6, 16, seed=1))
    for p in experts.parameters():
        assert p.grad is not None and p.grad.is_contiguous() and p.grad.shape == p.shape


def test_the_bits_of_an_expert_depend_on_its_rows_only() -> None:
    """Move an expert within the stack and to unaligned addresses, as a change of the EP size does."""
    for hidden, ffn in ((32, 16), (33, 7), (20, 10)):
        four_experts = Experts(4, hidden, ffn)
        one_expert = Experts(1, hidden, ffn)
        one_expert.w13.data.copy_(four_experts.w13[2:3].data)
        one_expert.w2.data.copy_(four_experts.w2[2:3].data)
        for size in (1, 2, 3, 5, 16, 33):
            rows, grad = draw(4 + size + 6, hidden), draw(4 + size + 6, hidden, seed=1)
            in_stack = run(four_experts, rows, (3, 1, size, 6), grad)
            alone = run(one_expert, rows[4 : 4 + size], (size,), grad[4 : 4 + size])
            assert torch.equal(in_stack["out"][4 : 4 + size], alone["out"]), (hidden, size)
            assert torch.equal(in_stack["rows"][4 : 4 + size], alone["rows"]), (hidden, size)
            assert torch.equal(in_stack["w13"][2], alone["w13"][0]) and torch.equal(in_stack["w2"][2], alone["w2"][0])


def test_only_required_gradients_are_computed() -> None:
    experts = Experts(2, 8, 4)
    experts.w13.requires_grad_(False)
    experts(draw(5, 8), (2, 3)).sum().backward()
    assert experts.w13.grad is None and experts.w2.grad is not None
    experts.w2.requires_grad_(False)
    rows = draw(5, 8).requires_grad_()
    experts(rows, (2, 3)).sum().backward()
    assert rows.grad is not None


def test_output_and_input_gradient_use_memory_from_alloc() -> None:
    allocated: list[Tensor] = []

    def alloc(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        allocated.append(torch.empty(rows, width, dtype=dtype, device=device))
        return allocated[-1]

    experts = Experts(2, 8, 4)
    rows = draw(5, 8)
    grads: list[int] = []
    leaf = rows.requires_grad_()
    scaled = leaf * 1.0
    scaled.register_hook(lambda g: grads.append(g.data_ptr()))
    out = run_mlp(scaled, (2, 3), experts.mlp_for(scaled), alloc=alloc)
    out.sum().backward()
    assert [t.data_ptr() for t in allocated] == [out.data_ptr(), grads[0]]


def test_autocast_runs_in_its_dtype_and_gradients_stay_in_fp32() -> None:
    experts = Experts(2, 16, 8)
    rows = draw(9, 16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = experts(rows, (4, 5))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and rows.grad is not None
    assert {p.grad.dtype for p in experts.parameters() if p.grad is not None} == {torch.float32}
    expected = reference(experts, rows.detach(), (4, 5), torch.ones(9, 16))
    torch.testing.assert_close(out.double(), expected["out"], rtol=0.05, atol=1e-5)


def test_a_second_derivative_raises() -> None:
    experts = Experts(1, 4, 2)
    rows = draw(3, 4).requires_grad_()
    (grad,) = torch.autograd.grad(experts(rows, (3,)).square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_any_function_may_be_the_activation() -> None:
    doubled = Activation("mine", lambda h: silu_glu(h) * 2)
    twice, once = Experts(1, 8, 4, doubled), Experts(1, 8, 4)
    once.load_state_dict(twice.state_dict())
    torch.testing.assert_close(twice(draw(5, 8), (5,)), 2 * once(draw(5, 8), (5,)))


def test_initial_weights_depend_on_the_global_id_only() -> None:
    full, part = Experts(6, 8, 4), Experts(2, 8, 4)
    full.reset_parameters(7)
    part.reset_parameters(7, first_expert=3)
    assert torch.equal(full.w13[3:5], part.w13) and torch.equal(full.w2[3:5], part.w2)


def test_invalid_input_raises_with_the_expected_value() -> None:
    experts = Experts(2, 8, 4)
    with pytest.raises(InputError, match="add up to 5"):
        experts(draw(5, 8), (2, 2))
    with pytest.raises(InputError, match=r"\[R, 8\]"):
        experts(draw(5, 9), (2, 3))
    with pytest.raises(InputError, match="bfloat16"):
        experts(draw(5, 8).bfloat16(), (2, 3))
    with pytest.raises(InputError, match="needs w13"):
        grouped_mlp(
            draw(2, 4), (2,), ExpertMLP((draw(1, 5, 4), draw(1, 4, 3), None, None), activation_of("swiglu"), False)
        )
    with pytest.raises(ConfigError):
        Experts(2, 0, 4)
