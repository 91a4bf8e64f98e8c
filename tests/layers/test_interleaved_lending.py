"""Interleaved calls of layers that lend experts (``Balance``), compared with the same layers without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from moe_comm.layers.parallel.interleave import TurnParameters
from tests.layers.test_balance import ALWAYS, EXPERTS, PIPELINED, Run, build, routed
from tests.pool import on_ranks


@pytest.mark.parametrize("even", [0, 1, 2])
@on_ranks(2)
def test_interleaved_calls_use_their_own_copies(even: int, group: dist.ProcessGroup, rank: int) -> None:
    """The call ``even`` lends no experts. Gradients are added in the order of the calls nevertheless."""
    layers = [build(balance, Run("all_to_all", overlap=PIPELINED)) for balance in (replace(ALWAYS, copies=1), None)]
    outputs, gradients = [], []
    for layer in layers:
        turns, calls, given, lends = TurnParameters(), [], [], []
        for turn in range(3):
            x, routing = routed(layer, Run(), rank, turn)
            if turn == even:
                ids = torch.arange(x.shape[0], device="cpu").unsqueeze(1) + torch.tensor([0, 4], device="cpu")
                routing = routing._replace(ids_TK=ids % EXPERTS)
            given.append((x, routing))
            with turns.used(turn, layer):
                calls.append(layer.begin(x, routing))
            lends.append(layer.last_plan is not None and bool(layer.last_plan.lent))
        assert lends == [layer is layers[0] and turn != even for turn in range(3)]
        for turn, call in enumerate(calls):
            with turns.used(turn, layer):
                call.compute()
        results = [call.result() for call in calls]
        torch.stack([one.square().sum() for one in results]).sum().backward()
        outputs.append([*(one.detach() for one in results), *(x.grad for x, _ in given)])
        gradients.append([param.grad for param in layer.experts.parameters()])
    assert all(map(torch.equal, *outputs))
    for lent, fixed in zip(*gradients, strict=True):
        assert (lent - fixed).abs().max() <= 1e-6 * fixed.abs().max()
    for layer in layers:
        layer.dispatcher.close()
