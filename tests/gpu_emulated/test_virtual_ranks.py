"""Virtual ranks: all ranks of ``peer_to_peer`` in one process have the bits of one rank that holds all experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.virtual import run_ranks, virtual_ranks
from moe_comm.dispatch import DispatchOptions
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.errors import RoutingError
from moe_comm.topology import ExpertPlacement

pytest.importorskip("moe_comm._C", reason="the native core is not built")

EXPERTS, TOKENS, TOP_K, HIDDEN = 10, 6, 3, 24
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def options_for(device: str) -> DispatchOptions:
    peers = PeerToPeerOptions(heap_bytes=1 << 20, capacity_rows=64, emulate=device == "cpu")
    return DispatchOptions(peer_to_peer=peers, timeout_s=60 if device == "cpu" else 10)


def random_inputs(rank: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(TOKENS + rank, HIDDEN, generator=g)
    ids_TK = torch.rand(len(x_TD), EXPERTS, generator=g).topk(TOP_K).indices
    ids_TK[0, 0] = -1
    return x_TD.to(device), ids_TK.to(device), torch.rand(ids_TK.shape, generator=g).to(device)


def dispatch_and_combine(dispatcher: Dispatcher, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Dispatch, multiply the rows of expert e by e + 1, and combine."""
    sent = dispatcher.dispatch(x_TD, ids_TK)
    sizes = torch.tensor(sent.handle.rows_per_expert)
    scales = torch.tensor(list(dispatcher.local_experts)).repeat_interleave(sizes).unsqueeze(1).to(x_TD.device)
    return dispatcher.combine(sent.rows_RD * (scales + 1), weights_TK, sent.handle)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_in_one_process_have_the_bits_of_one_rank(world: int, device: str) -> None:
    reference = PeerToPeerDispatcher(ExpertPlacement.balanced(EXPERTS, 1), None, 0, options_for(device), device)
    ranks = virtual_ranks(ExpertPlacement.balanced(EXPERTS, world), options_for(device), device)

    def work(dispatcher: PeerToPeerDispatcher) -> list[Tensor]:
        return [dispatch_and_combine(dispatcher, *random_inputs(dispatcher.rank, device)) for _ in range(3)]

    for rank, outputs in enumerate(run_ranks(ranks, work)):
        expected = dispatch_and_combine(reference, *random_inputs(rank, device))
        assert all(torch.equal(y_TD, expected) for y_TD in outputs)


def test_gradients_of_ranks_in_one_process_have_the_bits_of_one_rank() -> None:
    """CPU tensors only, because their backward runs in the calling thread."""

    def work(dispatcher: PeerToPeerDispatcher, rank: int) -> list[Tensor]:
        x_TD, ids_TK, weights_TK = random_inputs(rank, "cpu")
        x_TD.requires_grad_()
        weights_TK.requires_grad_()
        dispatch_and_combine(dispatcher, x_TD, ids_TK, weights_TK).square().sum().backward()
        assert x_TD.grad is not None and weights_TK.grad is not None
        return [x_TD.grad, weights_TK.grad]

    reference = PeerToPeerDispatcher(ExpertPlacement.balanced(EXPERTS, 1), None, 0, options_for("cpu"), "cpu")
    ranks = virtual_ranks(ExpertPlacement.balanced(EXPERTS, 4), options_for("cpu"), "cpu")
    for rank, gradients in enumerate(run_ranks(ranks, lambda dispatcher: work(dispatcher, dispatcher.rank))):
        assert all(map(torch.equal, gradients, work(reference, rank)))


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_id_on_one_rank_raises_on_all_and_ranks_stay_usable(device: str) -> None:
    ranks = virtual_ranks(ExpertPlacement.balanced(EXPERTS, 3), options_for(device), device)

    def work(dispatcher: PeerToPeerDispatcher) -> tuple[Any, bool]:
        x_TD, ids_TK, weights_TK = random_inputs(dispatcher.rank, device)
        bad_TK = ids_TK.clone()
        bad_TK[1, 1] = 99 if dispatcher.rank == 1 else 0
        error: Exception | None = None
        try:
            dispatcher.dispatch(x_TD, bad_TK)
        except RoutingError as caught:
            error = caught
        return error, dispatch_and_combine(dispatcher, x_TD, ids_TK, weights_TK).shape == x_TD.shape

    for error, works_on in run_ranks(ranks, work):
        assert isinstance(error, RoutingError) and "99" in str(error) and works_on
