"""A run's checkpoints: which tensors make up its state, and how a model's weights are written for others to load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from moe_comm.errors import CheckpointError
from moe_comm.layers.moe.load import moe_layers
from moe_comm.layers.transformer.model import EMBEDDING, HEAD
from moe_comm.train import config as configuration
from moe_comm.train.checkpoint import Checkpointer, Entry, Loaded
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus
from moe_comm.train.loop.trainer import TrainState
from moe_comm.train.resilience.peer_memory import PeerMemory

MODEL, OPTIMIZER = "model", "optimizer"


class RunSaver:
    """Saves and restores a run in ``folder``. Every rank makes one alike. Collective.

    Attributes:
        memory: where its state is kept beside the disk; None: nowhere.
    """

    def __init__(
        self, folder: Path, config: TrainConfig, train_state: TrainState, corpus: Corpus, extra: Mapping[str, Any]
    ) -> None:
        """``extra``: what else the checkpoint is to say, in JSON."""
        self._config, self._train_state, self._corpus, self._extra = config, train_state, corpus, extra
        self._checkpoints = Checkpointer(
            folder, keep=config.checkpoint.keep, timeout_s=max(1800.0, config.parallel.timeout_s)
        )
        self.memory: PeerMemory | None = None

    def wait_staged(self) -> float:
        """Seconds until the weights may change."""
        waited = self._checkpoints.wait_staged()
        return waited + (self.memory.wait_staged() if self.memory is not None else 0.0)

    def save(self, step: int) -> None:
        """Save after ``step`` steps.

        Raises:
            CheckpointError: it failed, or in the background the save before it.
        """
        self._checkpoints.save(step, self.entries(), self._state(step))
        if not self._config.checkpoint.background:
            self._checkpoints.wait()

    def finish(self) -> None:
        """Wait until the last save is on the disk.

        Raises:
            CheckpointError: it failed.
        """
        self._checkpoints.wait()

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Finish, and give back the group. A save that fails behind ``error`` is told and does not take its place."""
        self._checkpoints.__exit__(kind, error, trace)

    def latest(self) -> Path | None:
        """The newest complete checkpoint. Collective."""
        return self._checkpoints.latest()

    def resume(self, path: Path) -> int:
        """Take over the state saved at ``path``, by any mapping; returns the steps done. Collective.

        Raises:
            CheckpointError: it is damaged, or of another model or optimizer.
            ConfigError: it was trained on other data.
        """
        loaded: Loaded = self._checkpoints.load(path, self.entries())
        self._take_over(loaded.state, str(path))
        return loaded.step

    def capture(self, step: int) -> tuple[dict[str, Entry], dict[str, Any]]:
        """What ``save`` would: the tensors as they are after ``step`` steps, and the JSON beside."""
        return self.entries(), self._state(step)

    def recall(self, least: int, say: Callable[[str], None]) -> int | None:
        """Take over the newest state that ``memory`` holds of every rank, if it is not from before step ``least``;
        returns the steps done, None where there is none and nothing has changed. Collective.

        Args:
            say: told of what cannot be used, and why.

        Raises:
            ConfigError: it was trained on other data.
        """
        found = self.memory.restore(self.entries(), least, say) if self.memory is not None else None
        if found is None:
            return None
        step, state = found
        self._take_over(state, "what is kept in memory")
        return step

    def _take_over(self, state: Mapping[str, Any], where: str) -> None:
        """The tensors of ``entries`` are those of ``state``: let the rest follow."""
        train_state = self._train_state
        self._copy_tied()
        steps = state.get("optimizer_steps")
        if not isinstance(steps, int):
            raise CheckpointError(f"{where} does not say how many updates its optimizer has made")
        train_state.optimizer.load_steps(steps)
        train_state.data_parallel.publish()
        train_state.history.load(state.get("history"))
        self._corpus.resume(state["sampler"])

    def entries(self) -> dict[str, Entry]:
        """Everything that changes in training and lies on this rank, by its name in the whole model."""
        train_state = self._train_state
        place, sizes = train_state.mesh.place, train_state.mesh.sizes
        states = train_state.optimizer.state_tensors()
        found: dict[str, Entry] = {}
        for owned in train_state.data_parallel.owned():
            name = self._origin(owned.name)
            parts = {f"{MODEL}/{name}": owned.value.detach()}
            parts |= {f"{OPTIMIZER}/{name}/{key}": value for key, value in states.get(owned.name, {}).items()}
            for key, tensor in parts.items():
                # A schedule shaped like a V has both copies of a tied embedding here: one is enough.
                found.setdefault(key, Entry.of(tensor, owned.sharding, place, sizes, owned.share))
        for stage in train_state.stages:
            for layer_name, layer in moe_layers(stage):
                if layer.router.correction_bias is not None:
                    bias = layer.router.correction_bias
                    found[f"{MODEL}/{layer_name}.router.correction_bias"] = Entry.whole(bias)
        return found

    def _origin(self, name: str) -> str:
        return EMBEDDING if name == HEAD and HEAD in self._train_state.data_parallel.tied else name

    @torch.no_grad()
    def _copy_tied(self) -> None:
        """Give the second copy of a tied embedding on this rank, if there is one, what the first was loaded with."""
        train_state = self._train_state
        states = train_state.optimizer.state_tensors()
        copies = {owned.name: owned for owned in train_state.data_parallel.owned() if owned.name in (EMBEDDING, HEAD)}
        if train_state.data_parallel.tied and len(copies) == 2:
            copies[HEAD].value.copy_(copies[EMBEDDING].value)
            for key, value in states.get(HEAD, {}).items():
                value.copy_(states[EMBEDDING][key])

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "optimizer_steps": self._train_state.optimizer.steps,
            "sampler": self._corpus.state(step),
            "history": self._train_state.history.state(),
            "config": configuration.dump(self._config),
            "vocab": self._corpus.vocab_size,
            "end_of_text": self._corpus.end_of_text,
            "mapping": str(self._train_state.mesh.config),
            **self._extra,
        }
