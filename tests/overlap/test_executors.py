"""The executors of a whole layer: which one is chosen, and that the results of all have the same bits."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from moe_comm.dispatch import DispatchOptions, make_dispatcher
from moe_comm.dispatch.backends.all_gather import AllGatherDispatcher
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.backends.native import SharedMemoryDispatcher
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.expert_call import ExpertCall
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.dispatch.wire_dtype import WireDtypes
from moe_comm.errors import ConfigError, MissingDependency, PeerRaised
from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.layers.moe.config import MoEConfig
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.router import RouterConfig
from moe_comm.overlap.executors.choice import dispatch_rows, explain_overlap
from moe_comm.overlap.executors.pipelined import PipelinedCall
from moe_comm.overlap.options import Overlap
from moe_comm.topology import ExpertPlacement
from tests.layers.reference import draw
from tests.overlap.test_experts import ROUTINGS, D, F, _gradients, _leaves, _routing, _same
from tests.pool import RankPool, on_ranks

pytest.importorskip("moe_comm._C", reason="the native core is not built")
WEIGHT_NAMES = ("w13", "w2", "b13", "b2")


def _peer_to_peer(rank: int, world: int, experts: int, **options: Any) -> PeerToPeerDispatcher:
    settings = DispatchOptions(timeout_s=60, peer_to_peer=PeerToPeerOptions(emulate=True), **options)
    return PeerToPeerDispatcher(ExpertPlacement.of(experts, world), dist.group.WORLD, rank, settings, "cpu")


def _shared(rank: int, world: int, experts: int, **options: Any) -> SharedMemoryDispatcher:
    group = dist.group.WORLD
    assert group is not None
    placement = ExpertPlacement.of(experts, world)
    return SharedMemoryDispatcher(placement, group, rank, DispatchOptions(timeout_s=60, **options))


def _run(
    dispatcher: Dispatcher,
    ids: Tensor,
    overlap: Overlap | None,
    x: Tensor,
    weights: Tensor,
    recompute: bool = False,
    complete: bool = False,
    **w: Tensor,
) -> Tensor:
    call = dispatch_rows(dispatcher, x, ids, weights, overlap, width=F)
    assert type(call) is (ExpertCall if overlap is None else PipelinedCall)
    if complete:
        call.complete()
    mlp = ExpertMLP(tuple(w[name] for name in WEIGHT_NAMES), activation_of("swiglu"), recompute)
    return call.combine(call.compute(call.rows, call.handle.rows_per_expert, mlp))


Comparison = tuple[int, torch.dtype, WireDtypes, tuple[str, ...]]
"""Experts, dtype, wire dtypes and routings."""


def _compare_with_serial(rank: int, world: int, arg: Comparison) -> None:
    dispatcher = _shared(rank, world, arg[0], wire_dtypes=arg[2])
    _compare(dispatcher, rank, arg)
    assert dispatcher.shared.heap.blocks == 0


def _compare_over_peer_to_peer(rank: int, world: int, arg: Comparison) -> None:
    dispatcher = _peer_to_peer(rank, world, arg[0], wire_dtypes=arg[2])
    _compare(dispatcher, rank, arg)
    gc.collect()
    assert dispatcher.memory.operations.heap.used == 0


def _compare(dispatcher: Dispatcher, rank: int, arg: Comparison) -> None:
    experts, dtype, _, kinds = arg
    for kind in kinds:
        ids = _routing(kind, rank, experts, min(3, experts))
        leaves = _leaves(rank, len(dispatcher.local_experts), ids, dtype)
        grad = draw(ids.shape[0], D, seed=99 + rank, dtype=dtype)
        expected = _gradients(leaves, partial(_run, dispatcher, ids, None), grad)
        for chunks in (1, 2, 8):
            overlap = Overlap(chunks, 1, executor="pipelined")
            for recompute, complete in ((False, False), (True, False), (False, True)):
                run = partial(_run, dispatcher, ids, overlap, recompute=recompute, complete=complete)
                _same(_gradients(leaves, run, grad), expected, f"{kind}, {chunks} groups, {recompute=}, {complete=}")
        with torch.no_grad():
            assert torch.equal(run(**leaves), expected["y"])
        del expected


SAME = WireDtypes()


@pytest.mark.parametrize("world", [2, 4])
def test_a_layer_pipelined_over_shared_memory_has_the_bits_of_the_serial_one(
    world: int, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(f"pool{world}").run(_compare_with_serial, (7, torch.float32, SAME, ROUTINGS))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "wire_dtypes", [SAME, WireDtypes("fp8_block", "bf16", "bf16", "fp8_token")], ids=["same", "encoded"]
)
def test_a_layer_pipelined_over_peer_to_peer_has_the_bits_of_the_serial_one(
    wire_dtypes: WireDtypes, world: int, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    pool.run(_compare_over_peer_to_peer, (7, torch.float32, wire_dtypes, ("random", "dropped")))


@pytest.mark.parametrize(
    "arg",
    [
        (5, torch.bfloat16, SAME, ("random", "dropped")),
        (1, torch.float32, SAME, ("random",)),
        (4, torch.float32, WireDtypes("fp8_block", "bf16", "bf16", "fp8_token"), ("random",)),
    ],
    ids=["bf16", "a rank without experts", "wire dtypes"],
)
def test_the_bits_are_equal_in_other_dtypes_placements_and_wire_dtypes(arg: Any, pool2: RankPool) -> None:
    pool2.run(_compare_with_serial, arg)


def _compare_partial_gradients(rank: int, world: int, _: Any) -> None:
    dispatcher = _shared(rank, world, 4)
    ids = _routing("random", rank, 4, 2)
    leaves = _leaves(rank, 2, ids, torch.float32)
    grad = draw(ids.shape[0], D, seed=3)
    run = partial(_run, dispatcher, ids, Overlap(3, 1, executor="pipelined"))
    expected = _gradients(leaves, run, grad)
    for name in leaves:
        inputs = {other: value.clone().requires_grad_(other == name) for other, value in leaves.items()}
        run(**inputs).backward(grad)
        _same({name: inputs[name].grad}, expected, "alone")
    inputs = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    y = run(**inputs)
    for _ in range(2):
        again = torch.autograd.grad(y, list(inputs.values()), grad, retain_graph=True)
        _same(dict(zip(inputs, again, strict=True)), expected, "again")
    inputs = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    parameters = [inputs[name] for name in WEIGHT_NAMES]
    (x_grad,), groups = stage_backward_input([run(**inputs)], [grad], [inputs["x"]], iter(parameters))
    _same({"x": x_grad}, expected, "in halves")
    assert all(p.grad is None for p in parameters)
    stage_backward_weight(iter(parameters), groups)
    _same({name: inputs[name].grad for name in WEIGHT_NAMES}, expected, "later")


def test_gradients_can_be_computed_separately_repeatedly_and_in_two_steps(pool2: RankPool) -> None:
    pool2.run(_compare_partial_gradients)


@on_ranks(4)
def test_serial_and_pipelined_ranks_run_together_over_shared_memory(rank: int, world: int) -> None:
    """Rank 1 runs serially, the others do not."""
    dispatcher = _shared(rank, world, 5)
    ids = _routing("random", rank, 5, 2)
    leaves = _leaves(rank, len(dispatcher.local_experts), ids, torch.float32)
    grad = draw(ids.shape[0], D, seed=3)
    pipelined = Overlap(4, 1, executor="pipelined")
    expected = _gradients(leaves, partial(_run, dispatcher, ids, pipelined), grad)
    overlap_of_rank = None if rank == 1 else pipelined
    _same(_gradients(leaves, partial(_run, dispatcher, ids, overlap_of_rank), grad), expected, "with a serial rank")


@on_ranks(2)
def test_auto_falls_back_to_serial_and_unsupported_executors_are_refused(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    placement = ExpertPlacement.of(4, world)
    ids = _routing("random", rank, 4, 2)
    x, weights = torch.ones(ids.shape[0], D), torch.ones(ids.shape)

    def call(dispatcher: Dispatcher, **options: Any) -> ExpertCall:
        expert_call = dispatch_rows(dispatcher, x, ids, weights, Overlap(**options), width=F)
        expert_call.complete()
        return expert_call

    shared, network = _shared(rank, world, 4), AllToAllDispatcher(placement, group, rank)
    gathered, peers = AllGatherDispatcher(placement, group, rank), _peer_to_peer(rank, world, 4)
    for dispatcher in (shared, network, peers):
        assert type(call(dispatcher, executor="serial")) is ExpertCall
        assert isinstance(call(dispatcher, executor="pipelined"), PipelinedCall)
        assert type(call(dispatcher)) is ExpertCall, "there are too few rows for two chunks"
        assert isinstance(call(dispatcher, chunk_bytes=1), PipelinedCall)
    assert type(call(gathered, chunk_bytes=1)) is ExpertCall
    for dispatcher in (shared, peers):
        assert type(call(dispatcher, chunks="auto")) is ExpertCall
    with pytest.raises(ConfigError, match="the pipelined executor"):
        call(gathered, executor="pipelined")
    for dispatcher in (gathered, shared, network):
        with pytest.raises(ConfigError, match=f"need the dispatcher peer_to_peer; got {dispatcher.name}"):
            call(dispatcher, executor="device")
    with pytest.raises((ConfigError, MissingDependency), match=r"TRITON_INTERPRET=1|pip install"):
        call(peers, executor="device")
    reasons = [
        explain_overlap(each, tokens=8, top_k=2, hidden=D, ffn=F).splitlines()
        for each in (shared, network, gathered, peers)
    ]
    assert [lines[0].split(":")[0] for lines in reasons] == ["serial", "rates", "serial", "serial"]
    assert reasons[1][-1].startswith("choice: serial"), "auto must not send few rows in chunks"
    layer = MoELayer.build(MoEConfig(D, F, RouterConfig(4, 2)), group, backend="all_to_all", seed=1, overlap="auto")
    assert layer.overlap == Overlap("auto")
    assert layer(x).shape == x.shape


def test_unknown_executors_and_overlaps_are_refused() -> None:
    with pytest.raises(ConfigError, match="known: auto, serial, pipelined, device"):
        Overlap(executor="eager")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match='must be an Overlap, "auto" or None'):
        MoELayer.build(MoEConfig(D, F, RouterConfig(4, 2)), overlap="always")  # type: ignore[arg-type]


@on_ranks(2)
@pytest.mark.parametrize("backend", ["shared_memory", "peer_to_peer"])
@pytest.mark.parametrize("where", ["between", "experts"])
def test_an_exception_between_dispatch_and_experts_reaches_all_ranks(rank: int, where: str, backend: str) -> None:
    """Rank 1 raises between dispatch and experts, or in an expert."""
    group = dist.new_group(backend="gloo")
    # Checksums of shared_memory are exchanged after its rows; of peer_to_peer, before an expert can raise.
    checksums = backend == "peer_to_peer"
    options = DispatchOptions(timeout_s=60, checksums=checksums, peer_to_peer=PeerToPeerOptions(emulate=True))
    dispatcher = make_dispatcher(4, group, backend=backend, options=options)
    ids = _routing("random", rank, 4, 2)
    leaves = _leaves(rank, 2, ids, torch.float32)
    call = dispatch_rows(dispatcher, leaves["x"], ids, leaves["weights"], Overlap(2, 1), width=F)
    ffn = F - 1 if rank == 1 and where == "experts" else F
    mlp = ExpertMLP((leaves["w13"], leaves["w2"][:, :, :ffn], None, None), activation_of("swiglu"))
    expected = (ZeroDivisionError if where == "between" else ValueError) if rank == 1 else PeerRaised
    with pytest.raises(expected):  # noqa: PT012
        with call.abort_on_error():
            if rank == 1 and where == "between":
                raise ZeroDivisionError("between")
            rows = call.compute(call.rows, call.handle.rows_per_expert, mlp)
        call.combine(rows)
    dispatcher.dispatch(leaves["x"], ids)  # the group can be used again
