"""A rank that fails before its dispatch in a layer that lends experts over ``peer_to_peer`` with ``capacity_rows``: one
typed error on every rank at once, also in the first call, and the next call works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_comm.errors import InputError, PeerError, PeerRaised, RankMismatch
from moe_comm.layers import MoELayer
from tests.kernels.triton.test_device_lending import LENDS, interpreted
from tests.kernels.triton.test_native_lending import build as native_layer
from tests.layers.test_balance import ALWAYS, Run, build, routed
from tests.overlap.triton.common import needs_triton
from tests.pool import on_ranks

pytestmark = needs_triton
pytest.importorskip("moe_comm._C", reason="the native core is not built")
RUNS = {
    "planned on the device": LENDS,
    "room of the first call": replace(LENDS, capacity="memory"),
    "planned on the host": replace(LENDS, dtype=torch.float32),
}
Fails = Callable[[MoELayer, Tensor, Any, int], None]


def wrong_width(layer: MoELayer, x: Tensor, routing: Any, rank: int) -> None:
    with pytest.raises((InputError, PeerError), match="this layer's hidden size is 24"):
        layer(x[:, :-rank] if rank else x, routing)


def wrong_dtype(layer: MoELayer, x: Tensor, routing: Any, rank: int) -> None:
    with pytest.raises((InputError, RankMismatch, PeerError), match="dtype"):
        layer(x.to(torch.float16) if rank else x, routing)


def router_error(layer: MoELayer, x: Tensor, routing: Any, rank: int) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("of rank 1")

    hooks = [layer.router.register_forward_pre_hook(fail)] if rank else []
    with pytest.raises(ZeroDivisionError if rank else (PeerRaised, PeerError), match="of rank 1"):
        layer(x)
    for hook in hooks:
        hook.remove()


FAULTS = [wrong_width, wrong_dtype, router_error]


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("fails", FAULTS)
@on_ranks(2)
def test_every_rank_raises_and_the_next_call_works(rank: int, run: Run, fails: Fails) -> None:
    with interpreted():
        layer, fixed = build(replace(ALWAYS, memory=1.25), run), build(None, replace(run, capacity=None))
        layer.in_flight_hook = lambda: None  # separate operations: a native call is not repeated after an error
        x, routing = routed(layer, run, rank, 0)
        for _ in range(2):  # the first call shares the memory of the weights
            fails(layer, x, routing, rank)
            y = layer(x, routing)
            assert layer.last_plan is not None and layer.last_plan.lent
            assert torch.equal(y, fixed(x, routing))


@pytest.mark.parametrize("fails", FAULTS)
@on_ranks(2)
def test_every_rank_raises_where_the_others_are_in_the_first_native_call(rank: int, fails: Fails) -> None:
    with interpreted():
        layer = native_layer(LENDS, (21 + FAULTS.index(fails)) << 20)  # memory of its own: the error ends its use
        fails(layer, *routed(layer, LENDS, rank, 0), rank)
