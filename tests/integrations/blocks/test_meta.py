"""``swap_moe`` with blocks on meta, and with experts that are wider than those of a check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import moe_comm
from moe_comm.errors import UnsupportedModel
from tests.integrations.blocks.styles import (
    EXPERTS,
    STYLES,
    D,
    FusedMLP,
    InlineMath,
    Megatron,
    Mixtral,
    Model,
    NoisyTopK,
    StMoE,
    ThreeLayers,
    TwoLayers,
)
from tests.integrations.blocks.test_blocks import Unusual, _adapter
from tests.pool import on_ranks

WIDE = 100


@pytest.fixture(autouse=True)
def _without_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_comm.integrations.blocks.adapter._adapters", {})


def _model(style: type[nn.Module]) -> Model:
    torch.manual_seed(0)
    return Model(style)


ALL = pytest.mark.parametrize("style", [*STYLES, InlineMath], ids=lambda style: style.__name__)


@on_ranks(2)
@ALL
def test_a_model_on_meta_has_the_parameters_of_this_rank(
    style: type[nn.Module], rank: int, group: ProcessGroup
) -> None:
    _compare(style, rank, group)


@on_ranks(4)
@pytest.mark.parametrize("style", [Mixtral, InlineMath])
def test_a_model_on_meta_on_four_ranks(style: type[nn.Module], rank: int, group: ProcessGroup) -> None:
    _compare(style, rank, group)


@ALL
def test_a_model_on_meta_in_one_process(style: type[nn.Module]) -> None:
    _compare(style, 0, None)


def _compare(style: type[nn.Module], rank: int, group: ProcessGroup | None) -> None:
    moe_comm.block_adapter(InlineMath)(_adapter)
    full = _model(style).state_dict()
    real = moe_comm.swap_moe(_model(style), group)
    with torch.device("meta"):
        model = Model(style)
    state = torch.get_rng_state()
    moe_comm.swap_moe(model, group)
    assert torch.equal(torch.get_rng_state(), state)
    shapes = {name: (param.shape, param.dtype, param.requires_grad) for name, param in real.named_parameters()}
    assert {n: (p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()} == shapes
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(full)
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(rank))
    results = []
    for swapped in (real, model):
        torch.manual_seed(rank)
        logits, _ = swapped(x)
        logits.square().sum().backward()
        results.append((logits, {name: param.grad for name, param in swapped.named_parameters()}))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@on_ranks(2)
def test_a_block_on_meta_that_computes_something_else_is_refused(group: ProcessGroup) -> None:
    with torch.device("meta"):
        model = Model(Unusual)
    with pytest.raises(UnsupportedModel, match="differs from the original"):
        moe_comm.swap_moe(model, group)
    assert type(model.blocks[0]) is Unusual and all(param.is_meta for param in model.parameters())


class WideBiases(NoisyTopK):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(TwoLayers(width=WIDE) for _ in range(EXPERTS))


class WideThree(Mixtral):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(ThreeLayers(WIDE) for _ in range(EXPERTS))


class WideFused(Megatron):
    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts.local_experts:
            assert isinstance(expert, FusedMLP)
            expert.linear_fc1, expert.linear_fc2 = nn.Linear(D, 2 * WIDE, False), nn.Linear(WIDE, D, False)


class WideStack(StMoE):
    def __init__(self) -> None:
        super().__init__()
        self.experts.w1 = nn.Parameter(torch.randn(EXPERTS, D, WIDE) * 0.1)
        self.experts.w2 = nn.Parameter(torch.randn(EXPERTS, WIDE, D) * 0.1)


class Interleaved(Mixtral):
    """Gate and up alternate in one layer, whose width is in the code."""

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w_in, self.w_out = nn.Linear(D, 2 * WIDE), nn.Linear(WIDE, D)

        def halves(self, x: Tensor) -> Tensor:
            return self.w_in(x).view(-1, self.w_in.weight.shape[0] // 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.halves(x)
            y: Tensor = self.w_out(F.silu(h[..., 0]) * h[..., 1])
            return y

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(self.Expert() for _ in range(EXPERTS))


class FixedWidth(Interleaved):
    class Expert(Interleaved.Expert):
        def halves(self, x: Tensor) -> Tensor:
            return self.w_in(x).view(-1, WIDE, 2)


@on_ranks(2)
@pytest.mark.parametrize(
    "style", [WideBiases, WideThree, WideFused, WideStack, Interleaved, FixedWidth], ids=lambda style: style.__name__
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wide_experts(style: type[nn.Module], device: str, rank: int, group: ProcessGroup) -> None:
    original: Any = _model(style)
    with torch.device(device):
        model: Any = Model(style)
    if device == "cpu":
        model.load_state_dict(original.state_dict())
    moe_comm.swap_moe(model, group)
    assert model.blocks[0].block_plan.narrow == (style is not FixedWidth)
    if device == "meta":
        model.to_empty(device="cpu")
        model.load_state_dict(original.state_dict())
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(rank))
    torch.testing.assert_close(model.eval()(x), original.eval()(x), rtol=1e-5, atol=1e-5)
