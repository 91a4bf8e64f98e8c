"""SonicMoE (arXiv 2512.14080, package sonic-moe) as a contestant: a layer for one Hopper or Blackwell GPU."""

from __future__ import annotations

from importlib import import_module, util
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.bench.common.settings import LayerBench
from moe_comm.bench.layer.peers import LayerContestant, LayerWeights, import_error


class SonicMoELayer(LayerContestant):
    """SonicMoE's layer with a softmax over the selected logits, which equals a normalized top-k of the softmax.

    The rows of its first weight alternate between gate and up: [g0, u0, g1, u1, ...].
    """

    name = "sonic_moe"

    @classmethod
    def unavailable_reason(cls, settings: LayerBench) -> str | None:
        if settings.device != "cuda":
            return "requires a Hopper or Blackwell GPU"
        if settings.torch_dtype != torch.bfloat16:
            return f"supports bfloat16 only, not {settings.dtype}"
        if util.find_spec("sonicmoe") is None:
            return "not installed: pip install sonic-moe"
        return import_error("sonicmoe")

    def build(self, weights: LayerWeights) -> nn.Module:
        s = self.settings
        sonic: Any = import_module("sonicmoe")
        self._kernels = sonic.KernelBackendMoE.sonicmoe
        layer = sonic.MoE(
            num_experts=s.experts,
            num_experts_per_tok=s.top_k,
            hidden_size=s.hidden,
            intermediate_size=s.ffn,
            activation_function=import_module("sonicmoe.enums").ActivationType.SWIGLU,
            add_bias=False,
            std=0.02,
        ).to(device=s.device, dtype=s.torch_dtype)
        with torch.no_grad():
            layer.router.weight.copy_(weights.router())
            for expert in self.experts:
                layer.c_fc.weight[expert] = _interleaved(weights.gate_up(expert))
                layer.c_proj.weight[expert] = weights.down(expert)
        return layer  # type: ignore[no-any-return]

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = self.module(x_TD, kernel_backend_moe=self._kernels)[0]
        return y_TD

    def grads(self) -> dict[str, Tensor]:
        module: Any = self.module
        mixed_EFD = module.c_fc.weight.grad
        return {
            "router": module.router.weight.grad,
            "gate_up": torch.cat((mixed_EFD[:, ::2], mixed_EFD[:, 1::2]), 1),
            "down": module.c_proj.weight.grad,
        }


def _interleaved(gate_up_FD: Tensor) -> Tensor:
    """Interleave the gate and up rows of a [2F, D] weight."""
    return torch.stack(gate_up_FD.chunk(2), 1).flatten(0, 1)
