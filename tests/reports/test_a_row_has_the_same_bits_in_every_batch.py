"""The result of a token does not depend on the number of rows it is computed with, in any layer with the bits contract.

torch's CPU loops compute ``gelu``, ``silu`` and others with another formula for the last elements of a tensor, for
strided tensors and for a single row.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_comm.kernels.activations import ACTIVATIONS, Activation, glu
from moe_comm.kernels.rms_norm import rms_norm
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig, SharedExpert
from tests.layers.reference import draw
from tests.pool import RankPool

ROWS = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OWN: dict[str, Activation] = {
    "gelu gate": Activation("gelu gate", glu(F.gelu)),
    "silu gate": Activation("silu gate", glu(F.silu)),
    "tanh gelu": Activation("tanh gelu", lambda x: F.gelu(x, approximate="tanh"), gated=False),
    "mish": Activation("mish", F.mish, gated=False),
    "elu": Activation("elu", F.elu, gated=False),
    "pairs": Activation("pairs", lambda h: F.softplus(h[..., ::2]) * h[..., 1::2], interleaved=True),
}
"""Functions of users."""
EVERY = {**ACTIVATIONS, **OWN}


def with_gradients(fn: Callable[[Tensor], Tensor], x_TD: Tensor, grad_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of ``x_TD``, whose layout is kept; gradients of parameters are added."""
    x_TD = x_TD.detach().requires_grad_()
    y_TD = fn(x_TD)
    y_TD.backward(grad_TD)
    assert x_TD.grad is not None
    return y_TD.detach(), x_TD.grad


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_activation(name: str, dtype: torch.dtype) -> None:
    """Of rows that are dense, a range of a buffer, or columns of wider rows."""
    activation = EVERY[name]
    for width in (1, 5, 12, 33, 64):
        h_RG = draw(40, width * (2 if activation.gated else 1), dtype=torch.float64).mul(2).to(dtype)
        grad_RF = draw(40, width, seed=1, dtype=torch.float64).to(dtype)
        whole = with_gradients(activation, h_RG, grad_RF)
        for rows in ROWS:
            part = slice(3, 3 + rows)
            wide = torch.cat([h_RG[part], h_RG[part]], 1)[:, : h_RG.shape[1]]
            for h, grad in (
                (h_RG[part].clone(), grad_RF[part].clone()),
                (h_RG[part], grad_RF[part]),
                (wide, grad_RF[part]),
            ):
                got = with_gradients(activation, h, grad)
                assert all(torch.equal(a, b[part]) for a, b in zip(got, whole, strict=True)), (width, rows)


@pytest.mark.parametrize("threads", [2, 3])
def test_an_activation_with_several_threads(threads: int) -> None:
    """torch divides a loop over threads from 32768 elements on."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name in ("geglu", "geglu_tanh", "silu", *OWN):
            activation, width = EVERY[name], 77
            h_RG = draw(1200, width * (2 if activation.gated else 1))
            whole = activation(h_RG)
            for rows in (1, 213, 427, 655, 1199):
                assert torch.equal(activation(h_RG[1 : 1 + rows]), whole[1 : 1 + rows]), (name, rows)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("hidden", "ffn"), [(16, 12), (7, 5)])
def test_a_shared_expert(name: str, hidden: int, ffn: int) -> None:
    torch.manual_seed(0)
    shared = SharedExpert(hidden, ffn, EVERY[name], gate=True)
    shared.reset_parameters(std=0.5)
    x_TD, grad_TD = draw(40, hidden), draw(40, hidden, seed=1)
    whole = with_gradients(shared, x_TD, grad_TD)
    for rows in ROWS:
        part = slice(2, 2 + rows)
        got = with_gradients(shared, x_TD[part], grad_TD[part])
        assert all(torch.equal(a, b[part]) for a, b in zip(got, whole, strict=True)), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm(dtype: torch.dtype) -> None:
    for width in (1, 7, 16, 33, 100):
        x_TD, weight_D, grad_TD = (draw(*shape).to(dtype) for shape in ((40, width), (width,), (40, width)))
        whole = with_gradients(lambda x, weight=weight_D: rms_norm(x, weight, 1e-6), x_TD, grad_TD)
        for rows in ROWS:
            part = slice(3, 3 + rows)
            wide = torch.cat([x_TD[part], x_TD[part]], 1)[:, :width]
            for x in (x_TD[part], wide, x_TD[part].t().contiguous().t()):
                got = with_gradients(lambda x, weight=weight_D: rms_norm(x, weight, 1e-6), x, grad_TD[part])
                assert all(torch.equal(a, b[part]) for a, b in zip(got, whole, strict=True)), (width, rows)


IN_LAYERS = ("swiglu", "relu2", "gelu gate", "mish", "pairs")
"""The tests above have every activation."""
SPLITS = {4: ((0, 1, 2, 3), (5, 7, 8, 9), (15, 16, 17, 31), (1, 33, 1, 1)), 2: ((1, 5), (31, 1), (33, 46), (1, 0))}


def split_batches(rank: int, world: int, dtype: torch.dtype) -> list[str]:
    """Return where the bits of a layer over 4 and over 2 ranks differ from those of one rank."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    wrong = []
    for gated in (True, False):
        names = [name for name in IN_LAYERS if EVERY[name].gated == gated]
        router = RouterConfig(6, 3, score="softmax" if gated else "sigmoid")
        config = MoEConfig(20, 13, router, EVERY[names[0]], shared_ffn=11, shared_gate=True)
        groups = {1: None, 2: pair, 4: dist.group.WORLD}
        layers = {size: MoELayer.build(config, group, seed=3, dtype=dtype) for size, group in groups.items()}
        with torch.no_grad():
            for layer in layers.values():
                for param in (*layer.experts.parameters(), *layer.shared.parameters()):  # type: ignore[union-attr]
                    param.mul_(20)
        for name in names:
            for layer in layers.values():
                layer.experts.activation = layer.shared.activation = EVERY[name]  # type: ignore[union-attr]
            for size, split in ((ranks, split) for ranks, splits in SPLITS.items() for split in splits):
                x_TD, grad_TD = (draw(sum(split), 20, seed=seed).to(dtype) for seed in (0, 1))
                part = slice(*list(pairwise(accumulate(split, initial=0)))[rank % size])
                whole, own = step(layers[1], x_TD, grad_TD), step(layers[size], x_TD[part], grad_TD[part])
                mine = list(layers[size].local_experts)
                same = [torch.equal(a[part], b) for a, b in zip(whole[:2], own[:2], strict=True)]
                same += [torch.equal(a[mine], b) for a, b in zip(whole[2:], own[2:], strict=True)]
                if not all(same):
                    wrong.append(f"{name}, {size} ranks, {split}: {same}")
    return wrong


def step(layer: MoELayer, x_TD: Tensor, grad_TD: Tensor) -> list[Tensor]:
    """Return output, input gradient and the gradients of the experts."""
    layer.zero_grad()
    results = with_gradients(layer, x_TD, grad_TD)
    return [*results, *(param.grad for param in layer.experts.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_over_any_number_of_ranks(dtype: torch.dtype, pool4: RankPool) -> None:
    """Output, input gradient and expert gradients, with shared and routed experts."""
    assert pool4.run(split_batches, dtype) == [[]] * 4
