"""Generate a text sample with an exported model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging


def load_model(folder: Path) -> PreTrainedModel:
    """Load the model in ``folder`` with transformers in fp32, without a progress bar."""
    logging: Any = transformers_logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        auto: Any = AutoModelForCausalLM
        model: PreTrainedModel = auto.from_pretrained(folder, dtype=torch.float32)
    finally:
        if enabled:
            logging.enable_progress_bar()
    return model


@torch.inference_mode()
def continue_text(
    model: PreTrainedModel, prompt: Sequence[int], length: int, temperature: float, seed: int
) -> list[int]:
    """Return ``prompt`` followed by up to ``length`` sampled tokens; an end-of-text token ends it early.

    The context is limited to the model's maximum length. When it is full, its second half becomes the new context.
    """
    generator = torch.Generator().manual_seed(seed)
    window = int(model.config.max_position_embeddings)
    end_of_text = model.config.eos_token_id
    ids, end = list(prompt), len(prompt) + length
    while len(ids) < end:
        context = ids[-max(window // 2, 1) :]
        cache, new_ids = None, torch.tensor([context], dtype=torch.int64, device="cpu")
        for _ in range(min(window - len(context), end - len(ids)) or 1):
            out = model(input_ids=new_ids, past_key_values=cache, use_cache=True)
            cache, token = out.past_key_values, _sample_token(out.logits[0, -1], temperature, generator)
            if token == end_of_text:
                return ids
            ids.append(token)
            new_ids = torch.tensor([[token]], dtype=torch.int64, device="cpu")
    return ids


def shown(text: str) -> str:
    """Replace control characters in ``text`` by U+FFFD."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _sample_token(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    return int(torch.multinomial((logits_V.float() / temperature).softmax(-1), 1, generator=generator))
