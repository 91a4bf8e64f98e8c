"""Checkpoints and snapshots of a training run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from moe_comm.errors import CheckpointError
from moe_comm.layers.moe.load import moe_layers
from moe_comm.layers.transformer.model import EMBEDDING, HEAD
from moe_comm.observe.records import FaultRecord
from moe_comm.train import config as configuration
from moe_comm.train.checkpoint import Checkpointer, Entry, Loaded
from moe_comm.train.checkpoint.exchange import PeerLost
from moe_comm.train.checkpoint.folder import complete_checkpoints
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus
from moe_comm.train.loop.build import TrainState
from moe_comm.train.offload.resident import MASTERS
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience.peer_memory import PeerSnapshots

MODEL, OPTIMIZER = "model", "optimizer"


class RunSaver:
    """Save and restore a run in ``folder``. All ranks construct one. Collective.

    Args:
        extra: additional JSON metadata of checkpoints.

    Attributes:
        memory: in-memory snapshots; None: none.
    """

    def __init__(
        self, folder: Path, config: TrainConfig, train_state: TrainState, corpus: Corpus, extra: Mapping[str, Any]
    ) -> None:
        self._folder, self._extra = folder, extra
        self._config, self._train_state, self._corpus = config, train_state, corpus
        self._checkpoints = Checkpointer(
            folder, keep=config.checkpoint.keep, timeout_s=max(1800.0, config.parallel.timeout_s)
        )
        self.memory: PeerSnapshots | None = None

    def wait_staged(self) -> float:
        """Wait until the weights are copied and can be changed; return the seconds waited."""
        waited = self._checkpoints.wait_staged()
        return waited + (self.memory.wait_staged() if self.memory is not None else 0.0)

    def save(self, step: int) -> None:
        """Save the state after ``step`` steps. Collective."""
        self._checkpoints.save(step, self.entries(), self._metadata(step))
        if not self._config.checkpoint.background:
            self._checkpoints.wait()

    def finish(self) -> None:
        """Wait for the save in progress. Raises ``CheckpointError`` if it failed."""
        self._checkpoints.wait()

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait for the save in progress and release the process group, as ``__exit__`` of the checkpointer.

        A failed save does not replace ``error``; it is logged.
        """
        self._checkpoints.__exit__(kind, error, trace)

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint. Collective."""
        return self._checkpoints.latest()

    def resume(self, path: Path) -> int:
        """Load the checkpoint at ``path``, which may be of another mapping; return its step. Collective."""
        loaded: Loaded = self._checkpoints.load(path, self.entries())
        self._restore(loaded.state, str(path), move=True)
        return loaded.step

    def resume_newest(
        self, ranks: Ranks, log: Callable[[str], None], record_fault: Callable[[FaultRecord], None]
    ) -> tuple[int, str]:
        """Load the newest valid state. Collective.

        A snapshot in memory is preferred to a checkpoint of the same step. If a checkpoint cannot be used, the previous
        one is tried; the steps since then are repeated.

        Args:
            record_fault: receives a record for each checkpoint that cannot be used.

        Returns:
            The number of completed steps and the source, as in ``Attempt``.
        """

        def newest_first() -> str:
            checkpoints = reversed(complete_checkpoints(self._folder, lenient=True))
            return json.dumps([(str(saved.path), saved.step) for saved in checkpoints])

        first_error: CheckpointError | None = None
        # The last pair stands for no checkpoint: then a snapshot of any step is accepted.
        for path, saved_step in [*json.loads(ranks.run_on_first(newest_first)), ("", 0)]:
            step = self._load_from_memory(max(saved_step, 1), log)
            if step is not None:
                log(f"resumes after step {step} from memory")
                return step, "peer memory"
            if not path:
                break
            try:
                step = self.resume(Path(path))
            except PeerLost:
                raise
            except CheckpointError as error:
                first_error = first_error or error
                record_fault(FaultRecord(time.time(), saved_step, "checkpoint", [], "restart", str(error)))
                log(f"{error}; trying an earlier checkpoint")
                continue
            log(f"resumes after step {step} from {path}")
            return step, "checkpoint"
        if first_error is not None:
            raise first_error
        return 0, "fresh"

    def capture(self, step: int) -> tuple[dict[str, Entry], dict[str, Any]]:
        """Return the tensors and JSON metadata that ``save`` writes after ``step`` steps."""
        return self.entries(), self._metadata(step)

    def _load_from_memory(self, least: int, log: Callable[[str], None]) -> int | None:
        """Load the newest snapshot of step ``least`` or later that all ranks can restore; return its step. Collective.

        Returns None, with unchanged state, if there is none. ``log`` gets the reason why a snapshot cannot be used.
        """
        snapshot = self.memory.restore(self.entries(), least, log) if self.memory is not None else None
        if snapshot is None:
            return None
        step, state = snapshot
        self._restore(state, "the snapshot in memory", move=False)
        return step

    def _restore(self, state: Mapping[str, Any], source: str, move: bool) -> None:
        """Restore everything except the tensors of ``entries``, which are loaded already.

        Args:
            move: the tensors were loaded by global expert ids. Otherwise they are this rank's experts when they were
                saved.
        """
        train_state = self._train_state
        self._copy_tied()
        steps = state.get("optimizer_steps")
        if not isinstance(steps, int):
            raise CheckpointError(f"{source} has no valid optimizer_steps")
        train_state.optimizer.load_steps(steps)
        train_state.placements.load(state.get("placement"), move=move)
        train_state.data_parallel.publish()
        train_state.data_parallel.forget_residents()
        train_state.history.load(state.get("history"))
        self._corpus.resume(state["sampler"])

    def entries(self) -> dict[str, Entry]:
        """Return the state tensors of this rank, by their name in the whole model."""
        train_state = self._train_state
        place, sizes = train_state.mesh.place, train_state.mesh.sizes
        states = train_state.optimizer.state_tensors()
        entries: dict[str, Entry] = {}
        for owned in train_state.data_parallel.owned():
            name = self._origin(owned.name)
            tensors = {f"{MODEL}/{name}": owned.value.detach()}
            tensors |= {f"{OPTIMIZER}/{name}/{key}": value for key, value in states.get(owned.name, {}).items()}
            for key, tensor in tensors.items():
                entry = Entry.of(tensor, owned.sharding, place, sizes, owned.shard)
                field = MASTERS if key.startswith(f"{MODEL}/") else key.rpartition("/")[2]
                opener = train_state.optimizer.memory.opener(owned.name, field)
                # With a V-shaped schedule this rank has both copies of a tied embedding; one of them is saved.
                entries.setdefault(key, replace(entry, opener=opener))
        for stage in train_state.stages:
            for layer_name, layer in moe_layers(stage):
                if layer.router.correction_bias is not None:
                    bias = layer.router.correction_bias
                    entries[f"{MODEL}/{layer_name}.router.correction_bias"] = Entry.whole(bias)
        return entries

    def _origin(self, name: str) -> str:
        return EMBEDDING if name == HEAD and HEAD in self._train_state.data_parallel.tied else name

    @torch.no_grad()
    def _copy_tied(self) -> None:
        """Copy the loaded state of a tied embedding to its second copy, if this rank has both."""
        train_state = self._train_state
        states = train_state.optimizer.state_tensors()
        copies = {owned.name: owned for owned in train_state.data_parallel.owned() if owned.name in (EMBEDDING, HEAD)}
        if train_state.data_parallel.tied and len(copies) == 2:
            optimizer = train_state.optimizer
            tensors = {name: {MASTERS: copies[name].value, **states.get(name, {})} for name in (EMBEDDING, HEAD)}
            for key, value in tensors[HEAD].items():
                with (
                    optimizer.opened(EMBEDDING, key, tensors[EMBEDDING][key]) as source,
                    optimizer.opened(HEAD, key, value, write=True) as target,
                ):
                    target.copy_(source)

    def _metadata(self, step: int) -> dict[str, Any]:
        return {
            "optimizer_steps": self._train_state.optimizer.steps,
            "sampler": self._corpus.state(step),
            "history": self._train_state.history.state(),
            "config": configuration.dump(self._config),
            "vocab": self._corpus.vocab_size,
            "end_of_text": self._corpus.end_of_text,
            "mapping": str(self._train_state.mesh.config),
            "placement": self._train_state.placements.state(),
            **self._extra,
        }
