"""MoE layer configurations with all features: biases, both auxiliary losses, shared and zero experts."""

from __future__ import annotations

from dataclasses import replace

from moe_comm.layers import MoEConfig, RouterConfig, ZeroExperts

HIDDEN = 16
BALANCED = MoEConfig(
    HIDDEN,
    12,
    RouterConfig(5, 2, score="sigmoid", correction_bias=True, balance_loss=0.3, z_loss=0.1),
    shared_ffn=8,
    shared_gate=True,
)
RICH = replace(BALANCED, router=replace(BALANCED.router, zero_experts=ZeroExperts(1, 1)), expert_bias=True)
