"""``MoELayer`` as a contestant: expert-parallel over all ranks, and with all experts on each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_comm.bench.layer.peers import LayerContestant, LayerWeights
from moe_comm.layers.moe.layer import MoEConfig, MoELayer
from moe_comm.layers.moe.router import RouterConfig


class MoeCommLayer(LayerContestant):
    """``MoELayer``, expert-parallel over all ranks."""

    name = "moe_comm"
    expert_parallel = True

    def build(self, weights: LayerWeights) -> nn.Module:
        s = self.settings
        router = RouterConfig(num_experts=s.experts, top_k=s.top_k, score="softmax", normalize=True)
        group = dist.group.WORLD if self.ep > 1 else None
        layer = MoELayer.build(
            MoEConfig(hidden=s.hidden, ffn=s.ffn, router=router),
            group,
            backend=s.backend if self.ep > 1 else "local",
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


class MoeCommReplicatedLayer(MoeCommLayer):
    """``MoELayer`` with all experts on each rank."""

    name = "moe_comm_ep1"
    expert_parallel = False
