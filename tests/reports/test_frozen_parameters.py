"""Parameters may be frozen if they are on every rank; else each rank raises before rows move. No rank waits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import moe_comm
from moe_comm import DispatchOptions, MoEConfig, MoELayer, RouterConfig
from moe_comm.errors import MoeCommError
from moe_comm.layers.data_parallel import expert_parameters
from tests.pool import on_ranks

HIDDEN = 8
CONFIG = MoEConfig(hidden=HIDDEN, ffn=16, router=RouterConfig(4, 2), shared_ffn=8)


class Model(nn.Module):
    """Two MoE layers after a linear."""

    def __init__(self, group: Any, overlap: Any = None, backend: str = "auto") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        options = DispatchOptions(timeout_s=100.0)
        self.moe = nn.ModuleList(
            MoELayer.build(CONFIG, group, seed=n, label=f"{n}", options=options, overlap=overlap, backend=backend)
            for n in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for moe in self.moe:
            x = x + moe(x)
        return x


def experts(model: Model) -> list[Any]:
    return list(expert_parameters(model).values())


def first_stack(model: Model) -> list[Any]:
    return [model.moe[1].experts.w13]  # type: ignore[union-attr]


def router(model: Model) -> list[Any]:
    return [model.moe[1].router.weight]  # type: ignore[union-attr]


def shared_expert(model: Model) -> list[Any]:
    return [model.moe[1].shared.w2]  # type: ignore[union-attr]


def first_layer(model: Model) -> list[Any]:
    return list(model.first.parameters())


def everything(model: Model) -> list[Any]:
    return list(model.parameters())


def nothing(model: Model) -> list[Any]:
    return []


def all_but_experts(model: Model) -> list[Any]:
    return [param for name, param in model.named_parameters() if ".experts." not in name]


FROZEN: tuple[Callable[[Model], list[Any]], ...] = (
    experts,
    first_stack,
    router,
    shared_expert,
    first_layer,
    everything,
    nothing,
)


def step(model: Model, rank: int, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> str:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(rank))
    try:
        with context():
            y = model(x)
        y.square().sum().backward()
        moe_comm.sync_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    except MoeCommError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@on_ranks(2)
@pytest.mark.parametrize(("backend", "overlap"), [("shared_memory", None), ("all_to_all", "auto")])
def test_what_is_frozen_on_one_rank_only_raises_on_every_rank(
    group: dist.ProcessGroup, rank: int, backend: str, overlap: Any
) -> None:
    for everywhere in (nothing, all_but_experts):
        harmless = (nothing,) if everywhere is nothing else (nothing, router, shared_expert, first_layer)
        for frozen in FROZEN:
            model = Model(group, overlap, backend)
            for param in everywhere(model) + (frozen(model) if rank else []):
                param.requires_grad_(False)
            message = step(model, rank)
            assert message == "" if frozen in harmless else message.startswith("RankMismatch: "), (frozen, message)
    for context in (torch.no_grad, torch.inference_mode):
        for frozen in (nothing, all_but_experts):
            model = Model(group, overlap, backend)
            for param in frozen(model):
                param.requires_grad_(False)
            message = step(model, rank, context if rank else nullcontext)
            assert message.startswith("RankMismatch: "), (context, frozen, message)


def train(model: Model, x: Tensor, mask: Tensor | None, ranks: int = 1) -> tuple[dict[str, Tensor], float]:
    """Train the experts of ``mask`` for two steps, with the other parameters frozen. Returns weights and norm."""
    if mask is not None:
        for param in all_but_experts(model):
            param.requires_grad_(False)
        for moe in model.moe:
            rows = mask[list(moe.local_experts)].view(-1, 1, 1)  # type: ignore[operator,arg-type]
            for param in moe.experts.parameters():  # type: ignore[union-attr]
                param.register_hook(lambda grad, rows=rows: grad * rows)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.5, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        if ranks > 1:
            moe_comm.sync_gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return moe_comm.state_dict(model), float(norm)


@on_ranks(2)
@pytest.mark.parametrize("trained", [(0, 3), (2,)])
def test_any_experts_may_be_trained(group: dist.ProcessGroup, rank: int, world: int, trained: tuple[int, ...]) -> None:
    mask = torch.zeros(4, dtype=torch.bool)
    mask[list(trained)] = True
    x = torch.randn(world, 6, HIDDEN, generator=torch.Generator().manual_seed(0))
    want, want_norm = train(Model(None), x.flatten(0, 1), mask)
    got, norm = train(Model(group), x[rank], mask, world)
    assert norm == pytest.approx(want_norm, rel=1e-5)
    before = Model(None).state_dict()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-7)
        if ".experts." in name:
            assert torch.equal(got[name][~mask], before[name][~mask]) and not torch.equal(
                got[name][mask], before[name][mask]
            )
