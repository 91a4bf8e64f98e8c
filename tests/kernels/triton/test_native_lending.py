"""Calls that lend experts over ``peer_to_peer`` as one native call each way, with the bits of their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_comm.dispatch import DispatchOptions, PeerToPeerOptions
from moe_comm.dispatch.peer_to_peer import primitives
from moe_comm.errors import PeerError
from moe_comm.layers import MoELayer
from tests.kernels.triton.common import drawn
from tests.kernels.triton.test_device_call import emulated
from tests.layers.test_balance import ALWAYS, CONFIG, EXPERTS, Run, routed, with_biases
from tests.overlap.triton.common import needs_triton
from tests.pool import on_ranks
from tests.support.launches import HookedLauncher
from tests.support.python_driver import PythonDriver

pytestmark = needs_triton
pytest.importorskip("moe_comm._C", reason="the native core is not built")
BF16 = torch.bfloat16
PLAN = ["count", "scan", "lend", "assign", "pull"]
FORWARD = [*PLAN, "count", "scan", "push", "arrive", "meet", "sum"]
BACKWARD = ["meet", "spread", "meet", "sum", "meet", "collect"]
HEAP_BYTES = 5 << 22
launched: list[str] = []
"""Kernels of peer_to_peer that this process has launched in memory of ``HEAP_BYTES``."""


def build(run: Run, heap_bytes: int = HEAP_BYTES) -> MoELayer:
    """Return a layer that lends. Layers with the same number of bytes share the memory of peers."""
    peers = PeerToPeerOptions(emulate=True, capacity_rows=run.capacity, heap_bytes=heap_bytes)
    options = DispatchOptions(timeout_s=60, balance=ALWAYS, peer_to_peer=peers)
    config, group = replace(CONFIG, recompute=run.recompute), dist.group.WORLD
    return with_biases(MoELayer.build(config, group, backend="peer_to_peer", options=options, seed=3, dtype=run.dtype))


class Pair:
    """A layer with native calls, and the same layer with separate operations."""

    def __init__(self, rank: int, driver: PythonDriver, recompute: bool) -> None:
        self.rank, self.driver = rank, driver
        self.run = Run("peer_to_peer", dtype=BF16, capacity=200, recompute=recompute)
        self.native, self.separate = self.layers = build(self.run), build(self.run)
        self.separate.in_flight_hook = lambda: None

    def check(self, work: Callable[[MoELayer], list[Tensor]]) -> tuple[Any, ...]:
        """Compare the results of ``work`` of both layers. Return the experts that were lent in its last call."""
        expected = work(self.separate)
        launched.clear()
        actual = work(self.native)
        assert len(expected) == len(actual) and all(map(torch.equal, actual, expected))
        plans = self.native.last_plan, self.separate.last_plan
        assert plans[0] is not None and plans[1] is not None and plans[0].lent == plans[1].lent
        return tuple(plans[0].lent)

    def train(self, call: int, *, even: bool = False, by_router: bool = False, checkpointed: bool = False) -> Any:
        """Check a call and its backward pass. even: no expert is lent. by_router: the layer routes."""

        def work(layer: MoELayer) -> list[Tensor]:
            x, routing = self.routed(layer, call)
            if even:
                ids = (torch.arange(x.shape[0], device="cpu").unsqueeze(1) + torch.tensor([0, 4])) % EXPERTS
                routing = routing._replace(ids_TK=ids)
            given = (x,) if by_router else (x, routing)
            y = checkpoint(layer, *given, use_reentrant=False) if checkpointed else layer(*given)
            y.backward(drawn(*y.shape, dtype=BF16, seed=call))
            return [y.detach(), *grads_of(layer, [x, routing.weights_TK])]

        return self.check(work)

    def routed(self, layer: MoELayer, call: int) -> tuple[Tensor, Any]:
        """Return the tokens and the routing of a call. ``native_calls`` counts from here, so without the router's."""
        given = routed(layer, self.run, self.rank, call)
        self.driver.named.clear()
        return given

    @property
    def native_calls(self) -> int:
        return self.driver.named.count("cuCtxGetCurrent")


