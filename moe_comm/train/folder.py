"""The folder a run leaves behind.

runs/<name>-<date>/
    config.resolved.toml    every setting; runs again as it is
    metrics.jsonl           one line a step
    tensorboard/            the same for TensorBoard
    checkpoints/            step-<n>/: model, optimizer and place in the data; a run goes on from them on any mapping
    tokenizer/              loads with AutoTokenizer
    model/                  config.json, safetensors, tokenizer: loads with from_pretrained
    sample.txt              text drawn from the model
    result.json             how the run ended
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.train import config as configuration
from moe_comm.train.checkpoint import latest
from moe_comm.train.config import TrainConfig
from moe_comm.train.kept_state import run_id
from moe_comm.train.ranks import Ranks


class RunFolder:
    """Names and writes the files of a run. Only rank 0 writes; the others know the place."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def make(cls, config: TrainConfig, ranks: Ranks, kept: Collection[str] = ()) -> RunFolder:
        """A fresh folder on rank 0, or with ``checkpoint.resume = "auto"`` the newest one of the same name if it did
        not finish and holds a checkpoint, or is one of ``kept``; with the resolved configuration in it. Every rank
        learns its path. Collective.

        Args:
            kept: ``run_id`` of runs whose state is in memory.

        Raises:
            ConfigError: on every rank, where rank 0 cannot make it.
        """
        answer = ""
        if ranks.is_first:
            try:
                answer = f"+{_choose(config, kept)}"
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

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def save_model(self, write: Callable[[Path], None]) -> None:
        """Let ``write`` fill a folder beside ``model``; an earlier one stays until the new one is complete."""
        fresh = self.path / "model.partial"
        shutil.rmtree(fresh, ignore_errors=True)
        write(fresh)
        shutil.copytree(self.tokenizer, fresh, dirs_exist_ok=True)
        shutil.rmtree(self.model, ignore_errors=True)
        os.replace(fresh, self.model)

    def save_sample(self, text: str) -> None:
        (self.path / "sample.txt").write_text(text + "\n", encoding="utf-8")

    def save_result(self, result: Mapping[str, object]) -> None:
        unknown = [key for key, value in result.items() if isinstance(value, float) and math.isnan(value)]
        known = dict(result) | dict.fromkeys(unknown)
        fresh = self.path / "result.json.partial"
        fresh.write_text(json.dumps(known, indent=2, default=str) + "\n", encoding="utf-8")
        os.replace(fresh, self.path / "result.json")


def _choose(config: TrainConfig, kept: Collection[str]) -> Path:
    parent, name = Path(config.run.folder), config.run.name
    path = _unfinished(parent, name, kept) if config.checkpoint.resume == "auto" else None
    path = path or _fresh(parent, name)
    (path / "config.resolved.toml").write_text(configuration.dump(config), encoding="utf-8")
    return path


def _unfinished(parent: Path, name: str, kept: Collection[str]) -> Path | None:
    """The folder of the newest run called ``name``, if it can go on: it holds a checkpoint, or its state is in memory,
    and it did not finish.

    Never an older one: ranks that are started again must not take over another run of the same name.
    """
    dated = re.compile(re.escape(name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    found = [(match[1], int(match[2] or 1), path) for path in parent.glob("*") if (match := dated.fullmatch(path.name))]
    if not found:
        return None
    path = max(found)[-1]
    result = path / "result.json"
    finished = result.exists() and json.loads(result.read_text()).get("status") == "finished"
    if finished or (run_id(path) not in kept and latest(path / "checkpoints") is None):
        return None
    return path


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
