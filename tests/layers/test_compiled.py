"""``torch.compile(fullgraph=True)`` of models with layers has the bits of eager; collectives run inside operators."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moe_comm
from moe_comm.errors import InputError, RoutingError
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig
from moe_comm.layers.moe import compiled
from moe_comm.layers.moe.router import Routing
from tests.layers.reference import draw
from tests.pool import on_ranks

CONFIG = MoEConfig(16, 12, RouterConfig(4, 2, balance_loss=0.01), shared_ffn=8)


class Block(nn.Module):
    def __init__(self, recompute: bool, group: Any = None, **settings: Any) -> None:
        super().__init__()
        self.recompute, self.norm = recompute, nn.LayerNorm(16)
        self.layers = nn.ModuleList(MoELayer.build(CONFIG, group, seed=seed, **settings) for seed in (0, 1))

    def one(self, layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        return x + layer(self.norm(x), mask=mask)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(self.one, layer, x, mask, use_reentrant=False)
            else:
                x = self.one(layer, x, mask)
        return x


def step(model: nn.Module, block: nn.Module, x: Tensor, autocast: bool = False, **inputs: Any) -> list[Tensor]:
    """Return output, gradients and loads."""
    block.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x, **inputs)
        y.float().square().sum().backward()
        model(x[:, :4]).float().sum().backward()  # gradients exist when it is compiled
    assert x.grad is not None
    loads = [layer.router.take_load() for layer in block.layers]
    return [y.detach(), x.grad, *(p.grad for p in block.parameters() if p.grad is not None), *loads]


def check_blocks(
    recompute: bool, autocast: bool, group: Any = None, batches: Sequence[int] = (5, 7), **settings: Any
) -> None:
    torch._dynamo.reset()
    block = Block(recompute, group, **settings)
    model = torch.compile(block, fullgraph=True, backend="aot_eager")
    for tokens in batches:
        mask = torch.rand(2, tokens, generator=torch.Generator().manual_seed(0)) < 0.7
        for inputs in ({}, {"mask": mask}) if len(batches) > 1 else ({"mask": mask},):
            x = draw(2, tokens, 16, seed=tokens)
            eager, actual = (step(one, block, x, autocast, **inputs) for one in (block, model))
            assert len(eager) == len(actual) and all(map(torch.equal, eager, actual))
    assert not compiled._GRAPHS


@pytest.mark.parametrize(("recompute", "autocast"), [(False, False), (True, True)])
def test_a_model_is_one_graph_with_the_bits_of_eager(recompute: bool, autocast: bool) -> None:
    check_blocks(recompute, autocast)


@on_ranks(2)
@pytest.mark.parametrize("backend", ["shared_memory", pytest.param("all_to_all", marks=pytest.mark.slow)])
def test_ranks_have_the_bits_of_eager_and_raise_the_same_errors(backend: str) -> None:
    check_blocks(backend == "all_to_all", False, dist.group.WORLD, (5,), backend=backend)
    layer = MoELayer.build(CONFIG, dist.group.WORLD, backend=backend, seed=0)
    model = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, weights_TK = draw(3, 16), torch.full((3, 2), 0.5).requires_grad_()
    ids_TK = torch.tensor([[0, 1], [2, 3], [1, 2]])
    results = []
    for one in (layer, model):
        y = one(x, Routing(ids_TK, weights_TK))
        results.append((y, *torch.autograd.grad(y.sum(), (weights_TK, layer.experts.w2))))
    assert all(map(torch.equal, *results))
    ids_TK[dist.get_rank(), 0] = 9 if dist.get_rank() else 0
    with pytest.raises(RoutingError, match="expert id 9"):
        model(x, Routing(ids_TK, weights_TK))
    model(x)  # the group can be used again


BUCKET = 1024
"""Bytes of the parameters of a bucket of DDP. The compiler splits graphs where a bucket ends."""
graphs: list[Any] = []
"""Graphs that ``backend`` has compiled."""


def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    graphs.append(graph)
    return aot_eager(graph, inputs)


class Residual(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 16)
        self.moe = MoELayer.build(CONFIG, dist.group.WORLD, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.moe(self.norm(x)))  # type: ignore[no-any-return]


def wrapped(how: str, compiles: bool) -> tuple[nn.Module, nn.Module]:
    """Return a model, and what to call: the model with data parallelism, compiled or not."""
    torch.manual_seed(0)
    model = nn.Sequential(Residual(0), Residual(1))
    if how in ("DDP of a compiled model", "compiled DDP"):
        inner: nn.Module = moe_comm.prepare_ddp(model)
        if compiles and how == "DDP of a compiled model":
            inner = torch.compile(inner, fullgraph=True, backend=backend)  # type: ignore[assignment]
        ddp = DistributedDataParallel(inner, bucket_cap_mb=BUCKET / 2**20)
        compiles = compiles and how == "compiled DDP"
        return model, torch.compile(ddp, backend=backend) if compiles else ddp  # type: ignore[return-value]
    moe_comm.prepare_fsdp(model)
    for block in model:
        if compiles and how == "FSDP2 of compiled blocks":
            block.compile(backend=backend)
        fully_shard(block)
    fully_shard(model)
    compiles = compiles and how == "compiled FSDP2"
    return model, torch.compile(model, backend=backend) if compiles else model  # type: ignore[return-value]


def train(model: nn.Module, forward: nn.Module) -> list[Tensor]:
    """Return the losses and the parameters after two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        loss = forward(draw(6, 16, seed=10 * step + dist.get_rank())).square().mean()
        loss.backward()
        moe_comm.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters())]


