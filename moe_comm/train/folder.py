"""The folder a run leaves behind.

runs/<name>-<date>/
    config.resolved.toml    every setting; runs again as it is
    metrics.jsonl           one line a step
    tensorboard/            the same for TensorBoard
    model/                  config.json, model.safetensors, tokenizer: loads with from_pretrained
    sample.txt              text drawn from the model
    result.json             how the run ended
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.train import config as configuration
from moe_comm.train import sample
from moe_comm.train.config import TrainConfig
from moe_comm.train.model import SpreadModel
from moe_comm.train.ranks import Ranks


class RunFolder:
    """Names and writes the files of a run. Only rank 0 writes; the others know the place."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def make(cls, config: TrainConfig, ranks: Ranks) -> RunFolder:
        """A fresh folder on rank 0, with the resolved configuration in it; every rank learns its path. Collective.

        Raises:
            ConfigError: on every rank, where rank 0 cannot make it.
        """
        answer = ""
        if ranks.is_first:
            try:
                path = _fresh(Path(config.run.folder), config.run.name)
                (path / "config.resolved.toml").write_text(configuration.dump(config), encoding="utf-8")
                answer = f"+{path}"
            except OSError as error:
                answer = f"run.folder: cannot write to {config.run.folder!r}: {error.strerror or error}"
            except MoeCommError as error:
                answer = str(error)
        answer = ranks.text_from_first(answer)
        if not answer.startswith("+"):
            raise ConfigError(answer)
        return cls(Path(answer[1:]))

    @property
    def model(self) -> Path:
        return self.path / "model"

    def save_model(self, model: SpreadModel, ranks: Ranks) -> None:
        """Write the whole model and its tokenizer; an earlier one stays until the new one is complete. Collective."""
        fresh = self.path / "model.partial"
        if ranks.is_first:
            shutil.rmtree(fresh, ignore_errors=True)
        model.save(fresh)
        if ranks.is_first:
            sample.byte_tokenizer().save_pretrained(str(fresh))
            shutil.rmtree(self.model, ignore_errors=True)
            os.replace(fresh, self.model)

    def save_sample(self, text: str) -> None:
        (self.path / "sample.txt").write_text(text + "\n", encoding="utf-8")

    def save_result(self, result: Mapping[str, object]) -> None:
        (self.path / "result.json").write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")


def _fresh(parent: Path, name: str) -> Path:
    """``parent/name-date``, with a number after it where two runs start in the same second."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        path = parent / (stem + suffix)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise MoeCommError(f"{parent} already holds 99 runs named {stem}; choose another run.name")
