"""Layers that lend experts over ``peer_to_peer`` by plans on the device: bits, faults, and no wait of the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch import DispatchOptions, PeerToPeerOptions
from moe_comm.dispatch.peer_to_peer.lending import LendingPrimitives
from moe_comm.errors import (
    HeapError,
    InputError,
    MoeCommError,
    PeerDied,
    PeerError,
    PeerRaised,
    RankMismatch,
    RoutingError,
)
from moe_comm.kernels import native
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig
from moe_comm.layers.data_parallel.lending import LentExperts
from moe_comm.layers.moe.load import moe_layers
from moe_comm.layers.moe.router import Routing
from tests.kernels.triton.common import drawn, kernels
from tests.kernels.triton.test_lending import on_devices
from tests.layers.test_balance import ALWAYS, Run, build, compare, routed
from tests.overlap.triton.common import needs_triton
from tests.overlap.triton.device_layer import DEVICE
from tests.pool import RankPool, on_ranks

pytestmark = needs_triton
pytest.importorskip("moe_comm._C", reason="the native core is not built")
BF16 = torch.bfloat16
LENDS = Run("peer_to_peer", dtype=BF16, capacity=96)
ON_HOST = replace(LENDS, overlap=DEVICE)
CASES = [
    (2, LENDS),
    (2, replace(LENDS, recompute=True, tokens="none on rank 1")),
    (2, replace(LENDS, halves=True)),
    (4, replace(LENDS, dtype=torch.float16, recompute=True, tokens="dropped", capacity=200)),
    (4, replace(LENDS, tokens="all to one expert", checkpointed=True, capacity=128)),
    (2, replace(ON_HOST, checkpointed=True)),
]


@contextmanager
def interpreted() -> Iterator[None]:
    kernels("device")
    native.TRITON_DEVICES.add("cpu")
    try:
        yield
    finally:
        native.TRITON_DEVICES.discard("cpu")


@pytest.mark.parametrize(("world", "run"), CASES)
def test_lent_experts_keep_the_bits(pools: dict[int, RankPool], world: int, run: Run) -> None:
    compare(pools[world], on_devices, world, run)


@on_ranks(2)
def test_the_cpu_reads_nothing_of_a_call(rank: int) -> None:
    def wait(*_: Any) -> Any:
        raise AssertionError("the CPU waits")

    with interpreted(), pytest.MonkeyPatch.context() as patch:
        layer = build(ALWAYS, LENDS)
        x, routing = routed(layer, LENDS, rank, 0)
        patch.setattr(LentExperts, "plan", wait)
        for name in ("tolist", "item", "__int__", "__bool__"):
            patch.setattr(Tensor, name, wait)
        y = layer(x, routing)
        y.backward(drawn(*y.shape, dtype=BF16))
        with torch.no_grad():
            layer(x, routing)
        patch.undo()
        assert layer.last_plan is not None and layer.last_plan.lent


def hot(layer: MoELayer, x: Tensor, expert: int) -> Routing:
    """Return a routing in which all tokens have the same experts."""
    routing = layer.router(x, 1)
    ids = torch.full_like(routing.ids_TK, expert)
    ids[:, 1:] = -1
    return routing._replace(ids_TK=ids, weights_TK=routing.weights_TK.detach())


@pytest.mark.parametrize("experts", [3, 6])
@on_ranks(4)
def test_ranks_may_have_different_numbers_of_experts(rank: int, experts: int) -> None:
    with interpreted():
        layers = []
        for balance in (None, ALWAYS):
            peers = PeerToPeerOptions(emulate=True, capacity_rows=None if balance is None else 64)
            options = DispatchOptions(timeout_s=60, balance=balance, peer_to_peer=peers)
            config = MoEConfig(24, 8, RouterConfig(experts, 2))
            layers.append(
                MoELayer.build(config, dist.group.WORLD, backend="peer_to_peer", options=options, seed=3, dtype=BF16)
            )
        for expert in range(experts):
            results = []
            for layer in layers:
                x = drawn(3 * rank + 1, 24, dtype=BF16, seed=rank).requires_grad_()
                y = layer(x, hot(layer, x, expert))
                y.sum().backward()
                results.append((y, x.grad))
            assert all(map(torch.equal, *results))
            assert layers[1].last_plan is not None and len(layers[1].last_plan.lent) == 3
        with torch.no_grad():
            nothing = layers[1](x[:0], hot(layers[1], x[:0], 0))
            none = layers[1](x, hot(layers[1], x, -1))
        assert not nothing.numel() and not none.any() and not layers[1].last_plan.lent


@on_ranks(2)
def test_calls_with_other_routing_leave_nothing_behind(rank: int) -> None:
    plans: list[tuple[Any, ...]] = []

    def train(layer: MoELayer, call: int) -> list[Tensor]:
        x, routing = routed(layer, LENDS, rank, call)
        y = layer(x, routing)
        y.backward(drawn(*y.shape, dtype=BF16, seed=call))
        assert layer.last_plan is not None
        plans.append(tuple(layer.last_plan.lent))
        grads = [x.grad, routing.weights_TK.grad, *(param.grad for param in layer.experts.parameters())]
        for param in layer.experts.parameters():
            param.grad = None
        return [y.detach(), *(grad for grad in grads if grad is not None)]

    with interpreted():
        layer = build(ALWAYS, LENDS)
        first, other, again = (train(layer, call) for call in (0, 3, 0))
    assert len(first) == 7 and all(map(torch.equal, again, first)) and not torch.equal(other[0], first[0])
    assert () not in plans and plans[0] == plans[2] != plans[1]


@pytest.mark.parametrize("run", [LENDS, ON_HOST], ids=["planned on the device", "planned on the host"])
@on_ranks(2)
def test_calls_in_flight_use_their_own_copies_and_experts_move(rank: int, run: Run) -> None:
    with interpreted():
        outputs = []
        for layer in (build(ALWAYS, run), build(None, run)):
            results = []
            for _ in range(2):
                given = [routed(layer, LENDS, rank, call) for call in range(2)]
                calls = [layer.begin(x, routing) for x, routing in given]
                for call in calls:
                    call.compute()
                ended = [call.result() for call in calls]
                torch.stack([one.float().square().sum() for one in ended]).sum().backward()
                results += [*(one.detach() for one in ended), *(x.grad for x, _ in given)]
                layer.relocate(layer.placement.with_owners([*layer.placement.owners[1:], layer.placement.owners[0]]))
                with torch.no_grad():
                    for param in layer.experts.parameters():
                        param.grad = None
                        param.mul_(1.5)
            outputs.append(results)
        assert all(map(torch.equal, *outputs))


@on_ranks(2)
def test_faults_are_raised_on_every_rank(rank: int) -> None:
    with interpreted():
        layer = build(ALWAYS, LENDS)
        layer.in_flight_hook = lambda: None  # several calls, which find faults before the next one
        x, routing = routed(layer, LENDS, rank, 0)
        expected = layer(x, routing)
        bad = routing._replace(ids_TK=routing.ids_TK.masked_fill(torch.tensor(rank == 1), 8))
        with pytest.raises(RoutingError, match="outside"):
            layer(x, bad)
        with pytest.raises(MoeCommError, match=r"NaN|outside|logits"):
            layer(x.detach().masked_fill(torch.tensor(rank == 1), torch.nan))
        assert layer.copies is not None
        layer.copies.balance = replace(ALWAYS, worth=rank)
        with pytest.raises(RankMismatch, match="balance in plan of lent experts"):
            layer(x, routing)
        layer.copies.balance = ALWAYS
        assert torch.equal(layer(x, routing), expected)

        def another(*args: Any, lend: Any = LendingPrimitives.lend) -> Any:
            slots_TK, plan = lend(*args)
            plan[1] ^= rank << 40
            return slots_TK, plan

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LendingPrimitives, "lend", another)
            with pytest.raises(RankMismatch, match="balance in dispatch"):
                layer(x, routing)
        assert torch.equal(layer(x, routing), expected)
        few = build(ALWAYS, replace(LENDS, capacity=8))
        few.in_flight_hook = lambda: None
        with pytest.raises((HeapError, PeerError), match="capacity_rows"):
            few(x, routing)


@pytest.mark.parametrize("capacity", [None, 96])
@on_ranks(2)
def test_faults_with_the_device_executor_are_raised_on_every_rank(rank: int, capacity: int | None) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("of rank 1")

    with interpreted(), pytest.MonkeyPatch.context() as patch:
        layer = build(ALWAYS, replace(ON_HOST, capacity=capacity))
        x, routing = routed(layer, ON_HOST, rank, 0)
        with pytest.raises(InputError, match=r"hidden|D"):
            layer(x[:, :-rank] if rank else x, routing)
        bad = routing._replace(ids_TK=routing.ids_TK.masked_fill(torch.tensor(rank == 1), 8))
        with pytest.raises(RoutingError, match="outside"):
            layer(x, bad)
        for failing in (layer.router, layer.experts):
            if rank:
                patch.setattr(failing, "forward", fail)
            with pytest.raises(ZeroDivisionError if rank else PeerRaised, match="of rank 1"):
                layer(x)
            patch.undo()
        y = layer(x, routing)
        y.sum().backward()
        assert layer.last_plan is not None and layer.last_plan.lent
        assert torch.equal(y, build(None, ON_HOST)(x, routing))


@on_ranks(2)
def test_the_room_follows_from_the_first_call_and_is_enough_for_any_routing(rank: int) -> None:
    with interpreted():
        balance = replace(ALWAYS, memory=1.25)
        layer, fixed = build(balance, replace(LENDS, capacity="memory")), build(None, LENDS)

        def check(tokens: int, call: int, *, hot_expert: int | None = None) -> None:
            results = []
            for one in (layer, fixed):
                x, routing = routed(one, LENDS, rank, call)
                x = x.detach()[:tokens].requires_grad_()
                routing = routing._replace(ids_TK=routing.ids_TK[:tokens], weights_TK=routing.weights_TK[:tokens])
                y = one(x, routing if hot_expert is None else hot(one, x, hot_expert))
                results += [(y, *torch.autograd.grad(y.sum(), x))]
            assert all(map(torch.equal, *results))

        assert layer.dispatcher.capacity_rows is None
        check(16 + 4 * rank, 0)  # 16 tokens and 20, of 2 slots each
        assert layer.dispatcher.capacity_rows == 50
        for call in range(1, 3):
            check(16 + 4 * rank, call)
        check(20, 0, hot_expert=3)
        check(8, 1)
        x, routing = routed(layer, LENDS, 1, 0)
        x, own = x[: 18 + 3 * rank], routing._replace(ids_TK=routing.ids_TK[: 18 + 3 * rank])
        own = own._replace(weights_TK=routing.weights_TK[: 18 + 3 * rank])
        layer.in_flight_hook = lambda: None  # a native call cannot be repeated after an error
        with pytest.raises(HeapError, match=r"rank 1 has 42 .* at most 40 on a rank"):
            layer(x, own)
        check(20, 2)


def train_over_peers(rank: int, world: int, settings: list[str]) -> tuple[list[float], int]:
    """Train over emulated ``peer_to_peer``. Return the losses, and the number of experts that were lent."""
    lent = [0]
    with interpreted(), pytest.MonkeyPatch.context() as patch:
        from moe_comm.train.loop import build as trainer  # imports Triton
        from tests.train.common import session

        # The trainer has no setting for emulation.
        patch.setattr(trainer, "PeerToPeerOptions", partial(PeerToPeerOptions, emulate=True))
        with session(settings) as active:
            layers = [layer for stage in active.stages for _, layer in moe_layers(stage)]

            def count(report: Any) -> None:
                lent[0] += int(sum(report.load.lent_experts))

            active.trainer.fit(count)
            assert {layer.dispatcher.capacity_rows for layer in layers} <= {None, 2 * 16 * 2}
            return [report.loss for report in active.trainer.reports], lent[0]


def test_the_trainer_keeps_plans_and_counts_on_the_device(tmp_path: Path, pools: dict[int, RankPool]) -> None:
    from tests.train.common import SGD, write_text  # imports Triton

    settings = [*write_text(tmp_path), *SGD, "parallel.ep=2", "parallel.backend=peer_to_peer", "model.dtype=bfloat16"]
    balance = ["placement.balance={rows = 1.0, worth = 0, memory = 1.0}", 'peer_to_peer.capacity_rows="memory"']
    fixed, lends = (pools[2].run(train_over_peers, [*settings, *more], timeout=100) for more in ([], balance))
    for (wanted, nothing), (losses, lent) in zip(fixed, lends, strict=True):
        assert losses[0] == wanted[0] and lent > nothing == 0
        assert losses == pytest.approx(wanted, rel=1e-2)  # gradients of weights are rounded once, or on each rank


@on_ranks(2)
def test_a_rank_without_room_for_gradients_stops_all_ranks(rank: int) -> None:
    def no_room(*_: Any) -> Any:
        raise HeapError("no room for gradients")

    with interpreted(), pytest.MonkeyPatch.context() as patch:
        layer = build(ALWAYS, LENDS)
        layer.in_flight_hook = lambda: None  # as above
        if rank:
            patch.setattr(LendingPrimitives, "gradient_stacks", no_room)
        y = layer(*routed(layer, LENDS, rank, 0))
        with pytest.raises(HeapError if rank else PeerRaised, match="no room for gradients"):
            y.sum().backward()


def exit_in(rank: int, world: int, phase: str) -> str:
    with interpreted(), pytest.MonkeyPatch.context() as patch:
        layer = build(ALWAYS, LENDS)
        x, routing = routed(layer, LENDS, rank, 0)
        if rank:
            patch.setattr(LendingPrimitives, phase, lambda *_: os._exit(9))
        try:
            layer(x, routing).sum().backward()
        except PeerDied as error:
            return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("phase", "operation"),
    [
        ("queue_lend", "plan of lent experts"),
        ("queue_pull", "plan of lent experts"),
        ("queue_collect", "combine backward"),
    ],
)
def test_a_rank_that_ends_is_reported(pools: dict[int, RankPool], phase: str, operation: str) -> None:
    text = pools[2].run(exit_in, phase, timeout=60, expect_dead={1})[0]
    assert operation in text and "rank 1" in text
