"""``Checkpointer``: saves in the background while training goes on (DataStates-LLM's lazy scheme, arXiv 2406.10707).

    training    save(100) │ forward, backward of step 101 │ wait_staged() │ optimizer step 101 │ forward …
    background            │ plan │ copy to host memory ───▶               │ write, hash, fsync ─────▶ rename │

Weights and optimizer state do not change between two optimizer steps, so the copy runs beside the next forward and
backward. Training waits only where the copy takes longer, and that wait is measured.
"""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp

from moe_comm.errors import CheckpointError, ConfigError
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.group_names import group_of
from moe_comm.runtime.untrusted import DEEPEST, parse_object
from moe_comm.train.checkpoint import folder as folders
from moe_comm.train.checkpoint.entries import Entry
from moe_comm.train.checkpoint.exchange import PeerLost, agree, describe, run_torch
from moe_comm.train.checkpoint.loading import Loaded, load
from moe_comm.train.checkpoint.planner import EntryPlanner, Request
from moe_comm.train.checkpoint.staging import Stager
from moe_comm.train.checkpoint.storage import Writer

_log = logging.getLogger(__name__)
_NO_GROUP = "this Checkpointer is closed, or lost a rank in an earlier call: start the ranks again"
T = TypeVar("T")


@dataclass(frozen=True)
class SaveReport:
    """One save of this rank. Seconds; bytes are those of this rank's file.

    stall_s: what training waited in ``save`` and ``wait_staged``. stage_s: from the call to the end of the copy.
    total_s: from the call to the renamed folder.
    """

    step: int
    path: Path
    bytes: int
    stall_s: float
    stage_s: float
    total_s: float


@dataclass
class _Job:
    """A save that is under way."""

    step: int
    started: float
    stall_s: float = 0.0
    stage_s: float = 0.0
    total_s: float = 0.0
    bytes: int = 0
    problem: str | None = None
    peer_lost: bool = False
    staged: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


