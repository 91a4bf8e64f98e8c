"""Small random models of every family, saved as safetensors and loaded like user models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()

VOCAB, HIDDEN, FFN = 96, 32, 24
_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL: dict[str, dict[str, Any]] = {
    "mixtral": {
        "intermediate_size": FFN,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
    },
    "qwen2_moe": {
        "intermediate_size": 48,
        "moe_intermediate_size": FFN,
        "shared_expert_intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "intermediate_size": 48,
        "moe_intermediate_size": FFN,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "head_dim": 8,
        "mlp_only_layers": [],
    },
    "olmoe": {"intermediate_size": FFN, "num_experts": 8, "num_experts_per_tok": 4},
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "moe_intermediate_size": FFN,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gpt_oss": {"intermediate_size": FFN, "num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 8},
}
BATCH_PER_RANK = (3, 1, 2, 2)
SEQUENCE = 7


def new_model(family: str, **changes: Any) -> Any:
    """Return a model as transformers initializes it."""
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**_SHARED, **SMALL.get(family, {}), **changes})
    )


def save_model(
    family: str, folder: Path, seed: int = 0, edit: Callable[[Any], None] | None = None, **changes: Any
) -> str:
    """Save a model in which all weights are random, also those that are initialized to 0 or 1. Returns the folder."""
    model = new_model(family, **changes)
    randomise(model, seed)
    if edit is not None:
        edit(model)
    model.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def route_to_first_half(model: Any) -> None:
    """Route all tokens of a DeepSeek-V3 to experts 0..3, so that other ranks receive no rows."""
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias[:4] += 100


def randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name and value.dim() == 1:
                value.copy_(1 + 0.1 * torch.randn(value.shape, generator=generator))
            elif "inv_freq" not in name:
                value.copy_(0.2 * torch.randn(value.shape, generator=generator))


def load(folder: str, **settings: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **settings)


def batch(ranks: int = 4, seed: int = 1) -> list[Tensor]:
    """Return the token ids of each rank, with unequal numbers of sequences."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, VOCAB, (size, SEQUENCE), generator=generator, device="cpu") for size in BATCH_PER_RANK[:ranks]
    ]


def token_loss(logits: Tensor, ids: Tensor, num_tokens: int) -> Tensor:
    """Return this rank's contribution to the mean over the tokens of all ranks."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum") / num_tokens


def num_targets(ids: list[Tensor]) -> int:
    return sum(part[:, 1:].numel() for part in ids)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got: Tensor, expected: Tensor, what: str, rtol: float = 1e-5) -> None:
    """Compare with ``rtol``, relative to the largest element where elements cancel."""
    floor = rtol * float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(got, expected, rtol=rtol, atol=floor, msg=lambda m: f"{what}: {m}")


_GROUPS: dict[int, Any] = {}


def ep_group(size: int) -> Any:
    """Return the group of ``size`` consecutive ranks that contains this rank; None in one process. Collective."""
    if not dist.is_initialized():
        return None
    if size not in _GROUPS:
        _GROUPS[size] = dist.new_subgroups(group_size=size)[0]
    return _GROUPS[size]
