"""Dispatchers, inputs and one layer for tests of the device executor over emulated ``peer_to_peer``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("moe_comm._C", reason="the native core is not built")

from moe_comm.dispatch.types import DispatchOptions, PeerToPeerOptions
from moe_comm.kernels import native
from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.overlap.options import Overlap
from moe_comm.topology import ExpertPlacement
from tests.layers.reference import draw
from tests.overlap.triton.common import interpreted

WORLD, D, F, EXPERTS = 3, 20, 8, 5
DEVICE = Overlap(executor="device")


def make_device_dispatcher(
    rank: int,
    world: int,
    experts: int,
    launcher: Any = None,
    timeout_s: float = 60,
    relay: bool = False,
    **options: Any,
) -> Any:
    from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher

    peer_options = PeerToPeerOptions(emulate=True, relay=relay)
    settings = DispatchOptions(timeout_s=timeout_s, peer_to_peer=peer_options, **options)
    # Dispatchers of a group share their memory and its launcher.
    group = dist.group.WORLD if launcher is None else dist.new_group()
    return PeerToPeerDispatcher(ExpertPlacement.of(experts, world), group, rank, settings, "cpu", launcher)


@contextmanager
def triton_on_cpus() -> Iterator[None]:
    interpreted("arrived_mm")
    native.TRITON_DEVICES.add("cpu")
    try:
        yield
    finally:
        native.TRITON_DEVICES.discard("cpu")


def slot_ids(kind: str, rank: int, experts: int, top_k: int) -> Tensor:
    """Return [T, K] ids; T differs between ranks."""
    tokens = 0 if kind == "no tokens on rank 0" and rank == 0 else 2 if kind == "few" else 14 + 5 * rank
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    if kind == "one expert":
        return torch.full_like(ids, experts - 1)
    if kind == "dropped":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -1)
    return torch.full_like(ids, -1) if kind == "no rows" else ids


def leaves_of(
    rank: int, experts: int, ids: Tensor, dtype: torch.dtype, hidden: int = D, biased: bool = False
) -> list[Tensor]:
    """Return x, routing weights, w13 and w2; and, if ``biased``, b13 and b2."""
    shapes = [(ids.shape[0], hidden), tuple(ids.shape), (experts, 2 * F, hidden), (experts, hidden, F)]
    shapes += [(experts, 2 * F), (experts, hidden)] if biased else []
    dtypes = dtype, torch.float32, *[dtype] * (len(shapes) - 2)
    seeds = range(10 * rank, 10 * rank + len(shapes))
    return [draw(*s, seed=seed, dtype=t).requires_grad_() for s, t, seed in zip(shapes, dtypes, seeds, strict=True)]


def run_layer(
    dispatcher: Any,
    ids: Tensor,
    overlap: Overlap | None,
    dtype: torch.dtype = torch.bfloat16,
    recompute: bool = False,
    complete: bool = False,
    hidden: int = D,
    biased: bool = False,
    activation: str = "swiglu",
) -> list[Tensor]:
    """Run a layer forward and backward. Return the output and all gradients."""
    from moe_comm.overlap.executors.choice import dispatch_rows

    rank, experts = dispatcher.rank, len(dispatcher.local_experts)
    x, weights, *tensors = leaves = leaves_of(rank, experts, ids, dtype, hidden, biased)
    call = dispatch_rows(dispatcher, x, ids, weights, overlap, width=F)
    if complete:
        call.complete()
        dispatcher.dispatch(x.detach(), ids)  # another dispatch of the group
    mlp = ExpertMLP((*tensors, None, None)[:4], activation_of(activation), recompute)
    with call.abort_on_error():
        rows = call.compute(call.rows, call.handle.rows_per_expert, mlp)
    y = call.combine(rows)
    return [y.detach(), *torch.autograd.grad(y, leaves, draw(*y.shape, seed=99 + rank, dtype=dtype))]
