"""The device executor on a GPU: results and gradients of the serial executor, for ranks that share the GPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch import DispatchOptions, PeerToPeerOptions
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.gpu.blocks import SHARING
from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.overlap.executors.choice import dispatch_rows
from moe_comm.overlap.options import Overlap
from moe_comm.topology import ExpertPlacement
from tests.layers.reference import draw
from tests.pool import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
D, F, EXPERTS, TOP_K = 512, 256, 8, 4


@pytest.fixture(scope="module", params=[1, 2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, SHARING, "1")  # the ranks inherit the variable, and torch reads it
        with RankPool(request.param) as ranks:
            yield ranks


def _run(dispatcher: Any, ids_TK: Tensor, leaves: list[Tensor], overlap: Overlap | None) -> list[Tensor]:
    """Return the output of the experts and all gradients."""
    x_TD, weights_TK, *tensors = leaves
    call = dispatch_rows(dispatcher, x_TD, ids_TK, weights_TK, overlap, width=F)
    activation = "swiglu" if len(tensors) == 2 else "clamped_swiglu"
    mlp = ExpertMLP((*tensors, None, None)[:4], activation_of(activation))
    with call.abort_on_error():
        rows = call.compute(call.rows, call.handle.rows_per_expert, mlp)
    y_TD = call.combine(rows)
    grad_TD = draw(*y_TD.shape, seed=9, dtype=y_TD.dtype).cuda()
    return [y_TD.detach(), *torch.autograd.grad(y_TD, leaves, grad_TD)]


def _compare(rank: int, world: int, tokens: int) -> None:
    options = DispatchOptions(timeout_s=20, peer_to_peer=PeerToPeerOptions(heap_bytes=128 << 20))
    placement = ExpertPlacement.of(EXPERTS, world)
    group = dist.group.WORLD if world > 1 else None
    dispatcher = PeerToPeerDispatcher(placement, group, rank, options, "cuda")
    mine = len(dispatcher.local_experts)
    plain = (tokens, D), (tokens, TOP_K), (mine, 2 * F, D), (mine, D, F)
    biases = (mine, 2 * F), (mine, D)
    for seed in range(4):
        shapes = (*plain, *biases) if seed == 3 else plain  # the last one is a layer of gpt-oss
        dtypes = torch.bfloat16, torch.float32, *[torch.bfloat16] * (len(shapes) - 2)
        generator = torch.Generator().manual_seed(10 * rank + seed)
        ids_TK = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices.cuda()
        leaves = [
            draw(*shape, seed=100 * rank + 10 * seed + i, dtype=dtype).cuda().requires_grad_()
            for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        expected = _run(dispatcher, ids_TK, leaves, None)
        actual = _run(dispatcher, ids_TK, leaves, Overlap(executor="device"))
        names = ("output", "x", "weights", "w13", "w2", "b13", "b2")[: len(actual)]
        for name, got, want in zip(names, actual, expected, strict=True):
            assert torch.equal(got, want), (seed, name, float((got - want).abs().max()))


@pytest.mark.parametrize("tokens", [37, 1024])
def test_device_executor_has_the_bits_of_the_serial_one(pool: RankPool, tokens: int) -> None:
    pool.run(_compare, tokens, timeout=60)