class Checkpointer:
    """Saves and loads the checkpoints of one run. Every rank makes one alike. Collective: makes a group of its own.

        with Checkpointer("runs/a/checkpoints") as checkpoints:
            loaded = checkpoints.resume(entries)              # None where there is nothing to resume from
            for step in ...:
                forward_and_backward()
                checkpoints.wait_staged()                     # just before the weights change
                optimizer.step()
                if step % 100 == 0:
                    checkpoints.save(step, entries, state={"sampler": ...})

    ``save``, ``wait`` and ``close`` raise what failed in the background since, on every rank at the same call;
    ``wait_staged`` raises nothing. The group is on gloo and used by nothing else, so saves do not mix with training's
    own collectives.

    Args:
        folder: of this run's checkpoints; on a file system that all ranks share. Made by the first save.
        keep: complete checkpoints to keep; older ones are deleted after a save.
        timeout_s: seconds that ranks wait for each other, such as for the slowest to write its file.

    Raises:
        ConfigError: ``keep`` or ``timeout_s`` is no positive number.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3, timeout_s: float = 1800.0) -> None:
        if keep < 1 or timeout_s <= 0:
            raise ConfigError(f"keep must be at least 1 and timeout_s positive; got {keep} and {timeout_s}")
        self.folder = Path(folder)
        self.keep = keep
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if several else 0
        self._group: ProcessGroup | None = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if several else None
        )
        self._several = several
        self._stager = Stager()
        self._planner = EntryPlanner(self._stager)
        self._job: _Job | None = None
        self._report: SaveReport | None = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as late:
            if error is None:
                raise
            _log.warning("%s", late)  # what ended the block is the cause, or at least came first

    @property
    def report(self) -> SaveReport | None:
        """Of the last save that was completed, None before it."""
        return self._report

    def save(
        self,
        step: int,
        entries: Mapping[str, Entry],
        state: Mapping[str, Any] | None = None,
        rank_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Start saving; the entries' tensors must not change before ``wait_staged``. Collective, in the background.

        Waits for a save before it that is still under way.

        Args:
            entries: what this rank holds, by global name ("model/layers.0.w13"); equal names on several ranks are
                parts or copies of one tensor.
            state: what JSON can hold, the same on all ranks; rank 0's is saved.
            rank_state: what JSON can hold, of this rank alone (such as ``rng_state()``).

        Raises:
            CheckpointError: the save before it failed; this one has not been started, and calling again starts it.
        """
        started = time.perf_counter()
        self.wait()
        if self._several and self._group is None:
            raise CheckpointError(_NO_GROUP)
        job = _Job(step, started)
        entries = dict(entries)
        mine, shared, problem = "{}", {}, None
        try:
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"step must be a whole number of at least 0; got {step!r}")
            mine = json.dumps(dict(rank_state or {}), allow_nan=False)
            # Read as a load will: two levels stand around them in metadata.json.
            parse_object(mine, DEEPEST - 2)
            shared = parse_object(json.dumps(dict(state or {}), allow_nan=False), DEEPEST - 2)
            self._stager.mark(entries)
        except (TypeError, ValueError, RecursionError) as error:
            # Told to the others by the plan, so that all ranks fail alike.
            problem = f"step {step!r}, state and rank_state must be what JSON can hold: {error}"
        self._planner.request = Request(step, mine, problem)
        job.thread = threading.Thread(
            target=self._work, args=(job, entries, shared), name=f"checkpoint-{step}", daemon=True
        )
        self._job = job
        job.thread.start()
        job.stall_s = time.perf_counter() - started

    def wait_staged(self) -> float:
        """Wait until the tensors given to ``save`` may change; call it just before the optimizer's step.

        Returns:
            Seconds waited; 0 where no save is under way.
        """
        job = self._job
        if job is None or job.staged.is_set():
            return 0.0
        started = time.perf_counter()
        job.staged.wait()
        waited = time.perf_counter() - started
        job.stall_s += waited
        return waited

    def wait(self) -> SaveReport | None:
        """Wait until the save under way is complete, on the disk and renamed.

        Returns:
            The report of the last save; None where there was none.

        Raises:
            CheckpointError: it failed, on whichever rank; earlier checkpoints are as they were.
        """
        job = self._job
        if job is None:
            return self._report
        assert job.thread is not None
        with self._meeting("saving"):
            job.thread.join()
        self._job = None
        if job.problem is not None:
            raise CheckpointError(f"step {job.step} could not be saved to {self.folder}: {job.problem}")
        path = folders.step_path(self.folder, job.step)
        self._report = SaveReport(job.step, path, job.bytes, job.stall_s, job.stage_s, job.total_s)
        return self._report

    def close(self) -> None:
        """Finish the save under way and give up the group. A second call does nothing.

        A signal handler that raises may interrupt it; called again, it goes on waiting.

        Raises:
            CheckpointError: as ``wait``.
        """
        try:
            self.wait()
        finally:
            if self._job is None:
                self._give_up_group()

    def latest(self) -> Path | None:
        """The newest complete checkpoint of the folder, the same on every rank. Collective.

        Raises:
            CheckpointError: a completion marker is damaged.
        """
        first = self.rank == 0
        return self._together(lambda: agree(self._group, lambda: folders.latest(self.folder) if first else None))[0]

    def load(
        self, path: str | Path, entries: Mapping[str, Entry], *, cast: bool = False, allow_unused: bool = False
    ) -> Loaded:
        """Fill ``entries`` from the checkpoint at ``path``; see ``load``. Collective."""
        return self._together(lambda: load(path, entries, self._group, cast=cast, allow_unused=allow_unused))

    def resume(self, entries: Mapping[str, Entry]) -> Loaded | None:
        """Fill ``entries`` from the newest complete checkpoint; None where there is none. Collective.

        Raises:
            CheckpointError: as ``load``; it does not go back to an older one by itself.
        """
        path = self.latest()
        return None if path is None else self.load(path, entries)

    def _work(self, job: _Job, entries: dict[str, Entry], state: dict[str, Any]) -> None:
        """Plan, stage, write, publish; in the background. Whatever happens, nobody waits for it in vain."""
        try:
            if self._write(job, entries, state):
                return
            # The error is forgotten by now: its traceback would keep the group, and the ranks that wait for us waiting.
            self._planner.forget()
            if self.rank == 0:
                folders.discard(self.folder, job.step)
            if job.peer_lost:
                self._give_up_group()
        finally:
            job.total_s = time.perf_counter() - job.started
            job.staged.set()

    def _write(self, job: _Job, entries: dict[str, Entry], state: dict[str, Any]) -> bool:
        """Whether it succeeded; if not, ``job`` says why."""
        try:
            writer = Writer(self.folder, job.step, self.rank, lambda: (state, self._planner.states))
            self._planner.on_staged = lambda: self._staged(job)
            run_torch(lambda: self._save(entries, writer))
            job.bytes = writer.written
            if self.rank == 0:
                folders.prune(self.folder, self.keep)
        except BaseException as error:
            job.problem = describe(error)
            job.peer_lost = isinstance(error, PeerLost)
        return job.problem is None

    def _save(self, entries: dict[str, Entry], writer: Writer) -> None:
        dcp.save(
            entries,
            storage_writer=writer,
            planner=self._planner,
            process_group=self._group,
            no_dist=self._group is None,
        )

    def _staged(self, job: _Job) -> None:
        job.stage_s = time.perf_counter() - job.started
        job.staged.set()

    def _meeting(self, name: str) -> AbstractContextManager[object]:
        """Around what waits for all ranks, on the main thread: so others know who does not come."""
        return EVENTS.span(Kind.CHECKPOINT, name, group=group_of(self._group))

    def _together(self, call: Callable[[], T]) -> T:
        """A collective outside of a save."""
        self.wait()
        if self._several and self._group is None:
            raise CheckpointError(_NO_GROUP)
        try:
            with self._meeting("exchange"):
                return call()
        except PeerLost as error:
            text = str(error)
        self._give_up_group()
        raise PeerLost(text)

    def _give_up_group(self) -> None:
        """Closing our connections tells the ranks that wait for us, which else learn it at their deadline."""
        group, self._group = self._group, None
        if group is not None:
            if dist.is_initialized():
                dist.destroy_process_group(group)
            del group
            gc.collect()  # connections close with the last reference, some of which are in cycles
