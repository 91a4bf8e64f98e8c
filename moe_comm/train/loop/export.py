"""Export a checkpoint to a folder that ``from_pretrained`` loads. Runs in one process, one tensor at a time."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

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
    """Export the newest checkpoint of the run folder ``run`` (or the checkpoint ``run``) to the new folder ``out``.

    Raises:
        CheckpointError: there is no checkpoint, or it is corrupted.
        ConfigError: ``run`` does not exist, its tokenizer cannot be read, or ``out`` is not empty.
        UnsupportedModel: no Hugging Face family has this architecture.
    """
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
    """Write the weights of the checkpoint ``path`` to ``out`` in fp32, in the format of its model family.

    Raises:
        CheckpointError: the checkpoint is corrupted, or is not from a training run.
        UnsupportedModel: no Hugging Face family has this architecture.
    """
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
