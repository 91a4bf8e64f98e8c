"""Optimizers that are wrong for experts of several ranks are refused by name at their first step, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

import moe_comm
from moe_comm import MoEConfig, MoELayer, RouterConfig
from moe_comm.errors import ConfigError
from moe_comm.layers.data_parallel import expert_parameters
from tests.pool import on_ranks

HIDDEN = 8


class LAMB(torch.optim.SGD):
    """Stands for an optimizer of another library, recognized by its name."""


class FusedLAMB(LAMB):
    pass


class MyOptimizer(torch.optim.LBFGS):
    pass


class Preconditioned(torch.optim.SGD):
    """Keeps a preconditioner of each dimension, in a list, as SOAP does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["GG"] = [torch.eye(size) for size in param.shape]
        return super().step(closure)


def build(rank: int) -> nn.Module:
    config = MoEConfig(hidden=HIDDEN, ffn=16, router=RouterConfig(4, 2))
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), MoELayer.build(config, dist.group.WORLD, seed=0))


def backward(model: nn.Module, rank: int) -> None:
    model(torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    moe_comm.sync_gradients(model)


def local_sgd(params: Any) -> torch.optim.Optimizer:
    return PostLocalSGDOptimizer(torch.optim.SGD(params, 0.1), PeriodicModelAverager(4, warmup_steps=100))


KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "partitions": ("over ranks", lambda params: ZeroRedundancyOptimizer(params, torch.optim.AdamW)),
    "averages": ("over ranks", local_sgd),
    "Adafactor": ("Adafactor computes statistics of whole tensors", torch.optim.Adafactor),
    "LAMB": ("LAMB computes statistics of whole tensors", lambda params: LAMB(params, 0.1)),
    "FusedLAMB": ("FusedLAMB computes", lambda params: FusedLAMB(params, 0.1)),
    "derived": ("MyOptimizer computes", lambda params: MyOptimizer(params)),
    "preconditioners": ("a preconditioner", lambda params: Preconditioned(params, 0.1)),
}


@on_ranks(2)
def test_unsupported_optimizers_raise_at_their_first_step(rank: int) -> None:
    for name, (text, kind) in KINDS.items():
        model = build(rank)
        optimizer = kind(model.parameters())
        before = expert_parameters(model)["1.experts.w13"].detach().clone()
        backward(model, rank)
        with pytest.raises(ConfigError) as caught:
            optimizer.step(lambda: 0.0) if name == "derived" else optimizer.step()
        assert text in str(caught.value) and "expert_parameters(model).values()" in str(caught.value), name
        if name not in ("averages", "preconditioners"):  # which are known after the first update
            assert torch.equal(expert_parameters(model)["1.experts.w13"], before), name


@on_ranks(2)
def test_averagers_take_replicated_parameters_only(rank: int) -> None:
    model = build(rank)
    backward(model, rank)
    experts = {id(param) for param in expert_parameters(model).values()}
    averager = PeriodicModelAverager(2)
    averager.average_parameters(param for param in model.parameters() if id(param) not in experts)
    with pytest.raises(ConfigError, match="a model averager averages"):
        averager.average_parameters(model.parameters())


@on_ranks(2)
def test_other_parameters_may_have_any_optimizer(rank: int) -> None:
    """Train experts element by element, and the other parameters by optimizers that are refused for experts."""
    model = build(rank)
    experts = expert_parameters(model)
    others = [param for name, param in model.named_parameters() if name not in experts]
    optimizers = [
        torch.optim.AdamW(experts.values(), 0.1),
        ZeroRedundancyOptimizer(others[:2], torch.optim.AdamW, lr=0.1),
        torch.optim.Adafactor(others[2:], 0.1),
    ]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model, rank)
        for optimizer in optimizers:
            optimizer.step()
    moe_comm.check_replicas(model)


def test_on_one_rank_every_optimizer_is_allowed() -> None:
    layer = MoELayer.build(MoEConfig(hidden=HIDDEN, ffn=16, router=RouterConfig(4, 2)), seed=0)
    layer(torch.randn(6, HIDDEN)).square().sum().backward()
    torch.optim.Adafactor(layer.parameters()).step()
