"""The optimizer and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import Parameter

from moe_comm.train.config import OptimizerSection


def make_optimizer(params: Sequence[Parameter], section: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW (one fused pass) or SGD over ``params``; weight decay on matrices only, not on norms and biases."""
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.kind == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, foreach=True)
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


def learning_rate(step: int, steps: int, section: OptimizerSection) -> float:
    """Rate of ``step`` (from 0): linear warmup, then half a cosine from ``lr`` down to ``final_lr * lr`` at the end."""
    if step < section.warmup:
        return section.lr * (step + 1) / section.warmup
    done = min((step - section.warmup) / max(steps - 1 - section.warmup, 1), 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return section.lr * (section.final_lr + (1 - section.final_lr) * cosine)
