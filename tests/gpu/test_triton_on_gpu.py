"""The four fused operators in Triton on one GPU. Inputs are small whole numbers, so every sum of products is exact."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.overlap.expert_operators import dispatch_matmul, matmul_combine
from moe_comm.overlap.linear import gather_matmul, matmul_scatter
from moe_comm.overlap.options import Overlap
from moe_comm.runtime.launch import init_ranks
from moe_comm.topology import ExpertPlacement
from tests.overlap.common import combine_reference, dispatch_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
FUSED = Overlap(backend="triton")


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with init_ranks("cuda", timeout_s=60):
        yield dist.group.WORLD


def whole_numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("name", ["gather_matmul", "matmul_scatter"])
@pytest.mark.parametrize(("rows", "width", "out"), [(5, 24, 17), (256, 512, 384)])
def test_linear_operators_equal_the_float64_product(
    name: str, rows: int, width: int, out: int, group: dist.ProcessGroup
) -> None:
    operator = gather_matmul if name == "gather_matmul" else matmul_scatter
    x, w = whole_numbers(rows, width, seed=1).requires_grad_(), whole_numbers(out, width, seed=2).requires_grad_()
    grad = whole_numbers(rows, out, seed=3)
    y = operator(x, w, group, FUSED)
    results = [y.detach(), *torch.autograd.grad(y, (x, w), grad)]
    wide_x, wide_w, wide_grad = (t.detach().double() for t in (x, w, grad))
    expected = [wide_x @ wide_w.T, wide_grad @ wide_w, wide_grad.T @ wide_x]
    for value, exact in zip(results, expected, strict=True):
        assert torch.equal(value, exact.to(value.dtype))


def test_fused_expert_operators_equal_the_unfused_ones() -> None:
    tokens, width, ffn, experts, top_k = 37, 64, 48, 4, 2
    dispatcher = PeerToPeerDispatcher(ExpertPlacement.of(experts, 1), None, 0, device="cuda")
    ids_TK = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).topk(top_k).indices.cuda()
    x, w1, w2 = (
        whole_numbers(tokens, width, seed=1),
        whole_numbers(experts, ffn, width, seed=2),
        whole_numbers(experts, width, ffn, seed=3),
    )
    weights_TK = torch.full((tokens, top_k), 0.5, device="cuda")
    h, handle = dispatch_matmul(dispatcher, x, ids_TK, w1, FUSED)
    assert torch.equal(h, dispatch_reference(dispatcher, x, ids_TK, w1))
    h = h.clamp(-2, 2)
    y = matmul_combine(h, w2, weights_TK, handle)
    assert torch.equal(y, combine_reference(h, w2, weights_TK, handle))
