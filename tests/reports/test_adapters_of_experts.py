"""Adapters and parametrizations of distributed experts: each rank raises the error whose remedy applies."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_comm import MoEConfig, MoELayer, RouterConfig
from moe_comm.errors import ConfigError, MissingDependency
from moe_comm.runtime import versions
from tests.pool import on_ranks


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class PeftParametrization(Twice):
    """A class that is named like one of PEFT, which need not be installed."""


PeftParametrization.__module__ = "peft.tuners.lora.layer"


@on_ranks(2)
def test_parametrizations_are_refused(rank: int, world: int) -> None:
    with pytest.raises(ConfigError, match="not supported yet"):
        layer_with(Twice())(torch.ones(3, 16, dtype=torch.float32, device="cpu"))


@on_ranks(2)
def test_adapters_of_an_unsupported_version_of_peft_name_the_version(
    rank: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(versions.SUPPORTED, "peft", ("9999", "10000", "peft"))
    with pytest.raises(MissingDependency, match="LoRA on experts needs peft >= 9999"):
        layer_with(PeftParametrization())(torch.ones(3, 16, dtype=torch.float32, device="cpu"))


def layer_with(parametrization: nn.Module) -> MoELayer:
    layer = MoELayer.build(MoEConfig(16, 24, RouterConfig(4, 2)), dist.group.WORLD, seed=0)
    nn.utils.parametrize.register_parametrization(layer.experts, "w2", parametrization)
    return layer
