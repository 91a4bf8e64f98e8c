"""Recomputation reduces stored activations and changes no bit of a loss, a gradient or a counter."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moe_comm.layers.parallel.recompute import recomputed, recomputed_block, selective_recompute
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import ModelPlan, Transformer
from moe_comm.layers.transformer.shape import Recompute
from moe_comm.topology import ParallelConfig, ParallelMesh
from tests.layers.tiny import BY_WEIGHT, LATENT, TINY, batch, own
from tests.pool import RankPool
from tests.support.activation_memory import activation_bytes

MODES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class RunResult:
    """Results of one run: loss, gradients, counted and dropped slots, auxiliary losses, and dispatcher operations."""

    loss: Tensor
    grads: dict[str, Tensor]
    counted: list[Tensor]
    dropped: list[int]
    aux: list[dict[str, Tensor]]
    operations: int


def run(
    config: TransformerConfig,
    recompute: Recompute,
    mesh: ParallelMesh | None = None,
    dtype: torch.dtype = torch.float32,
) -> RunResult:
    base = ModelPlan(recompute=recompute, dtype=dtype)
    plan = base if mesh is None else ModelPlan.of(mesh, recompute=recompute, dtype=dtype)
    model = Transformer(config, plan)
    initialize(model, seed=3)
    ids, targets, documents = (own(t, plan) for t in batch(True))
    assert ids is not None and targets is not None
    before = sum(layer.dispatcher.num_calls for layer in model.moe_layers())
    loss = model.loss(model(ids, documents=documents), targets)
    loss.backward()
    layers = list(model.moe_layers())
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(grads) == len(list(model.parameters()))
    return RunResult(
        loss.detach(),
        grads,
        [layer.router.load_E for layer in layers],
        [int(layer.dropped_total) for layer in layers],
        [layer.router.losses for layer in layers],
        sum(layer.dispatcher.num_calls for layer in layers) - before,
    )


def work(rank: int, world: int, arg: tuple[TransformerConfig, ParallelConfig, Recompute]) -> RunResult:
    config, mapping, recompute = arg
    return run(config, recompute, ParallelMesh(mapping))


def assert_equal(result: RunResult, expected: RunResult) -> None:
    assert torch.equal(result.loss, expected.loss)
    assert result.grads.keys() == expected.grads.keys()
    assert [name for name, grad in result.grads.items() if not torch.equal(grad, expected.grads[name])] == []
    assert all(torch.equal(a, b) for a, b in zip(result.counted, expected.counted, strict=True))
    assert result.dropped == expected.dropped
    assert result.aux == expected.aux


@pytest.mark.parametrize("config", [TINY, LATENT, replace(BY_WEIGHT, parallel_block=True)], ids=["gqa", "mla", "drops"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_losses_gradients_and_counters_have_the_same_bits(config: TransformerConfig, recompute: Recompute) -> None:
    assert_equal(run(config, recompute), run(config, "none"))


def test_bf16_has_the_same_bits() -> None:
    expected = run(TINY, "none", dtype=torch.bfloat16)
    for recompute in ("selective", "full"):
        assert_equal(run(TINY, recompute, dtype=torch.bfloat16), expected)


@pytest.mark.parametrize("mapping", [ParallelConfig(tp=2, ep=2), ParallelConfig(cp=2, etp=2)], ids=str)
def test_several_ranks_have_the_same_bits_and_selective_repeats_no_forward_operation(
    pool2: RankPool, mapping: ParallelConfig
) -> None:
    by_mode = {mode: pool2.run(work, (BY_WEIGHT, mapping, mode)) for mode in MODES}
    for mode in ("selective", "full"):
        for actual, expected in zip(by_mode[mode], by_mode["none"], strict=True):
            assert_equal(actual, expected)
    layers = len(BY_WEIGHT.moe_layers)
    # dispatch and combine, each forward and backward: routing weights, and tokens for gradients of weights, are sent
    # with the gradients of outputs. Full recomputation repeats both forwards.
    assert {mode: actual[0].operations for mode, actual in by_mode.items()} == {
        "none": 4 * layers,
        "selective": 4 * layers,
        "full": 6 * layers,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [TINY, LATENT, replace(TINY, parallel_block=True)], ids=["gqa", "mla", "parallel"])
def test_each_mode_stores_less_than_the_previous_one(config: TransformerConfig, dtype: torch.dtype) -> None:
    ids, _, _ = batch(False)
    stored_bytes = []
    for recompute in MODES:
        model = Transformer(config, ModelPlan(recompute=recompute, dtype=dtype))
        initialize(model, seed=3)
        stored_bytes.append(activation_bytes(lambda: model(ids), [*model.parameters(), *model.buffers(), ids]))  # noqa: B023
    none, selective, full = stored_bytes
    tokens = ids.numel() * config.hidden * dtype.itemsize
    norms = config.layers * (1 if config.parallel_block else 2)
    # At least the output of a norm, and the activations of the dense and shared blocks.
    assert none - selective >= norms * tokens
    # One input per layer remains, and the tensors that the final norm saves.
    assert config.layers * tokens <= full < config.layers * tokens + 8 * tokens * (4 / dtype.itemsize)
    assert full < selective


def test_the_measured_bytes_are_those_that_autograd_stores() -> None:
    x = torch.randn(16, 32, requires_grad=True)
    weight = torch.randn(64, 32, requires_grad=True)

    def saves_three() -> Tensor:
        h = x @ weight.t()  # saves x and weight
        return h.sin().cos()  # saves both inputs, [16, 64] each, and returns a third tensor

    assert activation_bytes(saves_three, [x, weight]) == 2 * 16 * 64 * 4 + 16 * 64 * 4
    with torch.no_grad():
        assert activation_bytes(saves_three, [x, weight]) == 16 * 64 * 4


class Calls:
    """Counts how often a function runs."""

    def __init__(self, fn: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        self.count = 0
        self.fn: Callable[[Tensor], Tensor] = fn

    def __call__(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.fn(x)


def test_a_value_is_recomputed_once_per_backward_for_all_its_uses() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    double = Calls(lambda x: 2 * x)
    with selective_recompute():
        y = recomputed(double, x)
        loss = torch.stack([(y @ w).sin().sum() for w in weights]).sum()
    del y
    assert double.count == 1
    loss.backward(retain_graph=True)
    assert double.count == 2
    expected = [w.grad.clone() for w in weights if w.grad is not None]
    first = x.grad.clone() if x.grad is not None else None
    for tensor in (x, *weights):
        tensor.grad = None
    # A split backward, as in zero-bubble schedules: gradient of the input, then of the weights.
    (grad_x,) = torch.autograd.grad(loss, x, retain_graph=True)
    grads = torch.autograd.grad(loss, weights)
    assert first is not None and torch.equal(grad_x, first)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_inputs_are_freed_after_backward_without_a_garbage_collection() -> None:
    """Training runs collect garbage every ``run.gc_every`` steps only."""
    weight = torch.randn(8, 8, requires_grad=True)
    inputs = []
    with selective_recompute():
        x = torch.randn(4, 8, requires_grad=True) @ weight
        inputs.append(weakref.ref(x.untyped_storage()))
        y = recomputed(torch.sin, x) @ weight
    del x
    enabled = gc.isenabled()
    gc.disable()
    try:
        y.sum().backward()
        del y
        assert inputs[0]() is None
    finally:
        if enabled:
            gc.enable()


def test_a_chain_of_values_stores_its_first_input_only() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    weight = torch.randn(64, 64, requires_grad=True)

    def chain() -> Tensor:
        y = recomputed(lambda x: x * 2, x)
        z = recomputed(lambda y: y + 1, y)
        return ((y @ weight) + (z.view(32, 128)[:, 64:] @ weight).repeat(2, 1)).sum()

    def chain_with_recompute() -> Tensor:
        with selective_recompute():
            return chain()

    tensor_bytes = 64 * 64 * 4
    assert activation_bytes(chain, [x, weight]) >= 2 * tensor_bytes
    assert activation_bytes(chain_with_recompute, [x, weight]) < tensor_bytes
    grads = []
    for fn in (chain, chain_with_recompute):
        fn().backward()
        assert x.grad is not None and weight.grad is not None
        grads.append((x.grad, weight.grad))
        x.grad, weight.grad = None, None
    (a, b), (c, d) = grads
    assert torch.equal(a, c) and torch.equal(b, d)


def test_functions_of_several_operators_store_no_intermediate() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    weight = torch.randn(64, 64, requires_grad=True)

    def steps(x: Tensor) -> Tensor:
        return x.sin().exp().tanh()

    def steps_with_recompute() -> Tensor:
        with selective_recompute():
            return (recomputed_block(steps, x) @ weight).sum()

    assert activation_bytes(steps_with_recompute, [x, weight]) < 64 * 64 * 4
    (actual,), (expected,) = (
        torch.autograd.grad(loss, x) for loss in (steps_with_recompute(), (steps(x) @ weight).sum())
    )
    assert torch.equal(actual, expected)


def test_functions_are_called_directly_outside_of_a_recompute_scope_and_without_gradients() -> None:
    x, counted = torch.randn(4), Calls()
    assert torch.equal(recomputed(counted, x), x.tanh()) and torch.equal(recomputed_block(counted, x), x.tanh())
    with selective_recompute(), torch.no_grad():
        assert torch.equal(recomputed(counted, x.requires_grad_()), x.tanh())
    assert counted.count == 3


def test_an_exception_ends_the_recompute_scope() -> None:
    with pytest.raises(ZeroDivisionError), selective_recompute():
        raise ZeroDivisionError
    x = torch.randn(4, requires_grad=True)
    counted = Calls()
    recomputed(counted, x).sum().backward()
    assert counted.count == 1


@pytest.mark.parametrize("recompute", MODES)
def test_evaluation_does_not_count_router_loads(recompute: Recompute) -> None:
    model = Transformer(TINY, ModelPlan(recompute=recompute)).eval()
    initialize(model, seed=3)
    with torch.no_grad():
        model(batch(False)[0])
    assert all(not layer.router.load_E.any() for layer in model.moe_layers())
