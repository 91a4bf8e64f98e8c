"""Layers that lend experts to other ranks (``Balance``), compared with the same layers without."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moe_comm
from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.dispatch import DispatchOptions, PeerToPeerOptions, WireDtypes, make_dispatcher
from moe_comm.dispatch.hierarchical.dispatcher import HierarchicalDispatcher
from moe_comm.errors import ConfigError, InputError, RankMismatch, RoutingError
from moe_comm.layers import Experts, MoEConfig, MoELayer, Router, RouterConfig
from moe_comm.layers.check import check_grads
from moe_comm.layers.data_parallel.expert_shard import plain
from moe_comm.layers.moe.config import MoEGroups
from moe_comm.layers.moe.expert_parallel import LENT_COUNTS
from moe_comm.overlap.options import Overlap
from moe_comm.topology import Placement
from moe_comm.topology.balance import Balance
from tests.layers.reference import draw, loop_over_experts, silu_glu
from tests.pool import RankPool, on_ranks

HIDDEN, FFN, EXPERTS, TOP_K = 24, 8, 8, 2
ALWAYS = Balance(rows=1.0, worth=0)
CONFIG = MoEConfig(HIDDEN, FFN, RouterConfig(EXPERTS, TOP_K), expert_bias=True)


@dataclass(frozen=True)
class Run:
    """A layer to build, and its tokens."""

    backend: str = "shared_memory"
    etp: int = 1
    overlap: Overlap | None = None
    dtype: torch.dtype = torch.float32
    tokens: str = "skewed"
    recompute: bool = False
    checkpointed: bool = False
    balance: Balance | None = None
    device: str = "cpu"
    capacity: int | Literal["memory"] | None = None
    halves: bool = False
    """Compute the gradients of inputs of all calls, then those of weights, as zero-bubble schedules do."""
    resident: bool = False
    """Measure a step in which weights of experts that the step before has lent are sent by gloo before the calls."""


CALLS = 2


def build(balance: Balance | None, run: Run = Run(), **settings: Any) -> MoELayer:
    config = replace(CONFIG, recompute=run.recompute, **settings)
    peers = PeerToPeerOptions(emulate=run.device == "cpu", capacity_rows=run.capacity)
    options, group = DispatchOptions(timeout_s=60, balance=balance, peer_to_peer=peers), dist.group.WORLD
    if run.backend == "hierarchical":  # as if the ranks were on two hosts
        rank, world = dist.get_rank(), dist.get_world_size()
        placement = Placement.contiguous(EXPERTS, world)
        placement = placement if balance is None else balance.placement(placement)
        hosts = [2 * one // world for one in range(world)]
        dispatcher = HierarchicalDispatcher(placement.layout, group, rank, options, hosts)
        dispatcher.expert_placement = placement
        experts = Experts(placement.homes_per_rank[rank], HIDDEN, FFN, bias=True)
        layer = MoELayer(Router(HIDDEN, config.router, group), experts, dispatcher)
        layer.reset_parameters(3)
    else:
        layer = MoELayer.build(
            config,
            MoEGroups(group, run.etp),
            backend=run.backend,
            options=options,
            overlap=run.overlap,
            seed=3,
            dtype=run.dtype,
            device=run.device,
        )
    return with_biases(layer)


def with_biases(layer: MoELayer) -> MoELayer:
    with torch.no_grad():
        for bias in (layer.experts.b13, layer.experts.b2):
            assert bias is not None
            bias.fill_(0.1)
    return layer


def routed(layer: MoELayer, run: Run, rank: int, call: int) -> tuple[Tensor, Any]:
    """Return tokens and their routing. Each call has other experts with many rows."""
    count = 0 if run.tokens == "none on rank 1" and rank == 1 else 16 + 8 * rank
    x = draw(count, HIDDEN, seed=rank + 10 * call, dtype=run.dtype).to(run.device).requires_grad_()
    routing = layer.router(x, 1)
    hot = torch.arange(count, device=run.device) % 4 != 0
    pair = torch.tensor([(2 * call) % EXPERTS, (2 * call + 1) % EXPERTS], device=run.device)
    ids = torch.where(hot[:, None], pair, routing.ids_TK)
    if run.tokens == "all to one expert":
        ids = torch.full_like(ids, -1)
        ids[:, 0] = 5
    elif run.tokens == "dropped":
        ids = ids.masked_fill(torch.arange(count).unsqueeze(1) % 3 == 0, -1)
    weights = routing.weights_TK.detach().requires_grad_()
    return x, routing._replace(ids_TK=ids, weights_TK=weights)


def run_layer(rank: int, world: int, run: Run) -> dict[str, Any]:
    """Run all forward passes, then all backward passes. Return outputs, gradients, and what was computed where."""
    # It imports Triton, which some tests must configure first.
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    configure_collectives(CollectiveOptions(shared_memory=not run.resident))
    layer = build(run.balance, run)
    result: dict[str, Any] = {"rows": [], "plans": [], "counts": [], "resident": []}
    if run.resident:
        for call in range(CALLS):
            layer(*routed(layer, run, rank, call)).sum().backward()
        moe_comm.sync_gradients(layer, dist.group.WORLD)
        layer.zero_grad()
        layer.prefetch()
    calls = []
    for call in range(CALLS):
        x, routing = routed(layer, run, rank, call)
        y = checkpoint(layer, x, routing, use_reentrant=False) if run.checkpointed else layer(x, routing)
        calls.append((x, routing.weights_TK, y))
        assert layer.dispatch_stats is not None
        result["rows"].append(layer.dispatch_stats.received)
        result["counts"].append(int((routing.ids_TK >= 0).sum()))
        result["plans"].append(None if layer.last_plan is None else (layer.last_plan.lent, layer.last_plan.rows))
        if run.resident and layer.last_plan is not None:
            result["resident"].append(layer.last_plan.resident)
    if run.balance is not None and not run.resident:  # ranks that share memory read weights where they are
        assert layer.copies is not None
        sent = [
            one for lent, _ in result["plans"] for one in lent if layer.placement.homes[one.expert] == layer.place["ep"]
        ]
        if run.capacity is None:
            assert (layer.copies.published_bytes > 0) is (bool(sent) and run.backend != "shared_memory")
        else:
            of_lent = layer.take_lent(layer.copies)[3:].tolist()
            nbytes = len(sent) * sum(p[0].nbytes for p in layer.experts.parameters())
            assert of_lent == [CALLS, sum(len(one) for one, _ in result["plans"]), 0, nbytes]
    later: list[Any] = []
    for call, (x, weights, y) in enumerate(calls):
        if run.halves:
            outputs = [y.clone()]  # detached in place
            _, groups = stage_backward_input(outputs, [gradient(y, rank, call)], [x, weights], layer.parameters())
            later.append(groups)
            assert all(param.grad is None for param in layer.parameters())
        else:
            y.backward(gradient(y, rank, call))
        if run.checkpointed and layer.last_plan is not None:
            assert layer.last_plan.lent == result["plans"][call][0]
        result |= {f"y{call}": y.detach(), f"x{call}": x.grad, f"weights{call}": weights.grad}
    for groups in later:  # calls have used the slots for copies since
        stage_backward_weight(layer.parameters(), groups)
    moe_comm.sync_gradients(layer, dist.group.WORLD)
    shards = layer.experts.expert_gradients.shards
    for name, param in layer.experts.named_parameters():
        assert param.grad is not None
        result[f"grad {name}"] = shards.gather(name, plain(param.grad))
    layer.dispatcher.close()
    configure_collectives(CollectiveOptions())
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in result.items()}


def gradient(y: Tensor, rank: int, call: int) -> Tensor:
    return draw(*y.shape, seed=50 + rank + 10 * call, dtype=y.dtype).to(y.device)


def exact_gradients(run: Run, world: int) -> dict[str, Tensor]:
    """Return the gradients of all experts in float64."""
    layer = with_biases(MoELayer.build(CONFIG, MoEGroups(None), seed=3))
    experts = layer.experts
    tensors = [one.detach().double().requires_grad_() for one in (experts.w13, experts.w2, experts.b13, experts.b2)]
    for call in range(CALLS):
        given = [routed(layer, run, rank, call) for rank in range(world)]
        x, ids, weights = (
            torch.cat(parts) for parts in zip(*((x, one.ids_TK, one.weights_TK) for x, one in given), strict=True)
        )
        grad = torch.cat([gradient(x, rank, call) for rank, (x, _) in enumerate(given)])
        y = loop_over_experts(x.detach().double(), ids, weights.double(), *tensors[:2], silu_glu, *tensors[2:])
        y.backward(grad.double())
    return {f"grad {name}": one.grad for name, one in zip(("w13", "w2", "b13", "b2"), tensors, strict=True)}


PIPELINED = Overlap(2, 1, executor="pipelined")
CASES = [
    (2, Run()),
    (2, Run("all_to_all", overlap=Overlap(3, 1, executor="pipelined"), tokens="none on rank 1")),
    (2, Run("shared_memory", overlap=PIPELINED, recompute=True, tokens="dropped")),
    (2, Run("all_gather", checkpointed=True)),
    (4, Run("shared_memory", dtype=torch.bfloat16, checkpointed=True)),
    (4, Run("all_to_all", etp=2)),
    (4, Run("hierarchical")),
    (4, Run("shared_memory", tokens="all to one expert")),
    (2, Run("all_to_all", checkpointed=True, resident=True)),
    (4, Run("all_to_all", etp=2, overlap=Overlap(3, 1, executor="pipelined"), resident=True)),
    (4, Run("hierarchical", recompute=True, resident=True)),
    (2, Run(halves=True)),
    (2, Run("all_to_all", overlap=Overlap(3, 1, executor="pipelined"), tokens="none on rank 1", halves=True)),
    (2, Run("all_to_all", checkpointed=True, resident=True, halves=True)),
    (4, Run("shared_memory", overlap=PIPELINED, recompute=True, dtype=torch.bfloat16, halves=True)),
    (4, Run("all_to_all", etp=2, recompute=True, halves=True)),
    (4, Run("hierarchical", halves=True)),
]


@pytest.mark.parametrize(("world", "run"), CASES)
def test_lent_experts_keep_the_bits_and_no_rank_has_more_rows_than_the_mean(
    pools: dict[int, RankPool], world: int, run: Run
) -> None:
    if run.backend == "shared_memory":
        pytest.importorskip("moe_comm._C", reason="the native core is not built")
    compare(pools[world], run_layer, world, run)


def compare(pool: RankPool, work: Any, world: int, run: Run) -> None:
    """Compare layers that lend experts with one that does not, and with float64. work: calls ``run_layer``."""
    expected, first, again = (pool.run(work, replace(run, balance=one), timeout=120) for one in (None, ALWAYS, ALWAYS))
    exact = exact_gradients(run, world) if run.dtype is torch.float32 else {}
    even = [-(-sum(one["counts"][call] for one in first) // (world // run.etp)) for call in range(CALLS)]
    for rank, (wanted, got, repeated) in enumerate(zip(expected, first, again, strict=True)):
        for call in range(CALLS):
            lent, rows = got["plans"][call]
            assert lent and got["rows"][call] == rows[rank // run.etp] <= even[call] == max(rows)
            assert not run.resident or got["resident"][call] == len(lent)
        for name, value in wanted.items():
            if name.startswith("grad"):
                if exact:
                    assert (got[name] - exact[name]).abs().max() <= 1e-6 * exact[name].abs().max(), name
                else:  # the gradients of all ranks are added before they are rounded to 16 bits
                    torch.testing.assert_close(got[name], value, rtol=2**-7, atol=2**-7)
                    assert (got[name] == value).float().mean() > 0.98
                assert torch.equal(got[name], repeated[name]), f"{name} differs between two runs"
            elif isinstance(value, Tensor):
                assert torch.equal(got[name], value), f"{name} of rank {rank}"
    assert max(one["rows"][0] for one in expected) > even[0]


@on_ranks(2)
def test_weights_are_sent_only_when_they_have_changed(group: dist.ProcessGroup, rank: int) -> None:
    layer, fixed = (build(balance, Run("all_to_all")) for balance in (ALWAYS, None))
    copies = layer.copies
    assert copies is not None
    sent = []
    for step in range(3):
        results = []
        for one in (layer, fixed):
            x, routing = routed(one, Run(), rank, 0)
            with torch.no_grad():
                for _ in range(2):
                    results.append(one(x, routing))
            y = one(x, routing)
            y.sum().backward()
            moe_comm.sync_gradients(one, group)
            with torch.no_grad():
                for param in one.experts.parameters():
                    param.add_(0.01 * (step + 1))  # no call of the layer says so
                    param.grad = None
            results.append(y.detach())
        assert all(torch.equal(*pair) for pair in zip(results[:3], results[3:], strict=True))
        sent.append(copies.published_bytes)
    x, routing = routed(layer, Run(), rank, 0)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(x, routing), layer(x, routing))
    with torch.no_grad():
        for one in (layer, fixed):
            for param in one.experts.parameters():
                param.data.mul_(2)  # not seen by autograd
            one.publish_copies()
        assert torch.equal(layer(x, routing), fixed(x, routing))
    one_expert = sum(p[0].numel() * p.element_size() for p in layer.experts.parameters())
    assert layer.last_plan is not None
    homes = [layer.placement.homes[one.expert] for one in layer.last_plan.lent]
    takers = [one.rank for one in layer.last_plan.lent]
    assert homes and sent == [n * one_expert * (homes.count(rank) + takers.count(rank)) for n in (1, 2, 3)]
    for one in (layer, fixed):
        one.dispatcher.close()


@on_ranks(2)
def test_even_routing_lends_nothing_and_trains_the_same_bits(group: dist.ProcessGroup, rank: int) -> None:
    layer, fixed = (build(balance, Run("all_to_all")) for balance in (Balance(), None))
    results = []
    for one in (layer, fixed):
        x, routing = routed(one, Run(), rank, 0)
        ids = (torch.arange(x.shape[0]).unsqueeze(1) + torch.tensor([0, 4])) % EXPERTS
        routing = routing._replace(ids_TK=ids)
        y = one(x, routing)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(plain(p.grad) for p in one.experts.parameters() if p.grad is not None)])
    assert len(results[0]) == 6 and all(map(torch.equal, *results))
    assert layer.last_plan is not None and not layer.last_plan.lent and layer.copies.published_bytes == 0
    for one in (layer, fixed):
        one.dispatcher.close()


@on_ranks(4)
def test_memory_limits_the_rows_of_slices(group: dist.ProcessGroup, rank: int) -> None:
    layer = build(Balance(rows=1000, memory=1.5, worth=0), Run("all_to_all", etp=2))
    x = draw(20, HIDDEN, seed=rank, dtype=torch.float32)
    for share, lends in ((14, False), (18, True)):  # of 20 tokens: to experts of the first two ranks
        first = torch.arange(20) < share
        ids = torch.where(first[:, None], torch.tensor([0, 1]), torch.tensor([4, 5]))
        routing = layer.router(x, 1)._replace(ids_TK=ids)
        layer(x, routing)
        assert layer.last_plan is not None and bool(layer.last_plan.lent) is lends
        assert max(layer.last_plan.rows) <= 1.5 * 2 * ids.numel()  # slices of two ranks' pairs
    layer.dispatcher.close()


@pytest.mark.parametrize("backend", ["shared_memory", "all_to_all"])
@on_ranks(2)
def test_lent_experts_with_fp8_gemms_keep_the_bits(backend: str, group: dist.ProcessGroup, rank: int) -> None:
    config, hidden = replace(CONFIG, hidden=128, ffn=128, expert_gemm_dtype="fp8"), 128
    results: list[dict[str, Tensor]] = []
    for balance in (ALWAYS, None):
        wire = WireDtypes(dispatch="fp8_block") if backend == "all_to_all" else WireDtypes()
        options = DispatchOptions(balance=balance, wire_dtypes=wire)
        layer = MoELayer.build(config, group, backend=backend, options=options, seed=3, dtype=torch.bfloat16)
        x = draw(24 + 8 * rank, hidden, seed=rank, dtype=torch.bfloat16).requires_grad_()
        y = layer(x)
        y.float().square().sum().backward()
        assert balance is None or (layer.last_plan is not None and layer.last_plan.lent)
        experts = {name: plain(p.grad) for name, p in layer.experts.named_parameters() if p.grad is not None}
        results.append({"y": y.detach(), "x": x.grad, "router": layer.router.weight.grad} | experts)
        layer.dispatcher.close()
    lent, fixed = results
    assert lent.keys() == fixed.keys() and len(lent) == 7
    for name, value in fixed.items():
        if name in ("y", "x", "router"):
            assert torch.equal(lent[name], value), name
        else:  # added in fp32 before they are rounded
            torch.testing.assert_close(lent[name], value, rtol=2**-7, atol=2**-7 * float(value.abs().max()))


@on_ranks(4)
def test_ddp_trains_lent_experts(group: dist.ProcessGroup, rank: int) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    gradients: list[dict[str, Tensor]] = []
    for balance in (ALWAYS, None):
        options = DispatchOptions(balance=balance)
        layer = MoELayer.build(CONFIG, halves[rank // 2], backend="all_to_all", options=options, seed=3)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, dtype=torch.float32, device="cpu"), layer)
        ddp = DistributedDataParallel(moe_comm.prepare_ddp(model))
        for call in range(2):  # gradients of the second one are added
            ddp(draw(24, HIDDEN, seed=rank + 10 * call, dtype=torch.float32)).square().sum().backward()
        gradients.append({name: plain(p.grad) for name, p in model.named_parameters() if p.grad is not None})
        assert balance is None or (layer.last_plan is not None and layer.last_plan.lent)
        layer.dispatcher.close()
    lent, fixed = gradients
    assert lent.keys() == fixed.keys() and len(lent) == 7
    for name, grad in fixed.items():
        assert (lent[name] - grad).abs().max() <= 1e-6 * grad.abs().max(), name


@on_ranks(2)
def test_experts_move_between_calls(group: dist.ProcessGroup, rank: int) -> None:
    layers = [build(balance, Run("all_to_all")) for balance in (ALWAYS, None)]
    outputs: list[list[Tensor]] = [[], []]
    for layer, results in zip(layers, outputs, strict=True):
        for _ in range(2):
            x, routing = routed(layer, Run(), rank, 0)
            results.append(layer(x, routing).detach())
            layer.relocate(layer.placement.with_owners([*layer.placement.owners[1:], layer.placement.owners[0]]))
    assert all(map(torch.equal, *outputs))
    assert layers[0].last_plan is not None and layers[0].last_plan.lent
    for layer in layers:
        layer.dispatcher.close()


@on_ranks(2)
def test_errors_of_one_rank_are_raised_on_every_rank(group: dist.ProcessGroup, rank: int) -> None:
    for backend in ("all_to_all", "shared_memory"):
        layer = build(ALWAYS, Run(backend))
        x, routing = routed(layer, Run(), rank, 0)
        with pytest.raises(InputError, match=r"hidden|D"):
            layer(x[:, :-rank] if rank else x, routing)
        bad = routing._replace(ids_TK=routing.ids_TK.masked_fill(torch.tensor(rank == 1), EXPERTS))
        with pytest.raises(RoutingError, match="outside"):
            layer(x, bad)
        y = layer(x, routing)
        assert y.shape == x.shape
        assert layer.copies is not None
        layer.copies.balance = replace(ALWAYS, worth=rank)
        with pytest.raises(RankMismatch, match="other settings"):
            layer(x, routing)
        layer.dispatcher.close()


@on_ranks(2)
def test_combinations_that_are_not_supported_are_refused(group: dist.ProcessGroup, rank: int) -> None:
    with pytest.raises(ConfigError, match="deterministic=True"):
        DispatchOptions(deterministic=False, balance=ALWAYS)
    with pytest.raises(ConfigError, match="for layers"):
        make_dispatcher(EXPERTS, group, options=DispatchOptions(balance=ALWAYS))
    copied = Placement(((0, 1), (0,), (1,), (1,)), 2)
    for balance, settings in (
        (ALWAYS, {"router": RouterConfig(4, 2), "placement": copied}),
        (Balance(memory=1.5, copies=1), {}),
    ):
        config, options = replace(CONFIG, **settings), DispatchOptions(balance=balance)
        with pytest.raises(ConfigError, match=r"[bB]alance"):
            MoELayer.build(config, group, seed=3, options=options)
    layer = build(ALWAYS, Run("all_to_all"))
    before = [param.clone() for param in layer.experts.parameters()]
    with pytest.raises(ConfigError, match="chooses the copies"):  # before two experts move
        layer.relocate(replace(layer.placement, owners=((1, 0), *layer.placement.owners[1:-1], (0,))))
    assert all(map(torch.equal, layer.experts.parameters(), before))
    layer.dispatcher.close()


@on_ranks(2)
@pytest.mark.parametrize("backend", ["all_to_all", "shared_memory"])
def test_check_grads_compares_the_sums_of_the_ranks(backend: str) -> None:
    if backend == "shared_memory":
        pytest.importorskip("moe_comm._C", reason="the native core is not built")
    layer = build(ALWAYS, Run(backend), shared_ffn=12)
    report = check_grads(layer, tokens=17)
    assert report.ok, str(report)
    assert layer.take_lent(layer.copies)[LENT_COUNTS.index("experts")] > 0
    bits = {(one.tensor, one.equal_bits) for one in report.comparisons if one.against == "EP 1"}
    assert {("output", True), ("input", True)} <= bits and not {("output", False), ("input", False)} & bits
    assert all(param.grad is None for param in layer.parameters())
    layer.dispatcher.close()
