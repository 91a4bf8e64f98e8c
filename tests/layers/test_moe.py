"""The MoE layer on one rank: compared with a loop over tokens and experts, and with torch features."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import moe_comm
from moe_comm.dispatch import make_dispatcher
from moe_comm.dispatch.slots.capacity import Capacity
from moe_comm.errors import ConfigError, InputError, MoeCommError, RoutingError
from moe_comm.layers import (
    Experts,
    MoEConfig,
    MoELayer,
    Router,
    RouterConfig,
    Routing,
    SharedExpert,
    TransformerConfig,
    ZeroExperts,
    gather_state_dict,
    load_state_dict,
    single_rank_copy,
)
from tests.layers.reference import draw, loop_over_experts, silu_glu

SMALL = MoEConfig(16, 12, RouterConfig(6, 2), shared_ffn=8, shared_gate=True)


def plain_layer(layer: MoELayer, x_TD: Tensor) -> Tensor:
    routing = layer.router(x_TD)
    e = layer.experts
    y_TD = loop_over_experts(x_TD, routing.ids_TK, routing.weights_TK, e.w13, e.w2)
    if layer.shared is not None:
        out = silu_glu(x_TD @ layer.shared.w13.t()) @ layer.shared.w2.t()
        y_TD = y_TD + (out if layer.shared.gate is None else torch.sigmoid(x_TD @ layer.shared.gate.t()) * out)
    return y_TD


def gradients(layer: MoELayer, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    inputs = {"x": x, **dict(layer.named_parameters())}
    grads = torch.autograd.grad(y, list(inputs.values()), draw(*y.shape, seed=9, dtype=y.dtype))
    return dict(zip(inputs, grads, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_output_and_all_gradients_equal_those_of_the_loop(dtype: torch.dtype) -> None:
    layer = MoELayer.build(SMALL, seed=3, dtype=dtype)
    x = draw(21, 16, dtype=dtype).requires_grad_()
    y, expected_y = layer(x), plain_layer(layer, x)
    torch.testing.assert_close(y, expected_y)
    actual, expected = gradients(layer, y, x), gradients(layer, expected_y, x)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], msg=lambda m, n=name: f"{n}: {m}")


def test_the_layer_passes_gradcheck() -> None:
    layer = MoELayer.build(SMALL, seed=3, dtype=torch.float64)
    routing = layer.router(draw(5, 16, dtype=torch.float64))
    x = draw(5, 16, dtype=torch.float64).requires_grad_()
    weights = routing.weights_TK.detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: layer(x, Routing(routing.ids_TK, w)), (x, weights))


@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 3, 16), (2, 0, 16), (1, 2, 3, 16)])
def test_the_output_has_the_leading_shape_of_the_input(shape: tuple[int, ...]) -> None:
    layer = MoELayer.build(SMALL, seed=0)
    x = draw(*shape).requires_grad_()
    y = layer(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert all(p.grad is not None for p in layer.parameters())


def test_strided_input_gives_the_same_bits() -> None:
    layer = MoELayer.build(SMALL, seed=0)
    x = draw(3, 5, 16)
    assert torch.equal(layer(x.transpose(0, 1)), layer(x.transpose(0, 1).contiguous()))


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 16, 19])
def test_a_tokens_routing_does_not_depend_on_its_batch(tokens: int) -> None:
    layer = MoELayer.build(SMALL, seed=0)
    x = draw(40, 16)
    full, part = layer.router(x), layer.router(x[:tokens])
    assert torch.equal(full.ids_TK[:tokens], part.ids_TK) and torch.equal(full.weights_TK[:tokens], part.weights_TK)
    assert layer.shared is not None
    assert torch.equal(layer.shared(x)[:tokens], layer.shared(x[:tokens]))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(reentrant: bool) -> None:
    config = MoEConfig(16, 12, RouterConfig(6, 2, balance_loss=0.1, z_loss=0.01), shared_ffn=8)
    layer = MoELayer.build(config, seed=0)

    def run(again: bool) -> dict[str, Tensor]:
        layer.zero_grad()
        x = draw(21, 16).requires_grad_()
        y = checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x)
        y.backward(draw(21, 16, seed=2))
        return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}  # type: ignore[dict-item]

    plain, again = run(False), run(True)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert int(layer.router.take_load().sum()) == 2 * 21 * 2


def test_a_compiled_layer_agrees_with_the_eager_layer() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.moe = nn.LayerNorm(16), MoELayer.build(SMALL, seed=0)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.moe(self.norm(x))

    block = Block()
    compiled = torch.compile(block, backend="aot_eager")
    for tokens in (7, 12):
        x = draw(tokens, 16)
        eager_x, compiled_x = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = block(eager_x), compiled(compiled_x)
        y.sum().backward()
        z.sum().backward()
        assert eager_x.grad is not None and compiled_x.grad is not None
        torch.testing.assert_close(z, y)
        torch.testing.assert_close(compiled_x.grad, eager_x.grad)


def test_autocast_computes_in_bf16_and_routes_in_fp32() -> None:
    layer = MoELayer.build(SMALL, seed=0)
    x = draw(21, 16).requires_grad_()
    plain = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert torch.equal(layer.router(x).ids_TK, layer.router(x.detach()).ids_TK)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad is not None and x.grad.dtype == torch.float32
    assert {p.grad.dtype for p in layer.parameters() if p.grad is not None} == {torch.float32}
    torch.testing.assert_close(y.float(), plain, rtol=0.1, atol=2e-5)


def test_a_bf16_layer_runs_and_trains() -> None:
    layer = MoELayer.build(SMALL, seed=0, dtype=torch.bfloat16)
    x = draw(21, 16, dtype=torch.bfloat16).requires_grad_()
    layer(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_zero_computation_experts_add_weight_times_x_or_nothing() -> None:
    config = MoEConfig(16, 12, RouterConfig(4, 3, normalize=False, zero_experts=ZeroExperts(identity=2, zero=1)))
    layer = MoELayer.build(config, seed=0)
    layer.router.weight.data.mul_(30)
    x = draw(25, 16).requires_grad_()
    routing = layer.router(x)
    real = routing.ids_TK.where(routing.ids_TK < 4, torch.tensor(-1))
    expected = loop_over_experts(x, real, routing.weights_TK, layer.experts.w13, layer.experts.w2)
    identity = (routing.ids_TK == 4) | (routing.ids_TK == 5)
    expected = expected + (routing.weights_TK * identity).sum(1, keepdim=True) * x
    assert identity.any() and (routing.ids_TK == 6).any()
    actual = layer(x)
    torch.testing.assert_close(actual, expected)
    actual_grads, expected_grads = gradients(layer, actual, x), gradients(layer, expected, x)
    for name in expected_grads:
        torch.testing.assert_close(actual_grads[name], expected_grads[name])


def test_capacity_drops_slots_and_counts_them() -> None:
    layer = MoELayer.build(SMALL, seed=0)
    layer.capacity = Capacity(0.5)
    x = draw(30, 16)
    y = layer(x)
    assert layer.num_dropped is not None and int(layer.num_dropped) > 0 and y.isfinite().all()
    layer.capacity = Capacity(100.0)
    assert torch.equal(layer(x), MoELayer.build(SMALL, seed=0)(x)) and int(layer.num_dropped) == 0


def test_auxiliary_losses_change_the_routers_gradient_but_not_the_output() -> None:
    with_loss = MoEConfig(16, 12, RouterConfig(6, 2, balance_loss=1.0, z_loss=0.5))
    layer_with_loss, plain = (
        MoELayer.build(with_loss, seed=0),
        MoELayer.build(MoEConfig(16, 12, RouterConfig(6, 2)), seed=0),
    )
    x = draw(20, 16)
    assert torch.equal(layer_with_loss(x), plain(x))
    layer_with_loss.aux_scale = 2.0
    layer_with_loss(x).sum().backward()
    plain(x).sum().backward()
    aux = layer_with_loss.router(x).aux_loss
    (loss_grad,) = torch.autograd.grad(aux, layer_with_loss.router.weight)
    assert layer_with_loss.router.weight.grad is not None and plain.router.weight.grad is not None
    torch.testing.assert_close(
        layer_with_loss.router.weight.grad - plain.router.weight.grad, 2 * loss_grad, rtol=1e-4, atol=1e-6
    )


def test_bad_input_raises_typed_errors() -> None:
    layer = MoELayer.build(SMALL, seed=0, label="block 3")
    with pytest.raises(InputError, match="hidden size is 16"):
        layer(draw(3, 15))
    x = draw(5, 16)
    x[2, 0] = float("nan")
    with pytest.raises(RoutingError, match="token 2"):
        layer(x)
    x = draw(4, 16)
    with pytest.raises(InputError, match=r"must be bool \(4,\), True for"):
        layer(x, mask=torch.ones(3, dtype=torch.bool))
    with pytest.raises(InputError, match=r"must be bool \(2, 2\) or \(4,\), True for"):
        layer(x.view(2, 2, 16), mask=torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("tolerance", [-1e-5, float("nan"), float("inf")])
def test_check_grads_refuses_a_tolerance_that_decides_nothing(tolerance: float) -> None:
    with pytest.raises(ConfigError, match=r"tolerance must be .*; got (-1e-05|nan|inf)"):
        moe_comm.check_grads(MoELayer.build(SMALL, seed=0), tolerance=tolerance)


def test_after_invalid_tokens_the_router_runs_on_the_device_of_the_layer() -> None:
    """Offloaded weights are on the host between passes. Here the device is "meta", that of the buffers."""
    layer = MoELayer.build(MoEConfig(16, 12, RouterConfig(6, 2)), seed=0)
    layer.dropped_total = layer.dropped_total.to("meta")
    host, device = layer.router.weight, nn.Parameter(layer.router.weight.detach().to("meta"))
    devices: list[torch.device] = []

    def gather(router: nn.Module, args: tuple[Tensor]) -> None:
        router.weight = device
        devices.append(args[0].device)

    layer.router.register_forward_pre_hook(gather)
    layer.router.register_forward_hook(lambda router, *_: setattr(router, "weight", host))
    with pytest.raises(InputError, match="hidden size is 16"):
        layer(draw(3, 15))
    unreadable = Routing([[0, 1]], [[0.5, 0.5]])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="weights: expected a tensor"):
        layer(draw(1, 16), routing=unreadable)
    assert [one.type for one in devices] == ["meta"]


def test_a_call_in_steps_computes_what_forward_does_and_has_one_result() -> None:
    layer = MoELayer.build(SMALL, seed=0)
    call = layer.begin(draw(5, 16))
    with pytest.raises(MoeCommError, match="once, after"):
        call.result()
    call.compute()
    assert torch.equal(call.result(), layer(draw(5, 16)))
    with pytest.raises(MoeCommError, match="once, after"):
        call.result()


@pytest.mark.parametrize("config", [MoEConfig, TransformerConfig])
def test_type_hints_of_configurations_can_be_read(config: type) -> None:
    assert get_type_hints(config).keys() == {field.name for field in fields(config)}


def test_modules_that_do_not_match_raise() -> None:
    dispatcher = make_dispatcher(4)
    with pytest.raises(ConfigError, match="router chooses among 5"):
        MoELayer(Router(8, RouterConfig(5, 2)), Experts(4, 8, 4), dispatcher)
    with pytest.raises(ConfigError, match="weights are for 3"):
        MoELayer(Router(8, RouterConfig(4, 2)), Experts(3, 8, 4), dispatcher)
    with pytest.raises(ConfigError, match="real experts, must be at least 1"):
        RouterConfig(0, 2, zero_experts=ZeroExperts(3, 1))
    with pytest.raises(ConfigError, match="shared_gate"):
        MoEConfig(8, 4, RouterConfig(4, 2), shared_gate=True)


def test_state_dict_has_readable_keys_and_round_trips() -> None:
    layer = MoELayer.build(SMALL, seed=1)
    keys = {"router.weight", "experts.w13", "experts.w2", "shared.w13", "shared.w2", "shared.gate"}
    assert set(layer.state_dict()) == keys
    other = MoELayer.build(SMALL, seed=2)
    load_state_dict(other, gather_state_dict(layer))
    assert torch.equal(other(draw(9, 16)), layer(draw(9, 16)))
    holder = nn.Sequential(nn.Linear(16, 16), layer)
    assert {"1.experts.w13", "0.weight"} <= set(gather_state_dict(holder))
    with pytest.raises(InputError, match=r"experts.w13 has shape \(5, .*expects \(6, "):
        load_state_dict(layer, {**layer.state_dict(), "experts.w13": layer.experts.w13[:5]})
    assert torch.equal(single_rank_copy(layer)(draw(9, 16)), layer(draw(9, 16)))


def test_build_takes_the_seed_from_torchs_generator() -> None:
    torch.manual_seed(5)
    first = MoELayer.build(SMALL)
    torch.manual_seed(5)
    second = MoELayer.build(SMALL)
    assert torch.equal(first.experts.w13, second.experts.w13) and torch.equal(first.router.weight, second.router.weight)


def test_a_layer_can_be_built_on_the_meta_device() -> None:
    with torch.device("meta"):
        layer = MoELayer.build(SMALL)
    assert all(parameter.device.type == "meta" for parameter in layer.parameters())
    filled = layer.to_empty(device="cpu")
    filled.reset_parameters(3)
    assert not filled.router.take_load().any()
    assert torch.equal(filled(draw(5, 16)), MoELayer.build(SMALL, seed=3)(draw(5, 16)))


def test_state_keys_omit_checkpointing_wrappers_and_list_shared_layers_once() -> None:
    layer = MoELayer.build(SMALL, seed=0)
    model = nn.ModuleList([checkpoint_wrapper(layer), layer])
    weights = {"0.experts.w13", "0.experts.w2", "1.experts.w13", "1.experts.w2"}
    assert weights <= set(moe_comm.state_dict(model))


def test_a_deep_copy_has_its_own_weights_and_the_same_dispatcher() -> None:
    layer = MoELayer.build(SMALL, seed=0)
    copied = copy.deepcopy(layer)
    assert copied.dispatcher is layer.dispatcher and torch.equal(copied(draw(5, 16)), layer(draw(5, 16)))
    copied.experts.w2.data.zero_()
    assert layer.experts.w2.any()


def test_inference_stores_nothing_for_backward() -> None:
    layer = MoELayer.build(SMALL, seed=0)
    with torch.no_grad():
        assert not layer(draw(5, 16)).requires_grad
    with torch.inference_mode():
        assert layer(draw(5, 16)).shape == (5, 16)


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "clamped_swiglu"])
def test_shared_expert_matches_its_formula(activation: str) -> None:
    shared = SharedExpert(16, 8, activation, gate=True)
    x = draw(7, 16)
    out = shared.activation.fn(x @ shared.w13.t()) @ shared.w2.t()
    assert shared.gate is not None
    torch.testing.assert_close(shared(x), torch.sigmoid(x @ shared.gate.t()) * out)
