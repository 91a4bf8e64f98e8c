"""A text sample from a saved model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging


def load_model(folder: Path) -> PreTrainedModel:
    """The model saved in ``folder``, as anyone would load it, ready to evaluate; without progress bars of its own."""
    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        auto: Any = AutoModelForCausalLM
        model: PreTrainedModel = auto.from_pretrained(folder, dtype=torch.float32)
    finally:
        if shown:
            logging.enable_progress_bar()
    return model


@torch.inference_mode()
def continue_text(
    model: PreTrainedModel, prompt: Sequence[int], length: int, temperature: float, seed: int
) -> list[int]:
    """``prompt`` and up to ``length`` sampled tokens after it; ends early where the model ends the text.

    The context never grows past the length the model was trained with: when it is full, the later half of it starts a
    new one.
    """
    generator = torch.Generator().manual_seed(seed)
    window = int(model.config.max_position_embeddings)
    end_of_text = model.config.eos_token_id
    text, end = list(prompt), len(prompt) + length
    while len(text) < end:
        context = text[-max(window // 2, 1) :]
        cache, fresh = None, torch.tensor([context])
        for _ in range(min(window - len(context), end - len(text)) or 1):
            out = model(input_ids=fresh, past_key_values=cache, use_cache=True)
            cache, token = out.past_key_values, _draw(out.logits[0, -1], temperature, generator)
            if token == end_of_text:
                return text
            text.append(token)
            fresh = torch.tensor([[token]])
    return text


def shown(text: str) -> str:
    """``text`` with control characters as U+FFFD."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _draw(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    return int(torch.multinomial((logits_V.float() / temperature).softmax(-1), 1, generator=generator))