def grads_of(layer: MoELayer, inputs: list[Tensor]) -> list[Tensor]:
    """Return the gradients of ``inputs`` and of the parameters."""
    found = [one.grad for one in (*inputs, *layer.parameters())]
    layer.zero_grad(set_to_none=True)
    return [grad for grad in found if grad is not None]


@contextmanager
def pair(rank: int, *, recompute: bool = False) -> Iterator[Pair]:
    driver = PythonDriver()
    with emulated(driver), pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "launcher_for", lambda *_: HookedLauncher(launched.append))
        yield Pair(rank, driver, recompute)


@on_ranks(2, 4)
def test_calls_that_lend_are_one_native_call_each_way(rank: int, world: int) -> None:
    with pair(rank) as both:
        lent = [both.train(call) for call in range(2)]
        assert both.native_calls == 0  # the second call is recorded
        lent.append(both.train(3))
        assert all(lent) and len(set(lent)) > 1
        assert both.native_calls == 2 and launched == FORWARD + BACKWARD
        if world == 4:
            return
        with torch.no_grad():  # as an optimizer does
            for layer in both.layers:
                for param in layer.experts.parameters():
                    param.mul_(1.5)
        assert both.train(1) and both.native_calls == 2
        assert both.train(2, even=True) == () and both.native_calls == 2
        both.native.in_flight_hook = (lambda: None) if rank else None  # ranks may differ
        assert both.train(3)


@on_ranks(2)
def test_the_router_and_inference(rank: int) -> None:
    with pair(rank) as both:
        for call in range(3):
            both.train(call, by_router=True)
        assert both.native_calls == 2

        def infer(layer: MoELayer) -> list[Tensor]:
            with torch.no_grad():
                return [layer(*both.routed(layer, call)) for call in range(3)]

        assert both.check(infer) and both.native_calls == 1 and launched[-len(FORWARD) :] == FORWARD


@on_ranks(2, 4)
def test_backward_copies_weights_again_if_another_call_has_used_the_slots(rank: int) -> None:
    with pair(rank) as both:

        def work(layer: MoELayer) -> list[Tensor]:
            calls = [both.routed(layer, call) for call in (1, 3)]
            ys = [layer(*given) for given in calls]
            for y in ys:
                y.backward(drawn(*y.shape, dtype=BF16))
            inputs = [one for x, routing in calls for one in (x, routing.weights_TK)]
            return [*(y.detach() for y in ys), *grads_of(layer, inputs)]

        for _ in range(3):
            assert both.check(work) and launched.count("pull") == 4
        assert both.native_calls == 4


@on_ranks(2)
def test_recomputation(rank: int) -> None:
    with pair(rank, recompute=True) as both:
        for call in range(3):
            assert both.train(call, checkpointed=True)
        # Backward is that of the first call, and the recomputed call has used the slots since.
        assert launched == [*FORWARD, *FORWARD, *BACKWARD[:2], "pull", *BACKWARD[2:]]


@on_ranks(2)
def test_frozen_parameters(rank: int) -> None:
    with pair(rank) as both:
        for layer in both.layers:
            layer.experts.w13.requires_grad_(False)
        for call in range(3):
            assert both.train(call)
        assert both.native_calls == 2 and launched == FORWARD + BACKWARD
        for layer in both.layers:
            layer.experts.requires_grad_(False)
        for call in range(3):
            assert both.train(call)
        assert both.native_calls == 2 and launched == FORWARD + BACKWARD[:-2]


@on_ranks(2)
def test_a_fault_of_a_native_call_is_raised_on_every_rank(rank: int) -> None:
    with emulated(PythonDriver()):
        for fault, text in ((8, "outside"), (-2, "NaN")):
            run = Run(dtype=BF16, capacity=96)
            layer = build(run, (9 + fault) << 20)  # memory of its own: the error ends its use
            x, routing = routed(layer, run, rank, 0)
            bad = routing._replace(ids_TK=routing.ids_TK.masked_fill(torch.tensor(rank == 1), fault))
            with pytest.raises(PeerError, match=text):
                layer(x, bad)
