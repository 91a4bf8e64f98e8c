"""The model: a small Hugging Face MoE over bytes, its experts spread over ranks, and the way back to one file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import AutoModelForCausalLM, OlmoeConfig, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.utils import logging as transformers_logging

from moe_comm.dispatch import DispatchOptions
from moe_comm.integrations.hugging_face import expert_parameters, save_swapped, swap_moe, swapped_experts
from moe_comm.layers.losses import expert_counts, load_balance_loss
from moe_comm.train.config import ModelSection, ParallelSection
from moe_comm.train.data import END_OF_TEXT, VOCAB_SIZE
from moe_comm.train.ranks import Ranks

FAMILIES: dict[str, type[PreTrainedConfig]] = {"qwen3_moe": Qwen3MoeConfig, "olmoe": OlmoeConfig}


def hugging_face_config(section: ModelSection, seq_len: int) -> PreTrainedConfig:
    """The configuration of ``section.family`` with the shape of ``section``."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": section.hidden,
        "num_hidden_layers": section.layers,
        "num_attention_heads": section.heads,
        "num_key_value_heads": section.kv_heads or section.heads,
        "num_experts": section.experts,
        "num_experts_per_tok": section.top_k,
        "intermediate_size": section.ffn,
        "max_position_embeddings": seq_len,
        "tie_word_embeddings": section.tie,
        "router_aux_loss_coef": section.aux_loss,
        "initializer_range": section.init_std,
        "norm_topk_prob": True,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
        "pad_token_id": END_OF_TEXT,
    }
    if section.family == "qwen3_moe":
        shape |= {"moe_intermediate_size": section.ffn, "head_dim": section.hidden // section.heads}
    return FAMILIES[section.family](**shape)


def build(section: ModelSection, seq_len: int, seed: int) -> PreTrainedModel:
    """The whole model in fp32, random weights that depend on ``seed`` alone; torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = hugging_face_config(section, seq_len)
        auto: Any = AutoModelForCausalLM
        model: PreTrainedModel = auto.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return model


def load(folder: Path) -> PreTrainedModel:
    """The model saved in ``folder``, as anyone would load it, ready to evaluate."""
    auto: Any = AutoModelForCausalLM
    with _no_bars():
        model: PreTrainedModel = auto.from_pretrained(folder, dtype=torch.float32)
    return model


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Without the progress bars of transformers, which would cut through ours."""
    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class Routing:
    """How the routers of one forward pass spread this rank's tokens. L: MoE layers, E: experts.

    counts_LE: float64, slots routed to each expert. probs_LE: routing probabilities summed over tokens; carry gradient.
    """

    counts_LE: Tensor
    probs_LE: Tensor

    def balance_loss(self, counts_LE: Tensor, num_tokens: int) -> Tensor:
        """This rank's part of the load-balancing loss, mean over layers; top-k where routers are perfectly even.

        counts_LE, num_tokens: of the global batch. Parts of all ranks add up to the loss of the global batch, because
        the loss is linear in the probabilities once the counts are known.
        """
        tokens = torch.tensor(num_tokens, device=self.probs_LE.device)
        layers = zip(self.probs_LE, counts_LE, strict=True)
        return torch.stack([load_balance_loss(probs_E[None], counts_E, tokens) for probs_E, counts_E in layers]).mean()


class RoutingProbe:
    """Reads the routers' outputs as the model runs; nothing in the model changes."""

    def __init__(self, routers: list[nn.Module]) -> None:
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._hook(layer))

    def take(self) -> Routing:
        """The routing of the forward pass since the last call."""
        layers = [self._seen[layer] for layer in sorted(self._seen)]
        self._seen.clear()
        return Routing(torch.stack([counts for counts, _ in layers]), torch.stack([probs for _, probs in layers]))

    def _hook(self, layer: int) -> Any:
        def read(module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            logits_TE, _, ids_TK = output
            counts_E = expert_counts(ids_TK, logits_TE.shape[-1]).double()
            self._seen[layer] = counts_E, logits_TE.float().softmax(-1).sum(0)

        return read


@dataclass(frozen=True)
class SpreadModel:
    """A model whose experts are spread over the ranks of an expert-parallel group.

    replicated: parameters that every rank holds. experts: parameters of this rank's experts.
    """

    module: PreTrainedModel
    replicated: list[Parameter]
    experts: list[Parameter]
    probe: RoutingProbe

    def logits(self, inputs_BS: Tensor) -> Tensor:
        """[B, S, vocabulary] for inputs [B, S] int64. Collective over the expert-parallel group."""
        logits_BSV: Tensor = self.module(input_ids=inputs_BS, use_cache=False).logits
        return logits_BSV

    def save(self, folder: Path) -> None:
        """Write the whole model, every rank's experts in it, as config.json and safetensors, on rank 0. Collective."""
        with _no_bars():
            save_swapped(self.module, folder)

    def close(self) -> None:
        """Give back what the dispatchers hold; calling it twice is allowed. Collective."""
        for experts in swapped_experts(self.module).values():
            experts.dispatcher.close()


def spread(model: PreTrainedModel, ranks: Ranks, section: ParallelSection) -> SpreadModel:
    """Keep this rank's experts of ``model`` and run them expert-parallel. Collective; changes ``model`` in place."""
    options = DispatchOptions(timeout_s=section.timeout_s)
    swap_moe(model, ranks.ep_group, backend=section.backend, options=options)
    # Routers stay transformers' own: the module beside the experts, called "gate" in every family of FAMILIES.
    probe = RoutingProbe([model.get_submodule(f"{name.rpartition('.')[0]}.gate") for name in swapped_experts(model)])
    experts = list(expert_parameters(model).values())
    own = {id(parameter) for parameter in experts}
    return SpreadModel(model, [p for p in model.parameters() if id(p) not in own], experts, probe)
