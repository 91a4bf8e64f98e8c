"""Export a checkpoint to a folder that ``from_pretrained`` loads, and generate text with it.

The export runs in one process, one tensor at a time. A damaged checkpoint raises ``CheckpointError``, a folder that
cannot be used ``ConfigError``, and an architecture without a Hugging Face family ``UnsupportedModel``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from moe_comm.errors import CheckpointError, ConfigError
from moe_comm.integrations.hugging_face.architecture import to_hugging_face
from moe_comm.integrations.hugging_face.weights import write_folder
from moe_comm.runtime.safe_files import write_file
from moe_comm.runtime.untrusted import shown
from moe_comm.train.architecture import family_of
from moe_comm.train.checkpoint import CheckpointReader, latest
from moe_comm.train.config import TrainConfig
from moe_comm.train.data.tokenizer import saved_files
from moe_comm.train.loop.build import architecture_of
from moe_comm.train.loop.saver import MODEL


def export_run(run: Path, out: Path) -> None:
    """Export the newest checkpoint of the run folder ``run`` (or the checkpoint ``run``) to the new folder ``out``."""
    if not run.exists():
        raise ConfigError(f"there is no run or checkpoint at {run}")
    path = run if (run / "COMPLETE").exists() else latest(run / "checkpoints")
    if path is None:
        raise CheckpointError(f"{run} has no complete checkpoint")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose a new folder")
    tokenizer = saved_files(path.parent.parent / "tokenizer")
    export_checkpoint(path, out)
    for name, content in tokenizer.items():
        write_file(out / name, content)


def export_checkpoint(path: Path, out: Path) -> None:
    """Write the weights of the checkpoint ``path`` to ``out`` in fp32, in the format of its model family."""
    reader = CheckpointReader(path)
    try:
        config = TrainConfig.model_validate(tomllib.loads(reader.state["config"]))
        vocab, end = int(reader.state["vocab"]), int(reader.state["end_of_text"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of moe-comm train: {shown(error)}") from error
    architecture = architecture_of(config, vocab)
    family = family_of(config.model)
    hf_config = to_hugging_face(architecture, family, bos_token_id=end, eos_token_id=end, pad_token_id=end)
    hf_config.dtype = "float32"

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in reader.names:
            if name.startswith(f"{MODEL}/"):
                yield name.removeprefix(f"{MODEL}/"), reader.read(name)

    write_folder(out, architecture, family, hf_config, tensors())


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


def without_controls(text: str) -> str:
    """Replace control characters in ``text`` by U+FFFD."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _sample_token(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    return int(torch.multinomial((logits_V.float() / temperature).softmax(-1), 1, generator=generator))