@on_ranks(2)
@pytest.mark.parametrize(
    ("how", "number"),
    [("DDP of a compiled model", 3), ("compiled DDP", 4), ("FSDP2 of compiled blocks", 4), ("compiled FSDP2", 4)],
)
def test_data_parallel_training_has_the_bits_of_eager(how: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", BUCKET)  # not an argument of DDP
    eager = train(*wrapped(how, False))
    graphs.clear()
    actual = train(*wrapped(how, True))
    assert len(eager) == len(actual) and all(map(torch.equal, eager, actual))
    assert len(graphs) == number, (how, len(graphs))


def test_layers_and_their_copies_share_a_graph_and_keep_none_of_their_own() -> None:
    torch._dynamo.reset()
    counters.clear()
    layers = nn.ModuleList(MoELayer.build(CONFIG, seed=seed) for seed in range(9))  # more than the limit of recompiles
    layers.append(copy.deepcopy(layers[0]))
    with torch.no_grad():
        layers[-1].experts.w2.mul_(2)
    x = draw(5, 16)
    for layer in layers:
        model = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(model(x), layer(x))
    assert counters["stats"]["unique_graphs"] == 1
    y = model(x)
    assert len(compiled._GRAPHS) == 1
    del y  # without a backward pass
    assert not compiled._GRAPHS
    layers.requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(model(x), layers[-1](x))
    assert not compiled._GRAPHS


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = MoELayer.build(CONFIG, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2 * self.layer(x)


def test_equal_calls_are_not_merged() -> None:
    torch._dynamo.reset()
    twice, results = Twice(), []
    for one in (twice, torch.compile(twice, fullgraph=True, backend="aot_eager")):
        twice.zero_grad(set_to_none=True)
        y = one(draw(5, 16))
        y.sum().backward()
        results.append([y, twice.layer.experts.w2.grad, twice.layer.router.take_load()])
    assert all(map(torch.equal, *results))


def test_a_router_without_use_has_no_gradient() -> None:
    torch._dynamo.reset()
    layer = MoELayer.build(CONFIG, seed=0)
    routing = Routing(torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5))
    torch.compile(layer, fullgraph=True, backend="aot_eager")(draw(5, 16), routing).sum().backward()
    assert all(p.grad is None for p in layer.router.parameters())
    assert layer.experts.w2.grad is not None


def test_other_parameters_and_exports_are_errors() -> None:
    torch._dynamo.reset()
    layer, other = (MoELayer.build(CONFIG, seed=seed) for seed in (0, 1))

    def with_other(x: Tensor, parameters: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(layer, parameters, (x,))

    with pytest.raises(InputError, match="functional_call"):
        torch.compile(with_other, fullgraph=True, backend="aot_eager")(draw(5, 16), dict(other.named_parameters()))
    with pytest.raises(Exception, match="exported program cannot hold"):
        torch.export.export(layer, (draw(5, 16),), strict=True)


def test_hooks_that_copy_saved_tensors_are_an_error() -> None:
    torch._dynamo.reset()
    layer = MoELayer.build(CONFIG, seed=0)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = torch.compile(layer, fullgraph=True, backend="aot_eager")(draw(5, 16))
    with pytest.raises(InputError, match="save_on_cpu"):
        y.sum().backward()
