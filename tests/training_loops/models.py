"""Tiny language models with experts, for any expert-parallel group. Group None: this process holds all experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_comm
from moe_comm import MoEConfig, MoELayer, RouterConfig, swap_moe
from moe_comm.dispatch import DispatchOptions
from moe_comm.layers.moe.config import MoEGroups
from moe_comm.topology.balance import Balance

VOCAB, HIDDEN = 32, 16


class Block(nn.Module):
    """A residual MoE block. ``recompute``: None, or ``use_reentrant`` of activation checkpointing."""

    def __init__(self, moe: MoELayer, recompute: bool | None) -> None:
        super().__init__()
        self.norm, self.moe, self.recompute = nn.LayerNorm(HIDDEN), moe, recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute is None:
            return x + self.moe(self.norm(x))
        return x + checkpoint(lambda x: self.moe(self.norm(x)), x, use_reentrant=self.recompute)


class GPT(nn.Module):
    """A user-written language model with ``MoELayer``."""

    def __init__(self, build: Callable[[int], MoELayer], recompute: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block(build(layer), recompute) for layer in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Wrapped(nn.Module):
    """A user's module around a swapped model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> Any:
        return self.inner(ids).logits * self.scale


@dataclass(frozen=True)
class Kind:
    """One model of the matrix.

    Attributes:
        etp: ranks that share each expert.
    """

    build: Callable[..., nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    etp: int = 1

    def on(self, group: Any) -> Any:
        """Build the model on ``group``, with the same weights for each group. Collective over the group."""
        torch.manual_seed(0)
        etp = {"etp": self.etp} if self.etp > 1 and group is not None else {}
        return self.build(group, **self.options, **etp)


LENT = DispatchOptions(balance=Balance(rows=1.0, worth=0))


def gpt(
    group: Any,
    *,
    experts: int = 5,
    recompute: bool | None = None,
    etp: int = 1,
    dispatch: DispatchOptions | None = None,
    **options: Any,
) -> GPT:
    config = MoEConfig(hidden=HIDDEN, ffn=24, router=RouterConfig(experts, 2), **options)

    def build(layer: int) -> MoELayer:
        groups = MoEGroups(group, etp)
        return MoELayer.build(config, groups, seed=layer, label=f"blocks.{layer}", options=dispatch)

    return GPT(build, recompute)


def gpt_shared_frozen(group: Any) -> GPT:
    """Build a model with a shared expert. Its routers are not trained."""
    model = gpt(group, shared_ffn=8, shared_gate=True)
    for block in model.blocks:
        block.moe.router.requires_grad_(False)
    return model


def gpt_idle_expert(group: Any) -> GPT:
    """Build a model in which expert 4 receives no rows."""
    config = MoEConfig(hidden=HIDDEN, ffn=24, router=RouterConfig(5, 2, correction_bias=True))
    model = GPT(lambda layer: MoELayer.build(config, group, seed=layer))
    for block in model.blocks:
        block.moe.router.correction_bias[-1] = -100.0
    return model


def gpt_balanced(group: Any) -> GPT:
    """Build a model with a balance loss over the tokens of all ranks."""
    router = RouterConfig(5, 2, balance_loss=0.1)
    config = MoEConfig(hidden=HIDDEN, ffn=24, router=router)
    tokens = None if group is None else dist.group.WORLD
    return GPT(lambda layer: MoELayer.build(config, MoEGroups(group, tokens=tokens), seed=layer))


_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}


def qwen3(group: Any, *, recompute: bool = False, **swap: Any) -> nn.Module:
    config = Qwen3MoeConfig(**_SMALL, moe_intermediate_size=24, head_dim=8, num_experts=4)
    model = Qwen3MoeForCausalLM(config)
    if recompute:
        model.activation_checkpointing_enable()
    return swap_moe(model, group or this_rank(), **swap)  # type: ignore[no-any-return]


def mixtral(group: Any) -> nn.Module:
    model = MixtralForCausalLM(MixtralConfig(**_SMALL, num_local_experts=5))
    return swap_moe(model, group or this_rank())  # type: ignore[no-any-return]


def wrapped(group: Any) -> nn.Module:
    return moe_comm.prepare_ddp(Wrapped(qwen3(group)))  # type: ignore[no-any-return]


KINDS = {
    "qwen3": Kind(qwen3),
    "mixtral, 5 experts": Kind(mixtral),
    "gpt, 5 experts": Kind(gpt),
    "gpt, 3 experts": Kind(gpt, {"experts": 3}),
    "gpt, etp 2": Kind(gpt, {"experts": 4}, etp=2),
    "gpt, shared expert, frozen router": Kind(gpt_shared_frozen),
    "gpt, idle expert": Kind(gpt_idle_expert),
    "gpt, balance loss": Kind(gpt_balanced),
    "gpt, checkpointing": Kind(gpt, {"recompute": False}),
    "gpt, reentrant checkpointing": Kind(gpt, {"recompute": True}),
    "qwen3, checkpointing": Kind(qwen3, {"recompute": True}),
    "wrapped qwen3": Kind(wrapped),
    "gpt, lent experts": Kind(gpt, {"dispatch": LENT}),
    "gpt, etp 2, lent experts": Kind(gpt, {"experts": 4, "dispatch": LENT}, etp=2),
    "qwen3, lent experts": Kind(qwen3, {"options": LENT}),
}

_GROUPS: dict[tuple[int, int], Any] = {}


def this_rank() -> Any:
    """Return a group of this rank only, or None in one process."""
    if not dist.is_initialized():
        return None
    key = (id(dist.group.WORLD), 1)
    if key not in _GROUPS:
        _GROUPS[key] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _GROUPS[key]


def ep_group(size: int) -> Any:
    """Return the group of ``size`` consecutive ranks that contains this rank; None for one rank. Collective."""
    key = (id(dist.group.WORLD), size)
    if size > 1 and key not in _GROUPS:
        world = dist.get_world_size()
        _GROUPS[key] = dist.group.WORLD if size == world else dist.new_subgroups(group_size=size)[0]
    return _GROUPS.get(key) if size > 1 else None
