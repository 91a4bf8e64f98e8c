"""A text sample from a saved model, and the byte-level tokenizer saved with it."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from moe_comm.train.data import END_OF_TEXT, VOCAB_BYTES

END_OF_TEXT_NAME = "<|endoftext|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer whose ids 0 to 255 are the bytes of the UTF-8 text."""
    # The tokenizers library writes each byte as one printable character; this is its alphabet, by byte.
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(VOCAB_BYTES) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(rest)}
    vocab = {letters[byte]: byte for byte in range(VOCAB_BYTES)} | {END_OF_TEXT_NAME: END_OF_TEXT}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = fast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT_NAME,
        eos_token=END_OF_TEXT_NAME,
        pad_token=END_OF_TEXT_NAME,
        clean_up_tokenization_spaces=False,
    )
    return wrapped


@torch.inference_mode()
def continue_text(model: PreTrainedModel, prompt: bytes, length: int, temperature: float, seed: int) -> str:
    """``prompt`` and up to ``length`` sampled bytes after it; ends early where the model ends the text.

    Control characters, and bytes that are no UTF-8, are shown as U+FFFD. The context never grows past the length the
    model was trained with: when it is full, the later half of it starts a new one.
    """
    generator = torch.Generator().manual_seed(seed)
    window = int(model.config.max_position_embeddings)
    text, end = list(prompt or b"\n"), len(prompt) + length
    while len(text) < end:
        context = text[-max(window // 2, 1) :]
        cache, fresh = None, torch.tensor([context])
        for _ in range(min(window - len(context), end - len(text)) or 1):
            out = model(input_ids=fresh, past_key_values=cache, use_cache=True)
            cache, token = out.past_key_values, _draw(out.logits[0, -1], temperature, generator)
            if token == END_OF_TEXT:
                return _shown(text)
            text.append(token)
            fresh = torch.tensor([[token]])
    return _shown(text)


def _draw(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    return int(torch.multinomial((logits_V.float() / temperature).softmax(-1), 1, generator=generator))


def _shown(text: list[int]) -> str:
    decoded = bytes(text).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in decoded)
