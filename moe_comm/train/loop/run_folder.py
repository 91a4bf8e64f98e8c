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
from moe_comm.train.checkpoint.folder import COMPLETE, complete
from moe_comm.train.config import TrainConfig
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience.persistent_state import run_id

CHECKPOINTS = "checkpoints"


class RunFolder:
    """Names and writes the files of a run. Only rank 0 writes; the others know the place."""

    def __init__(self, path: Path, checkpoint: Path | None = None, note: str = "") -> None:
        """``checkpoint``: the one to go on from; None: the newest. ``note``: what the user is to know of the choice."""
        self.path, self.checkpoint, self.note = path, checkpoint, note

    @classmethod
    def make(cls, config: TrainConfig, ranks: Ranks, kept: Collection[str] = ()) -> RunFolder:
        """A fresh folder on rank 0; with ``checkpoint.resume = "auto"`` the newest one of the same name if it holds a
        checkpoint, or is one of ``kept``, and has not done all its steps; with a path that run's. The resolved
        configuration is in it. Every rank learns its path. Collective.

        Args:
            kept: ``run_id`` of runs whose state is in memory.

        Raises:
            ConfigError: on every rank, where rank 0 cannot make it, there is nothing to go on from at a path, or the
                run has done more steps than are asked for.
        """
        answer = ""
        if ranks.is_first:
            try:
                chosen = _choose(config, kept)
                answer = "+" + json.dumps([str(chosen.path), str(chosen.checkpoint or ""), chosen.note])
            except OSError as error:
                answer = f"run.folder: cannot write to {config.run.folder!r}: {error.strerror or error}"
            except MoeCommError as error:
                answer = str(error)
        answer = ranks.text_from_first(answer)
        if not answer.startswith("+"):
            raise ConfigError(answer)
        path, checkpoint, note = json.loads(answer[1:])
        return cls(Path(path), Path(checkpoint) if checkpoint else None, note)

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

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

    def forget_result(self) -> None:
        """The run goes on: how it ended before is not how it ends."""
        (self.path / "result.json").unlink(missing_ok=True)

    def save_result(self, result: Mapping[str, object]) -> None:
        unknown = [key for key, value in result.items() if isinstance(value, float) and math.isnan(value)]
        known = dict(result) | dict.fromkeys(unknown)
        fresh = self.path / "result.json.partial"
        fresh.write_text(json.dumps(known, indent=2, default=str) + "\n", encoding="utf-8")
        os.replace(fresh, self.path / "result.json")


def to_go_on_in(resume: str) -> tuple[Path, Path | None]:
    """The run's folder at the path ``resume``, and the checkpoint if it names one.

    Raises:
        ConfigError: there is no checkpoint.
    """
    path = Path(resume)
    if (path / COMPLETE).exists():
        return path.parent.parent, path
    if (path / CHECKPOINTS).is_dir():
        return path, None
    raise ConfigError(
        f"checkpoint.resume: {resume!r} is neither no nor auto, nor the folder of a run or of one of its checkpoints"
    )


def _choose(config: TrainConfig, kept: Collection[str]) -> RunFolder:
    parent, name, resume = Path(config.run.folder), config.run.name, config.checkpoint.resume
    path, checkpoint, note = None, None, ""
    if resume == "auto":
        path = _newest(parent, name)
    elif resume != "no":
        path, checkpoint = to_go_on_in(resume)
    if path is not None:
        found = complete(path / CHECKPOINTS, lenient=False)
        done = found[-1].step if found else 0
        if checkpoint is not None:
            done = next((one.step for one in found if one.path.name == checkpoint.name), 0)
        if done > config.run.steps:
            raise ConfigError(
                f"{path} has done {done} steps, and run.steps is {config.run.steps}: ask for more, or start a new run "
                'with checkpoint.resume = "no"'
            )
        all_done = _has_finished(path) and done == config.run.steps
        if resume == "auto" and (all_done or (not found and run_id(path) not in kept)):
            note = f"{path} has done its {done} steps: this is a new run. More run.steps train that one on"
            path, note = None, note if all_done else ""
        elif all_done:
            raise ConfigError(f"{path} has done its {done} steps; to train on, set run.steps to more")
        elif not found and run_id(path) not in kept:
            raise ConfigError(f"checkpoint.resume: {path} holds no complete checkpoint")
    path = path or _fresh(parent, name)
    (path / "config.resolved.toml").write_text(configuration.dump(config), encoding="utf-8")
    return RunFolder(path, checkpoint, note)


def _newest(parent: Path, name: str) -> Path | None:
    """The folder of the newest run called ``name``. Never an older one that could go on where that cannot: ranks that
    are started again must not take over another run of the same name.
    """
    dated = re.compile(re.escape(name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    found = [(match[1], int(match[2] or 1), path) for path in parent.glob("*") if (match := dated.fullmatch(path.name))]
    return max(found)[-1] if found else None


def _has_finished(path: Path) -> bool:
    result = path / "result.json"
    return result.exists() and json.loads(result.read_text()).get("status") == "finished"


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
