"""This library's ``MoELayer`` as a contestant, over all ranks and with a whole copy on each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_comm.bench.common.settings import LayerBench
from moe_comm.bench.layer.peers import LayerContestant, Weights
from moe_comm.layers.moe.layer import MoEConfig, MoELayer
from moe_comm.layers.moe.router import RouterConfig


class Ours(LayerContestant):
    """Expert-parallel over all ranks."""

    name = "moe_comm"

    @classmethod
    def ep_of(cls, settings: LayerBench) -> int:
        return settings.ranks

    def build(self, weights: Weights) -> nn.Module:
        s = self.settings
        router = RouterConfig(num_experts=s.experts, top_k=s.top_k, score="softmax", normalize=True)
        group = dist.group.WORLD if self.ep > 1 else None
        layer = MoELayer.build(
            MoEConfig(hidden=s.hidden, ffn=s.ffn, router=router),
            group,
            s.backend if self.ep > 1 else "local",
            seed=s.seed,
            dtype=s.torch_dtype,
            device=s.device,
            label=self.name,
        )
        with torch.no_grad():
            layer.router.weight.copy_(weights.router())
        weights.fill(layer.dispatcher.local_experts, layer.experts.w13, layer.experts.w2)
        return layer

    def grads(self) -> dict[str, Tensor]:
        module: Any = self.module
        return {
            "router": module.router.weight.grad,
            "gate_up": module.experts.w13.grad,
            "down": module.experts.w2.grad,
        }

    def close(self) -> None:
        module: Any = self.module
        module.dispatcher.close()


class OursAlone(Ours):
    """Every rank with all experts to itself."""

    name = "moe_comm_ep1"

    @classmethod
    def ep_of(cls, settings: LayerBench) -> int:
        return 1
