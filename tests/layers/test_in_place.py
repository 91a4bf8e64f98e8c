"""Experts on the CPU that read tokens in place: no rows are kept, and the bits are those of dispatched rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from moe_comm import prepare_fsdp
from moe_comm.dispatch.expert_call import ExpertCall
from moe_comm.dispatch.slots.capacity import Capacity
from moe_comm.errors import MoeCommError
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig
from moe_comm.layers.moe.experts import Experts
from moe_comm.layers.moe.router import Routing, ZeroExperts
from moe_comm.overlap.options import Overlap
from moe_comm.runtime.event_reader import read_spans
from moe_comm.runtime.events import EVENTS
from tests.pool import on_ranks

HIDDEN, FFN, TOKENS = 24, 40, (9, 0, 13, 5)
CONFIG = MoEConfig(HIDDEN, FFN, RouterConfig(8, 3), expert_bias=True, shared_ffn=16)

Step = Callable[[MoELayer, Tensor], Tensor]


def build(group: Any, backend: str, config: MoEConfig = CONFIG, dtype: torch.dtype = torch.float32) -> MoELayer:
    layer = MoELayer.build(config, group, backend=backend, seed=4, dtype=dtype)
    nn.init.constant_(layer.experts.b13, 0.1)
    return layer


def step(layer: MoELayer, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    y.float().square().sum().backward()
    return y


def plain(grad: Tensor | None) -> Tensor | None:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def results(layer: MoELayer, rank: int, run: Step, requires_grad: bool = True) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS[rank], HIDDEN, generator=generator).to(layer.experts.w13.dtype).requires_grad_(requires_grad)
    y = run(layer, x)
    grads = {name: plain(parameter.grad) for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def freeze(*names: str) -> Step:
    def run(layer: MoELayer, x: Tensor) -> Tensor:
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not name.startswith(names))
        return step(layer, x)

    return run


def weights_only(layer: MoELayer, x: Tensor) -> Tensor:
    prepare_fsdp(layer)  # freezes the parameters of a rank without experts
    y: Tensor = layer(x)
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    for parameter, grad in zip(weights, torch.autograd.grad(y.square().sum(), weights), strict=True):
        parameter.grad = grad
    return y


def backward_hook(layer: MoELayer, x: Tensor) -> Tensor:
    layer.experts.register_full_backward_hook(lambda _, grads, __: (2 * grads[0], *grads[1:]))
    return step(layer, x)


def twice(layer: MoELayer, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    loss = y.square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return y


def in_halves(layer: MoELayer, x: Tensor) -> Tensor:
    """Compute the gradients of inputs and of weights in two passes, as some pipeline schedules do."""
    y: Tensor = layer(x)
    loss, weights = y.square().sum(), [parameter for parameter in layer.parameters() if parameter.requires_grad]
    (x.grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    for parameter, grad in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        parameter.grad = grad
    return y


def checkpointed(layer: MoELayer, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(layer, x, use_reentrant=False)
    y.square().sum().backward()
    return y


def offloaded(layer: MoELayer, x: Tensor) -> Tensor:
    with save_on_cpu():
        return step(layer, x)


def hooked_on_rank_0(layer: MoELayer, x: Tensor) -> Tensor:
    seen = []
    if dist.get_rank() == 0:
        layer.experts.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    y = step(layer, x)
    stats = layer.dispatch_stats
    assert stats is not None
    assert seen == ([] if dist.get_rank() else [(stats.received, HIDDEN)])
    return y


def outputs_replaced_on_rank_0(layer: MoELayer, x: Tensor) -> Tensor:
    if dist.get_rank() == 0:
        layer.experts.register_forward_hook(lambda _, __, out: 2 * out)
    return step(layer, x)


def fully_sharded(layer: MoELayer, x: Tensor) -> Tensor:
    """Run under FSDP2 hooks of the experts, which return aliases of their inputs."""
    prepare_fsdp(layer)
    return step(layer, x)


RUNS: dict[str, tuple[Step, MoEConfig]] = {
    "plain": (step, CONFIG),
    "recompute": (step, replace(CONFIG, recompute=True)),
    "frozen input weights": (freeze("experts.w13"), CONFIG),
    "frozen experts": (freeze("experts"), CONFIG),
    "frozen router": (freeze("router"), CONFIG),
    "two backward passes": (twice, CONFIG),
    "in halves": (in_halves, CONFIG),
    "checkpoint": (checkpointed, CONFIG),
    "offload": (offloaded, CONFIG),
    "hook": (hooked_on_rank_0, CONFIG),
    "outputs replaced": (outputs_replaced_on_rank_0, CONFIG),
    "FSDP2": (fully_sharded, CONFIG),
    "a rank without experts": (step, CONFIG),
    "a rank without experts, in halves": (in_halves, CONFIG),
    "a rank without experts, weights, FSDP2": (weights_only, CONFIG),
    "backward hook": (backward_hook, CONFIG),
}


@on_ranks(2, 4)
@pytest.mark.parametrize("name", RUNS)
def test_bits_are_those_of_dispatched_rows(rank: int, world: int, group: Any, name: str) -> None:
    run, config = RUNS[name]
    if name.startswith("a rank without experts"):
        config = replace(config, experts_per_rank=(0, 8) if world == 2 else (3, 0, 4, 1))
    in_place, sent = (results(build(group, backend, config), rank, run) for backend in ("shared_memory", "all_to_all"))
    assert in_place.keys() == sent.keys()
    different = []
    for key, value in in_place.items():
        other = sent[key]
        if (value is None) != (other is None) or (value is not None and not torch.equal(value, other)):
            different.append(key)
    # Gradients of replicated parameters are sums over this rank's tokens, in the same order.
    assert not different, different


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_and_tokens_without_gradient(rank: int, world: int, group: Any, dtype: torch.dtype) -> None:
    runs = [
        results(build(group, backend, dtype=dtype), rank, step, requires_grad=False)
        for backend in ("shared_memory", "all_to_all")
    ]
    assert [key for key, value in runs[0].items() if value is not None and not torch.equal(value, runs[1][key])] == []


@on_ranks(2)
@pytest.mark.parametrize("mode", ["plain", "checkpoint"])
def test_a_forward_pass_keeps_no_shared_memory(rank: int, world: int, group: Any, mode: str) -> None:
    layer = build(group, "shared_memory")
    heap = layer.dispatcher.heap  # type: ignore[attr-defined]
    before = heap.used
    y = results(layer, rank, lambda layer, x: layer(x) if mode == "plain" else checkpointed(layer, x))["y"]
    dist.barrier()  # the other rank has released this rank's tokens
    del y
    assert heap.used == before


def with_saved(layer: MoELayer, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the output of a layer, and the tensors that autograd saves."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y: Tensor = layer(x)
    return y, list(kept.values())


@on_ranks(2)
@pytest.mark.parametrize("overlap", [None, Overlap(2, 1, executor="pipelined")], ids=["serial", "pipelined"])
def test_saved_bytes_are_those_of_the_rows_that_autograd_keeps(
    rank: int, world: int, group: Any, overlap: Overlap | None
) -> None:
    for backend in ("all_to_all", "shared_memory"):
        layer = MoELayer.build(CONFIG, group, backend=backend, overlap=overlap, seed=4)
        for hooked in (False, True):
            x = torch.randn(TOKENS[0] + 2 * rank, HIDDEN, generator=torch.Generator().manual_seed(rank))
            y, kept = with_saved(layer, x.requires_grad_())
            stats = layer.dispatch_stats
            assert stats is not None and stats.received not in (9, 11)
            rows = [t for t in kept if t.shape[:1] == (stats.received,) and t.shape[1] in (HIDDEN, 2 * FFN)]
            assert layer.saved_bytes == sum(t.nbytes for t in rows) > 0
            columns = 2 * FFN + HIDDEN * ((overlap is not None or backend == "all_to_all") + (hooked and not overlap))
            assert layer.saved_bytes == stats.received * columns * 4
            y.sum().backward()
            layer.experts.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        layer(torch.randn(4, HIDDEN))
    assert layer.saved_bytes == 0


@pytest.mark.parametrize("change", ["hook", "subclass", "in place", "gradient"])
def test_changed_outputs_have_the_gradients_of_experts_that_compute_them(change: str) -> None:
    """The last layer of the other experts is doubled."""
    config = replace(CONFIG, shared_ffn=0)
    layer, other = (MoELayer.build(config, None, seed=4) for _ in range(2))
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    if change == "gradient":  # of the outputs; the weights of the router have the gradient of the outputs themselves
        layer.experts.register_forward_hook(lambda _, __, out: out.register_hook(lambda grad: 2 * grad) and None)
    elif change == "hook":
        layer.experts.register_forward_hook(lambda _, __, out: 2 * out)
    else:

        class Doubled(Experts):
            def forward(self, *args: Any) -> Tensor:
                out = super().forward(*args)
                return out * 2 if change == "subclass" else out.mul_(2)

        layer.experts.__class__ = Doubled
    with torch.no_grad():
        other.experts.w2.mul_(1 if change == "gradient" else 2)
    grads = []
    for one in (layer, other):
        leaf = x.clone().requires_grad_()
        y = one(leaf)
        y.square().sum().backward()
        grads.append({"y": y, "x": leaf.grad, **{name: p.grad for name, p in one.named_parameters()}})
    for name, value in grads[0].items():
        factor = 1.0
        if change == "gradient":
            factor = {"y": 1.0, "router.weight": 1.0}.get(name, 2.0)
            if name == "x":
                continue  # part of it is the router's
        elif name in ("experts.w2", "experts.b2"):
            factor = 2.0
        assert value is not None
        torch.testing.assert_close(value, factor * grads[1][name], rtol=1e-4, atol=1e-6, msg=name)


@on_ranks(2)
def test_invalid_ids_and_a_rank_with_another_setting_raise_on_every_rank(rank: int, world: int, group: Any) -> None:
    from moe_comm.errors import RankMismatch, RoutingError
    from moe_comm.layers.moe.router import Routing

    layer = build(group, "shared_memory")
    ids = torch.tensor([[0, 8 if rank else 1, 2]])
    with pytest.raises(RoutingError, match="expert id 8"):
        layer(torch.randn(1, HIDDEN), Routing(ids, torch.ones(1, 3)))
    x, dispatcher = torch.randn(4, HIDDEN), layer.dispatcher
    dispatch = dispatcher.dispatch if rank else dispatcher.dispatch_in_place
    with pytest.raises(RankMismatch, match="whether experts read tokens in place"):
        dispatch(x, torch.zeros(4, 3, dtype=torch.int64))
    assert layer(x).shape == x.shape


@on_ranks(2)
@pytest.mark.parametrize("what", ["tokens", "rows"])
def test_a_change_in_place_before_the_experts_read_raises(rank: int, world: int, group: Any, what: str) -> None:
    from moe_comm.errors import InputError, PeerRaised

    layer, x = build(group, "shared_memory"), torch.randn(4, HIDDEN)

    def change(_: Any, args: tuple[Any, ...]) -> None:
        args[0].mul_(0)

    with torch.no_grad():
        if what == "tokens":
            call = layer.begin(x)
            if not rank:
                x.zero_()
            with pytest.raises(PeerRaised if rank else InputError, match="in place"):  # noqa: PT012
                call.compute()
                call.result()
            return
        if not rank:
            layer.experts.register_forward_pre_hook(change)
        with pytest.raises(PeerRaised if rank else InputError, match="replaced or changed"):
            layer(x)


@on_ranks(2)
def test_a_change_in_place_before_backward_raises_on_every_rank(rank: int, world: int, group: Any) -> None:
    from moe_comm.errors import PeerRaised

    layer = build(group, "shared_memory")
    x = torch.ones(4, HIDDEN, requires_grad=True) * 1.0
    y = layer(x)
    if rank == 0:
        with torch.no_grad():
            x.mul_(2)
    with pytest.raises(PeerRaised if rank else RuntimeError, match="inplace operation"):
        y.sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("overlap", [None, Overlap(2, 1, executor="pipelined")], ids=["serial", "pipelined"])
def test_callers_may_change_ids_between_forward_and_backward(rank: int, world: int, overlap: Overlap | None) -> None:
    grads = []
    for changed in (False, True):
        layer = MoELayer.build(CONFIG, dist.group.WORLD, backend="shared_memory", seed=4, overlap=overlap)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(9, HIDDEN, generator=generator).requires_grad_()
        ids = torch.rand(9, 8, generator=generator).topk(3).indices
        weights = torch.rand(9, 3, generator=generator).requires_grad_()
        y: Tensor = layer(x, Routing(ids, weights))
        if changed:
            ids.copy_(ids.flip(0))
        y.square().sum().backward()
        grads.append([x.grad, weights.grad, layer.experts.w13.grad, layer.experts.w2.grad])
    assert all(torch.equal(expected, actual) for expected, actual in zip(*grads, strict=True))


def test_fp16_gradients_are_finite_where_weights_keep_them_small() -> None:
    layer = MoELayer.build(MoEConfig(16, 16, RouterConfig(4, 2)), backend="local", seed=4, dtype=torch.float16)
    with torch.no_grad():
        layer.experts.w2.mul_(100)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
    ids = torch.arange(16).view(8, 2) % 4
    y = layer(x, Routing(ids, torch.full((8, 2), 1e-3)))
    y.backward(torch.full_like(y, 8000.0))
    assert x.grad is not None and bool(x.grad.isfinite().all())


@on_ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls_without_gradients_have_the_bits_and_statistics_of_calls_with_them(
    rank: int, world: int, group: Any, dtype: torch.dtype
) -> None:
    limited = replace(CONFIG, router=RouterConfig(8, 3, zero_experts=ZeroExperts(2)), capacity=Capacity(1.0))
    for config in (CONFIG, limited):
        layer = build(group, "shared_memory", config, dtype)
        x = torch.randn(TOKENS[rank], HIDDEN, generator=torch.Generator().manual_seed(rank)).to(dtype)
        y, stats = layer(x), layer.dispatch_stats
        with torch.no_grad(), mock.patch.object(ExpertCall, "compute") as computed:
            assert torch.equal(layer(x), y)
            assert not computed.called
        again = layer.dispatch_stats
        assert (again.slots, again.sent, again.received) == (stats.slots, stats.sent, stats.received)
        assert again.dropped is None or torch.equal(again.dropped, stats.dropped)


def same_bits_in_one_call(layer: MoELayer, x: torch.Tensor) -> bool:
    y = layer(x)
    with torch.no_grad():
        return torch.equal(layer(x), y)


@on_ranks(4)
def test_calls_without_gradients_take_biases_that_are_copied_and_record_the_time_of_experts(
    rank: int, world: int, group: Any
) -> None:
    layer = build(group, "shared_memory")
    experts, x = layer.experts, torch.randn(5, HIDDEN)
    with torch.no_grad():
        for bias in (experts.b13, experts.b2):
            bias.normal_()
    bias = experts.b13.detach()
    for other in (torch._neg_view(bias), bias.t().contiguous().t(), bias[:1].expand_as(bias)):
        experts.b13 = torch.nn.Parameter(other)
        assert same_bits_in_one_call(layer, x)
    experts.b13 = torch.nn.Parameter(bias)
    before = max(span.index for span in read_spans(EVENTS.region))
    with torch.no_grad(), mock.patch.object(ExpertCall, "compute") as computed:
        layer(x)
        assert not computed.called
    assert [span.name for span in read_spans(EVENTS.region) if span.index > before] == [
        "dispatch",
        "experts",
        "combine",
    ]


@on_ranks(4)
def test_an_error_of_the_shared_expert_of_one_rank_is_raised_on_every_rank(rank: int, world: int, group: Any) -> None:
    layer = build(group, "shared_memory")
    x = torch.randn(5, HIDDEN)
    assert same_bits_in_one_call(layer, x)
    weight = layer.shared.w2
    if rank == 1:
        layer.shared.w2 = torch.nn.Parameter(weight[:, :5])
    with torch.no_grad(), pytest.raises((RuntimeError, MoeCommError)):
        layer(x)
    layer.shared.w2 = weight
    assert same_bits_in_one_call(layer, x)
