"""Export a checkpoint to a folder that ``from_pretrained`` loads, and generate text with it.

The export runs in one process, one tensor at a time. A damaged checkpoint raises ``CheckpointError``, a folder that
cannot be used ``ConfigError``, and an architecture without a Hugging Face family ``UnsupportedModel``.

Functions import transformers, which takes a second, when they are called: a run needs it on rank 0 after the last step.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_comm.errors import CheckpointError, ConfigError, MoeCommError, UnsupportedModel
from moe_comm.runtime.safe_files import write_file
from moe_comm.runtime.untrusted import shown
from moe_comm.train.architecture import family_of
from moe_comm.train.checkpoint import CheckpointReader, latest
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus
from moe_comm.train.data.tokenizer import saved_files
from moe_comm.train.loop.build import architecture_of
from moe_comm.train.loop.progress import Progress
from moe_comm.train.loop.run_folder import RunFolder
from moe_comm.train.loop.saver import MODEL
from moe_comm.train.ranks import Ranks


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


def export_model(checkpoint: Path, folder: RunFolder, ranks: Ranks, progress: Progress) -> None:
    """Export ``checkpoint`` as a Hugging Face model to the run folder, if its family supports it. Collective."""

    def export() -> str:
        try:
            folder.save_model(lambda path: export_checkpoint(checkpoint, path))
        except UnsupportedModel as error:
            progress.log(f"the model was not exported; use the checkpoints: {error}")
        except MoeCommError as error:
            return str(error)
        return ""

    if message := ranks.run_on_first(export):
        raise MoeCommError(f"the model could not be exported: {message}")


def export_checkpoint(path: Path, out: Path) -> None:
    """Write the weights of the checkpoint ``path`` to ``out`` in fp32, in the format of its model family."""
    reader = CheckpointReader(path)
    try:
        config = TrainConfig.model_validate(tomllib.loads(reader.state["config"]))
        vocab, end = int(reader.state["vocab"]), int(reader.state["end_of_text"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of moe-comm train: {shown(error)}") from error
    from moe_comm.integrations.hugging_face.architecture import to_hugging_face
    from moe_comm.integrations.hugging_face.weights import write_folder

    architecture = architecture_of(config, vocab)
    family = family_of(config.model)
    hf_config = to_hugging_face(architecture, family, bos_token_id=end, eos_token_id=end, pad_token_id=end)
    hf_config.dtype = "float32"

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in reader.names:
            if name.startswith(f"{MODEL}/"):
                yield name.removeprefix(f"{MODEL}/"), reader.read(name)

    write_folder(out, architecture, family, hf_config, tensors())


def draw_sample(config: TrainConfig, corpus: Corpus, folder: RunFolder) -> str:
    """Generate a text sample with the exported model; return "" if there is none."""
    if not config.run.sample_tokens or not folder.model.exists():
        return ""
    model = load_model(folder.model)
    ids = continue_text(model, corpus.prompt(32), config.run.sample_tokens, config.run.temperature, config.run.seed)
    decoded = corpus.tokenizer().decode(ids)
    text = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in decoded)
    folder.save_sample(text)
    return text


def load_model(folder: Path) -> Any:
    """Load the model in ``folder`` with transformers in fp32, without a progress bar."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        auto: Any = AutoModelForCausalLM
        return auto.from_pretrained(folder, dtype=torch.float32)
    finally:
        if enabled:
            logging.enable_progress_bar()


@torch.inference_mode()
def continue_text(model: Any, prompt: Sequence[int], length: int, temperature: float, seed: int) -> list[int]:
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


def _sample_token(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    return int(torch.multinomial((logits_V.float() / temperature).softmax(-1), 1, generator=generator))
