"""dispatch_matmul, matmul_combine and the pipelined layer have the bits of serial execution."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from moe_comm.dispatch import DispatchOptions
from moe_comm.dispatch.backends.all_gather import AllGatherDispatcher
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.slots.capacity import Capacity
from moe_comm.dispatch.wire_dtype import WireDtypes
from moe_comm.errors import ConfigError, PeerDied, RankMismatch
from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.layers.moe.config import MoEConfig, MoEGroups
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.router import RouterConfig, ZeroExperts
from moe_comm.overlap.executors.choice import dispatch_rows
from moe_comm.overlap.expert_operators import dispatch_matmul
from moe_comm.overlap.options import Overlap
from moe_comm.topology import ExpertPlacement
from tests.layers.reference import draw
from tests.pool import RankPool, on_ranks

D, F = 16, 32
CHUNKS = (1, 2, 3, 8)
ROUTINGS = ("random", "one expert", "no tokens on rank 0", "dropped", "few")


def _routing(kind: str, rank: int, experts: int, top_k: int) -> Tensor:
    """Return [T, K] ids; T differs between ranks."""
    tokens = 0 if kind == "no tokens on rank 0" and rank == 0 else 3 if kind == "few" else 37 + 5 * rank
    generator = torch.Generator().manual_seed(7 * rank + len(kind))
    if not tokens:
        return torch.empty(0, top_k, dtype=torch.int64)
    if kind == "one expert":
        return torch.full((tokens, 1), experts - 1).repeat(1, top_k)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    if kind == "dropped":
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
    return ids


def _dispatcher(rank: int, world: int, experts: int, wire_dtypes: WireDtypes | None = None) -> AllToAllDispatcher:
    group = dist.group.WORLD
    assert group is not None
    options = DispatchOptions(timeout_s=60, **({} if wire_dtypes is None else {"wire_dtypes": wire_dtypes}))
    return AllToAllDispatcher(ExpertPlacement.of(experts, world), group, rank, options)


def _leaves(
    rank: int, local: int, ids: Tensor, dtype: torch.dtype, gated: bool = True, hidden: int = D, ffn: int = F
) -> dict[str, Tensor]:
    (tokens, top_k), wide = ids.shape, 2 * ffn if gated else ffn
    return {
        "x": draw(tokens, hidden, seed=rank, dtype=dtype),
        "weights": torch.softmax(draw(tokens, top_k, seed=20 + rank), -1),
        "w13": draw(local, wide, hidden, seed=40 + rank, dtype=dtype),
        "w2": draw(local, hidden, ffn, seed=60 + rank, dtype=dtype),
        "b13": draw(local, wide, seed=80 + rank, dtype=dtype),
        "b2": draw(local, hidden, seed=90 + rank, dtype=dtype),
    }


def _gradients(leaves: dict[str, Tensor], forward: Any, grad: Tensor) -> dict[str, Tensor]:
    inputs = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    y = forward(**inputs)
    y.backward(grad)
    return {"y": y.detach()} | {name: value.grad for name, value in inputs.items() if value.grad is not None}


def _same(actual: dict[str, Any], expected: dict[str, Tensor], where: str) -> None:
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), f"{name} differs {where}"


def _compare_with_serial(rank: int, world: int, arg: tuple[str, torch.dtype, int, WireDtypes | None, int, int]) -> None:
    kind, dtype, experts, wire_dtypes, hidden, ffn = arg
    dispatcher = _dispatcher(rank, world, experts, wire_dtypes)
    ids = _routing(kind, rank, experts, min(3, experts))
    leaves = _leaves(rank, len(dispatcher.local_experts), ids, dtype, hidden=hidden, ffn=ffn)
    grad = draw(ids.shape[0], hidden, seed=99 + rank, dtype=dtype)

    expected = _gradients(leaves, partial(_overlapped, dispatcher, ids, None, False), grad)
    for chunks in CHUNKS:
        for recompute in (False, True):
            overlapped = partial(_overlapped, dispatcher, ids, chunks, recompute)
            _same(_gradients(leaves, overlapped, grad), expected, f"with {chunks} chunks, recompute {recompute}")
    with torch.no_grad():
        assert torch.equal(overlapped(**leaves), expected["y"])


def _overlapped(
    dispatcher: AllToAllDispatcher,
    ids: Tensor,
    chunks: int | None,
    recompute: bool,
    x: Tensor,
    weights: Tensor,
    **w: Tensor,
) -> Tensor:
    call = dispatch_rows(dispatcher, x, ids, weights, None if chunks is None else Overlap(chunks, 1))
    mlp = ExpertMLP((w["w13"], w["w2"], w["b13"], w["b2"]), activation_of("swiglu"), recompute)
    return call.combine(call.compute(call.rows, call.handle.rows_per_expert, mlp))


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("world", [2, 4])
def test_the_pipelined_layer_has_the_bits_of_the_serial_one(
    world: int, kind: str, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    pool.run(_compare_with_serial, (kind, torch.float32, 7, None, D, F))


@pytest.mark.parametrize(
    "arg",
    [
        ("random", torch.bfloat16, 4, None, D, F),
        ("random", torch.float32, 2, None, D, F),
        ("random", torch.float32, 1, None, D, F),
        ("random", torch.float32, 6, WireDtypes("fp8_block", "bf16", "bf16", "fp8_token"), D, F),
        ("random", torch.float32, 5, None, 20, 24),
    ],
    ids=["bf16", "one expert per rank", "a rank without experts", "wire dtypes", "rows not aligned to cache lines"],
)
def test_the_bits_are_equal_in_other_dtypes_placements_and_wire_dtypes(arg: Any, pool2: RankPool) -> None:
    pool2.run(_compare_with_serial, arg)


def _compare_partial_gradients(rank: int, world: int, _: Any) -> None:
    """Only some inputs need gradients, the same on every rank; each gradient is also computed alone."""
    dispatcher = _dispatcher(rank, world, 4)
    ids = _routing("random", rank, 4, 2)
    leaves = _leaves(rank, 2, ids, torch.float32)
    grad = draw(ids.shape[0], D, seed=3)
    overlapped = partial(_overlapped, dispatcher, ids, 2, False)
    expected = _gradients(leaves, overlapped, grad)
    for name in leaves:
        inputs = {other: value.clone().requires_grad_(other == name) for other, value in leaves.items()}
        overlapped(**inputs).backward(grad)
        grad_of_input = inputs[name].grad
        assert grad_of_input is not None
        assert torch.equal(grad_of_input, expected[name]), name
    inputs = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    y = overlapped(**inputs)
    for _ in range(2):
        again = torch.autograd.grad(y, list(inputs.values()), grad, retain_graph=True)
        assert all(torch.equal(a, expected[name]) for a, name in zip(again, inputs, strict=True))


def test_each_gradient_can_be_computed_alone_and_twice(pool2: RankPool) -> None:
    pool2.run(_compare_partial_gradients, None)


@on_ranks(2)
def test_ranks_that_need_different_gradients_get_an_error(rank: int, world: int) -> None:
    """Only one rank needs the gradient of its routing weights."""
    dispatcher = _dispatcher(rank, world, 4)
    ids = _routing("random", rank, 4, 2)
    leaves = _leaves(rank, 2, ids, torch.float32)
    weights = leaves["weights"].requires_grad_(rank == 0)
    with pytest.raises(RankMismatch, match="whether routing weights require gradients"):
        dispatch_rows(dispatcher, leaves["x"].requires_grad_(), ids, weights, Overlap())


@on_ranks(2)
def test_backward_uses_the_routing_weights_of_forward(rank: int, world: int) -> None:
    """A change of the routing weights in place after forward does not affect backward."""
    dispatcher = _dispatcher(rank, world, 4)
    ids = _routing("random", rank, 4, 2)
    leaves = _leaves(rank, 2, ids, torch.float32)
    grads = []
    for factor in (1.0, 3.0):
        x, weights = leaves["x"].clone().requires_grad_(), leaves["weights"].clone()
        y = _overlapped(
            dispatcher, ids, 2, False, x, weights, **{name: leaves[name] for name in ("w13", "w2", "b13", "b2")}
        )
        weights.mul_(factor)
        y.backward(torch.ones_like(y))
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])


@on_ranks(2)
def test_a_dispatcher_that_cannot_overlap_is_refused(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    dispatcher = AllGatherDispatcher(ExpertPlacement.of(4, world), group, rank)
    with pytest.raises(ConfigError, match="needs the dispatcher all_to_all, shared_memory or peer_to_peer"):
        dispatch_matmul(dispatcher, torch.zeros(3, D), torch.zeros(3, 1, dtype=torch.int64), torch.zeros(2, F, D))


@on_ranks(2)
def test_weight_gradients_can_be_computed_later(rank: int, world: int) -> None:
    """Compute the gradient of the rows first and those of the weights later, as zero-bubble schedules do."""
    dispatcher = _dispatcher(rank, world, 4)
    ids = _routing("random", rank, 4, 2)
    leaves = _leaves(rank, 2, ids, torch.float32)
    grad = draw(ids.shape[0], D, seed=3)
    expected = _gradients(leaves, partial(_overlapped, dispatcher, ids, 3, False), grad)
    inputs = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    y = _overlapped(dispatcher, ids, 3, False, **inputs)
    weights = [inputs[name] for name in ("w13", "w2", "b13", "b2")]
    (x_grad,), groups = stage_backward_input([y], [grad], [inputs["x"]], iter(weights))
    assert x_grad is not None
    assert torch.equal(x_grad, expected["x"])
    assert all(w.grad is None for w in weights)
    stage_backward_weight(iter(weights), groups)
    _same({name: inputs[name].grad for name in ("w13", "w2", "b13", "b2")}, expected, "later")


def _exit_on_rank_1(rank: int, world: int, when: str) -> None:
    dispatcher = _dispatcher(rank, world, 6)
    ids = _routing("random", rank, 6, 2)
    leaves = _leaves(rank, 2, ids, torch.float32)
    call = dispatch_rows(dispatcher, leaves["x"], ids, leaves["weights"], Overlap(2, 1))
    if rank == 1 and when == "before the others have its rows":
        os._exit(3)
    mlp = ExpertMLP((leaves["w13"], leaves["w2"], None, None), activation_of("swiglu"))
    if rank == 1:
        dispatcher.channel.start_all_to_all = _exit  # type: ignore[method-assign]
        call.compute(call.rows, call.handle.rows_per_expert, mlp)
    with pytest.raises(PeerDied, match="rank 1"):
        call.combine(call.compute(call.rows, call.handle.rows_per_expert, mlp))


def _exit(*_: Any) -> None:
    os._exit(3)


@pytest.mark.parametrize("when", ["before the others have its rows", "before the others have its results"])
def test_an_exited_rank_raises_on_the_others(when: str) -> None:
    with RankPool(3) as pool:
        pool.run(_exit_on_rank_1, when, expect_dead={1})


MODULES = {
    "a shared expert": MoEConfig(D, F, RouterConfig(6, 2), shared_ffn=24, shared_gate=True),
    "zero experts": MoEConfig(D, F, RouterConfig(6, 3, zero_experts=ZeroExperts(identity=1, zero=1))),
    "capacity": MoEConfig(D, F, RouterConfig(6, 2), capacity=Capacity(1.0), expert_bias=True),
    "expert slices": MoEConfig(D, F, RouterConfig(6, 2)),
    "recompute": MoEConfig(D, F, RouterConfig(6, 2), recompute=True),
}


@on_ranks(4)
@pytest.mark.parametrize("name", MODULES)
def test_overlap_changes_no_bit_of_a_layer(rank: int, name: str) -> None:
    config = MODULES[name]
    results = []
    for overlap in (None, Overlap(3, 1), Overlap("auto")):
        layer = MoELayer.build(
            config,
            MoEGroups(dist.group.WORLD, 2 if name == "expert slices" else 1),
            backend="all_to_all",
            seed=5,
            overlap=overlap,
        )
        x = draw(2, 9 + rank, D, seed=rank).requires_grad_()
        y = layer(x)
        y.backward(draw(2, 9 + rank, D, seed=70 + rank))
        grads = {key: p.grad for key, p in layer.named_parameters() if p.grad is not None}
        results.append({"y": y.detach(), "x": x.grad, **grads})
    plain, *overlapped = results
    for result in overlapped:
        _same(result, plain, f"with {name}")
