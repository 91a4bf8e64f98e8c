"""Copies of lent experts whose weights are sent when weights change, before the next call."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import moe_comm
from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.dispatch import DispatchOptions
from moe_comm.errors import InputError, PeerDied, PeerRaised
from moe_comm.layers import MoELayer, RouterConfig
from moe_comm.topology.balance import Balance
from tests.layers.reference import draw
from tests.layers.test_balance import ALWAYS, CONFIG, HIDDEN, Run, build, routed
from tests.pool import RankPool, on_ranks

EXPERTS, TOKENS = 16, 256


def popularity(kind: str, steps: int) -> list[torch.Tensor]:
    """Return the share of each expert in each step: it drifts by about 20%, or alternates between two sets."""
    generator = torch.Generator().manual_seed(5)

    def normal() -> torch.Tensor:
        return torch.randn(EXPERTS, generator=generator, dtype=torch.float64)

    if kind == "alternating":
        sets = [
            torch.ones(EXPERTS, dtype=torch.float64).index_fill(0, torch.tensor(hot), 8) for hot in ([0, 1], [9, 10])
        ]
        return [sets[step % 2] for step in range(steps)]
    logs = [normal()]
    while len(logs) < steps:
        logs.append(logs[-1] + 0.2 * normal())
    return [one.exp() for one in logs]


@on_ranks(4)
@pytest.mark.parametrize("kind", ["drifting", "alternating"])
def test_most_copies_are_resident(group: dist.ProcessGroup, rank: int, kind: str) -> None:
    config, steps, first = replace(CONFIG, router=RouterConfig(EXPERTS, 2)), 24, 4
    options = DispatchOptions(balance=Balance(rows=1.0, worth=16))
    layer = MoELayer.build(config, group, backend="all_to_all", options=options, seed=3)
    generator = torch.Generator().manual_seed(rank)
    for step, share_E in enumerate(popularity(kind, steps)):
        if step == first:
            layer.take_lent(layer.copies)
        for _ in range(2):
            x = draw(TOKENS, HIDDEN, seed=rank, dtype=torch.float32)
            ids = torch.multinomial(share_E.expand(TOKENS, -1), 2, generator=generator)
            layer(x, layer.router(x, 1)._replace(ids_TK=ids)).sum().backward()
        moe_comm.sync_gradients(layer, group)
        layer.zero_grad()
    _, fixed, busiest, _, lent, resident, nbytes = layer.take_lent(layer.copies).tolist()
    assert fixed > 1.2 * busiest and resident >= 0.75 * lent > 0
    counts = torch.tensor([nbytes], dtype=torch.int64, device="cpu")
    dist.all_reduce(counts)
    weights = sum(one[0].nbytes for one in layer.experts.parameters())
    assert int(counts) <= 3 * lent * weights  # each lent expert returns a gradient
    layer.dispatcher.close()


@on_ranks(2)
@pytest.mark.parametrize("shared", [True, False])
def test_the_first_call_after_a_change_publishes(group: dist.ProcessGroup, rank: int, shared: bool) -> None:
    configure_collectives(CollectiveOptions(shared_memory=shared))
    layers = [build(balance, Run("all_to_all")) for balance in (ALWAYS, None)]
    layer, fixed = layers
    copies = layer.copies
    assert copies is not None
    x, routing = routed(layer, Run(), rank, 0)
    layer(x, routing).sum().backward()
    assert layer.last_plan is not None and layer.last_plan.resident == 0
    homes = [layer.placement.homes[one.expert] for one in layer.last_plan.lent]
    weights = sum(one[0].nbytes for one in layer.experts.parameters())
    for step in range(3):
        moe_comm.sync_gradients(layer, group)
        with torch.no_grad():
            for one in layers:
                for param in one.experts.parameters():
                    param.mul_(1.01)
                    param.grad = None
        before = copies.published_bytes
        layer.prefetch()
        assert copies.published_bytes - before == homes.count(rank) * weights
        if step == 1:  # an error after the weights are on their way
            for one in layers:
                with pytest.raises(InputError, match="hidden"):
                    one(x[:, :-rank] if rank else x, routing)
        with torch.no_grad():
            assert torch.equal(layer(x, routing), fixed(x, routing))
        for _ in range(2):
            y = layer(x, routing)
            assert torch.equal(y, fixed(x, routing))
            assert copies.published_bytes - before == homes.count(rank) * weights, "sent again"
            assert layer.last_plan.resident == len(layer.last_plan.lent) > 0
        y.sum().backward()
    assert set(homes) == {0}
    with torch.no_grad():
        for param in (param for one in layers for param in one.experts.parameters() if rank == 0):
            param.mul_(2)  # the other rank has not changed its weights
    if rank == 0:
        copies.weights_changed()  # as load_state_dict on one rank
    assert torch.equal(layer(x, routing), fixed(x, routing))
    assert layer.last_plan.resident == len(layer.last_plan.lent) > 0
    copies.forget()
    assert torch.equal(layer(x, routing), fixed(x, routing))
    assert layer.last_plan.resident == 0 < len(layer.last_plan.lent)
    for one in layers:
        one.dispatcher.close()
    configure_collectives(CollectiveOptions())


@on_ranks(2)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shared", [True, False])
def test_an_error_before_the_plan_is_raised_on_every_rank(
    group: dist.ProcessGroup, rank: int, shared: bool, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_collectives(CollectiveOptions(shared_memory=shared))
    layer = build(ALWAYS, Run("all_to_all"))
    x, routing = routed(layer, Run(), rank, 0)
    expected = layer(x, routing)
    expected.sum().backward()
    moe_comm.sync_gradients(layer, group)
    if rank == 0:  # the other rank sends weights in its call only
        layer.prefetch()

    def fail(*args: object) -> None:
        raise ValueError("no route")

    with monkeypatch.context() as patch:
        if rank:
            patch.setattr(layer.router, "forward", fail)
        with pytest.raises(ValueError if rank else PeerRaised, match="no route"):
            layer.begin(x) if interleaved else layer(x)
    assert torch.equal(layer(x, routing), expected)
    assert layer.last_plan is not None and layer.last_plan.resident == len(layer.last_plan.lent) > 0
    layer.dispatcher.close()
    configure_collectives(CollectiveOptions())


def exit_while_weights_are_sent(rank: int, world: int, arg: None) -> str:
    configure_collectives(CollectiveOptions(shared_memory=False))
    layer = build(ALWAYS, Run("all_to_all"))
    x, routing = routed(layer, Run(), rank, 0)
    layer(x, routing).sum().backward()
    moe_comm.sync_gradients(layer, dist.group.WORLD)
    try:
        if rank:
            os._exit(9)
        layer.prefetch()
        layer(x, routing)
    except PeerDied as error:
        return str(error)
    return "nothing raised"


def test_a_rank_that_ends_while_weights_are_sent_is_reported(pools: dict[int, RankPool]) -> None:
    text = pools[2].run(exit_while_weights_are_sent, None, timeout=60, expect_dead={1})[0]
    assert "publishing lent experts" in text and "rank 1" in text
