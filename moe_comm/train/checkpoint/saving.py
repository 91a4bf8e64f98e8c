"""``Checkpointer`` saves in the background during training (DataStates-LLM's lazy scheme, arXiv 2406.10707).

    training    save(100) │ forward, backward of step 101 │ wait_staged() │ optimizer step 101 │ forward …
    background            │ plan │ copy to CPU memory ───▶                │ write, hash, fsync ─────▶ rename │

Weights and optimizer state do not change between two optimizer steps, so the copy overlaps the next forward and
backward. Training only waits if the copy takes longer, and that wait is measured.
"""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from moe_comm.comm.peers import Peers, Process
from moe_comm.errors import CheckpointError, ConfigError
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.groups import group_of
from moe_comm.runtime.seconds import seconds_of
from moe_comm.runtime.untrusted import DEEPEST, parse_object, shown
from moe_comm.train.checkpoint import files, folder as folders
from moe_comm.train.checkpoint.entries import Entry, check_loadable
from moe_comm.train.checkpoint.exchange import (
    SOME_RANK,
    PeerLost,
    describe_error,
    gather_or_raise,
    run_torch,
)
from moe_comm.train.checkpoint.files import FileDigest
from moe_comm.train.checkpoint.metadata import CheckpointContent, ChunkLocation, encode
from moe_comm.train.checkpoint.planner import EntryPlanner, Stager
from moe_comm.train.checkpoint.reader import CheckpointReader, Loaded, load

_log = logging.getLogger(__name__)
_NO_GROUP = "this Checkpointer is closed, or {lost} in an earlier call: restart the ranks"
T = TypeVar("T")


@dataclass(frozen=True)
class SaveReport:
    """Statistics of one save of this rank.

    Attributes:
        bytes: size of this rank's file.
        stall_s: seconds that training waited in ``save`` and ``wait_staged``.
        stage_s: seconds from the call to the end of the copy.
        total_s: seconds from the call to the renamed folder.
    """

    step: int
    path: Path
    bytes: int
    stall_s: float
    stage_s: float
    total_s: float


class _Writer(StorageWriter):
    """Storage of torch's distributed checkpoint. Writes safetensors, JSON, checksums and a marker, without pickle.

    Args:
        parent: the folder of the run's checkpoints.
        finished: returns the shared state and the state of each rank; called on the coordinator when all is written.

    Attributes:
        written: bytes of this rank's file.
        created: whether this rank has created the ``.partial`` folder.
    """

    def __init__(
        self, parent: Path, step: int, rank: int, finished: Callable[[], tuple[dict[str, Any], list[dict[str, Any]]]]
    ) -> None:
        self._parent, self._step, self._rank, self._finished = parent, step, rank, finished
        self.written = 0
        self.created = False

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def prepare_global_plan(self, plans: Any) -> Any:
        # On the coordinator, when all ranks have a valid plan and before any rank writes.
        folders.check_version(self._parent, self._step)
        with _convert_os_errors(folders.partial_path(self._parent, self._step)):
            folders.create_partial(self._parent, self._step)
        self.created = True
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"rank-{self._rank:05d}.safetensors"
        path = folders.partial_path(self._parent, self._step) / name
        results = []
        if plan.items:
            parts = []
            assert isinstance(planner, EntryPlanner)
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                at = ",".join(map(str, item.index.offset or ()))
                parts.append((f"{item.index.fqn}@{at}", tensor))
            with _convert_os_errors(path):
                if not path.parent.is_dir():
                    raise CheckpointError(
                        f"{path.parent} does not exist on rank {self._rank}, although rank 0 created it: the folder of "
                        f"the checkpoints must be on a file system that all ranks share"
                    )
                digest, starts = files.write_parts(
                    path, parts, {"step": str(self._step)}, lambda n: planner.opened(plan.items[n])
                )
            self.written = digest.size
            for item, (_, tensor), start in zip(plan.items, parts, starts, strict=True):
                results.append(WriteResult(item.index, tensor.nbytes, (ChunkLocation(name, start), digest)))
            planner.on_staged()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        locations, digests = {}, {}
        for result in (result for of_rank in results for result in of_rank):
            location, digest = result.storage_data
            locations[result.index] = location
            digests[location.file] = digest
        state, ranks = self._finished()
        saved = CheckpointContent(
            self._step, state, tuple(ranks), Metadata(metadata.state_dict_metadata, storage_data=locations)
        )
        with _convert_os_errors(folders.partial_path(self._parent, self._step)):
            written: dict[str, FileDigest] = dict(digests)
            path = folders.partial_path(self._parent, self._step) / folders.METADATA
            written[folders.METADATA] = files.write_json(path, encode(saved))
            partial = folders.complete(self._parent, self._step, written)
            # As a load does, before it replaces a checkpoint and others are deleted.
            CheckpointReader(partial).verify_sizes()
            folders.publish(self._parent, self._step)


@contextmanager
def _convert_os_errors(path: Path) -> Iterator[None]:
    """Convert an OSError to a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {error.filename or path}: {error.strerror or error}") from None


@dataclass
class _Job:
    """A save in progress."""

    step: int
    started: float
    stall_s: float = 0.0
    stage_s: float = 0.0
    total_s: float = 0.0
    bytes: int = 0
    problem: str | None = None
    peer_lost: bool = False
    writer: _Writer | None = None
    staged: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


class Checkpointer:
    """Saves and loads the checkpoints of a run. Every rank creates one. Collective: it creates a process group.

        with Checkpointer("runs/a/checkpoints") as checkpoints:
            loaded = checkpoints.resume(entries)              # None if there is no checkpoint
            for step in ...:
                forward_and_backward()
                checkpoints.wait_staged()                     # just before the weights change
                optimizer.step()
                if step % 100 == 0:
                    checkpoints.save(step, entries, state={"sampler": ...})

    ``save``, ``wait`` and ``close`` raise errors of the background thread, on every rank in the same call.
    ``wait_staged`` does not. The gloo group is used for nothing else, so saves do not interfere with the collectives of
    training.

    Args:
        folder: folder of the run's checkpoints on a file system that all ranks share. The first save creates it.
        keep: number of complete checkpoints to keep; older ones are deleted after a save.
        timeout_s: seconds that ranks wait for each other, for example for the slowest one to write its file.

    Raises:
        ConfigError: ``keep`` or ``timeout_s`` is not a positive number.
        CheckpointError: a rank failed, or did not create its own in time.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3, timeout_s: float = 1800.0) -> None:
        if keep < 1:
            raise ConfigError(f"keep must be at least 1; got {keep}")
        timeout_s = seconds_of("timeout_s", timeout_s)
        self.folder = Path(folder)
        self.keep = keep
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if distributed else 0
        self._group: ProcessGroup | None = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if distributed else None
        )
        self._distributed = distributed
        self._lost = "lost a rank"
        self._peers: Peers | None = None  # to name the ranks that end
        if self._group is not None:
            processes = gather_or_raise(self._group, Process.own)
            self._peers = Peers(processes, self.rank, dist.HashStore(), "")  # no notes are read: the store is local
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
        except CheckpointError as save_error:
            if error is None:
                raise
            _log.warning("%s", save_error)  # the error that ended the block came first

    @property
    def report(self) -> SaveReport | None:
        """The statistics of the last completed save; None before it."""
        return self._report

    def save(
        self,
        step: int,
        entries: Mapping[str, Entry],
        state: Mapping[str, Any] | None = None,
        rank_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Start to save in the background. Collective.

        The tensors of the entries must not change before ``wait_staged``. Those that are not in memory are copied
        when they are written. Waits for the previous save first.

        Args:
            entries: tensors of this rank, by global name ("model/layers.0.w13"). Equal names on several ranks are
                shards or replicas of one tensor.
            state: JSON values that are equal on all ranks; those of rank 0 are saved.
            rank_state: JSON values of this rank, such as ``rng_state()``.

        Raises:
            CheckpointError: the previous save failed. This one was not started; call again to start it.
        """
        started = time.perf_counter()
        self.wait()
        if self._distributed and self._group is None:
            raise CheckpointError(_NO_GROUP.format(lost=self._lost))
        job = _Job(step, started)
        entries = dict(entries)
        own_state, shared, problem = "{}", {}, None
        try:
            own_state = json.dumps(dict(rank_state or {}), allow_nan=False)
            # Parse it as a load will. In metadata.json it is nested two levels deeper.
            parse_object(own_state, DEEPEST - 2)
            shared = parse_object(json.dumps(dict(state or {}), allow_nan=False), DEEPEST - 2)
        except (TypeError, ValueError, RecursionError) as error:
            # The plan sends it to the other ranks, so that all ranks raise.
            problem = f"state and rank_state must be valid JSON: {error}"
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= folders.MAX_STEP:
            problem = f"step must be a whole number from 0 to {folders.MAX_STEP}; got {shown(step)}"
        try:
            for name, entry in entries.items():
                check_loadable(name, entry)
            self._stager.copies.mark(entries)
        except (TypeError, ValueError) as error:
            problem = problem or str(error)
        self._planner.step, self._planner.state, self._planner.problem = step, own_state, problem
        job.thread = threading.Thread(
            target=self._work, args=(job, entries, shared), name=f"checkpoint-{shown(step)}", daemon=True
        )
        self._job = job
        job.thread.start()
        job.stall_s = time.perf_counter() - started

    def wait_staged(self) -> float:
        """Wait until the tensors of the last ``save`` may change. Call it just before the optimizer's step.

        Returns:
            Seconds waited; 0 if no save is in progress.
        """
        job = self._job
        if job is None or job.staged.is_set():
            return 0.0
        started = time.perf_counter()
        job.staged.wait()
        seconds = time.perf_counter() - started
        job.stall_s += seconds
        return seconds

    def wait(self) -> SaveReport | None:
        """Wait until the save in progress is complete and its folder renamed.

        Returns:
            The statistics of the last save, or None.

        Raises:
            CheckpointError: it failed on some rank; earlier checkpoints are unchanged.
        """
        job = self._job
        if job is None:
            return self._report
        assert job.thread is not None
        with self._span("saving"):
            job.thread.join()
        self._job = None
        if job.problem is not None:
            raise CheckpointError(f"step {shown(job.step)} could not be saved to {self.folder}: {job.problem}")
        path = folders.step_path(self.folder, job.step)
        self._report = SaveReport(job.step, path, job.bytes, job.stall_s, job.stage_s, job.total_s)
        return self._report

    def close(self) -> None:
        """Finish the save in progress and destroy the group. A second call does nothing.

        If a signal handler interrupts it with an exception, call it again.
        """
        try:
            self.wait()
        finally:
            if self._job is None:
                self._destroy_group()

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint of the folder, or None, on every rank. Collective.

        Raises:
            CheckpointError: a completion marker is damaged, or the folder cannot be read.
        """
        first = self.rank == 0
        return self._collective(
            lambda: gather_or_raise(self._group, lambda: folders.latest(self.folder) if first else None)
        )[0]

    def load(
        self, path: str | Path, entries: Mapping[str, Entry], *, cast: bool = False, allow_unused: bool = False
    ) -> Loaded:
        """Fill ``entries`` from the checkpoint at ``path``; see ``load``. Collective."""
        return self._collective(lambda: load(path, entries, self._group, cast=cast, allow_unused=allow_unused))

    def resume(self, entries: Mapping[str, Entry]) -> Loaded | None:
        """Fill ``entries`` from the newest complete checkpoint. Returns None if there is none. Collective.

        Raises:
            CheckpointError: as ``load``; it does not try older checkpoints.
        """
        path = self.latest()
        return None if path is None else self.load(path, entries)

    def _work(self, job: _Job, entries: dict[str, Entry], state: dict[str, Any]) -> None:
        """Plan, stage, write and publish, in the background. On an error, release all ranks that wait."""
        try:
            if self._write(job, entries, state):
                return
            # ``_write`` keeps no reference to the error. Its traceback would keep the group alive, so that other ranks
            # would wait.
            self._planner.forget()
            if job.writer is not None and job.writer.created:
                folders.discard(self.folder, job.step)
            if job.peer_lost:
                self._destroy_group()
        finally:
            job.total_s = time.perf_counter() - job.started
            job.staged.set()

    def _write(self, job: _Job, entries: dict[str, Entry], state: dict[str, Any]) -> bool:
        """Save, and return whether it succeeded. If not, ``job.problem`` is set."""

        def staged() -> None:
            if not job.staged.is_set():
                job.stage_s = time.perf_counter() - job.started
                job.staged.set()

        try:
            group, planner = self._group, self._planner
            writer = _Writer(self.folder, job.step, self.rank, lambda: (state, planner.states))
            job.writer = writer
            planner.on_staged = staged
            run_torch(
                lambda: dcp.save(
                    entries, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None
                )
            )
            job.bytes = writer.written
            if self.rank == 0:
                folders.prune(self.folder, self.keep)
        except BaseException as error:
            job.peer_lost = isinstance(error, PeerLost)
            job.problem = self._name_lost(str(error)) if job.peer_lost else describe_error(error)
        return job.problem is None

    def _span(self, name: str) -> AbstractContextManager[object]:
        """Return a span around a wait for all ranks on the main thread, for watchers."""
        return EVENTS.span(Kind.CHECKPOINT, name, group=group_of(self._group))

    def _collective(self, call: Callable[[], T]) -> T:
        """Run a collective outside of a save."""
        self.wait()
        if self._distributed and self._group is None:
            raise CheckpointError(_NO_GROUP.format(lost=self._lost))
        try:
            with self._span("exchange"):
                return call()
        except PeerLost as error:
            text = str(error)
        self._destroy_group()
        raise PeerLost(self._name_lost(text))

    def _name_lost(self, text: str) -> str:
        """Return the message of a ``PeerLost`` with the ranks on this host that have ended."""
        lost = self._peers.lost() if self._peers is not None and SOME_RANK in text else ""
        if lost:
            self._lost = f"lost {lost}"
            text = text.replace(SOME_RANK, self._lost)
        return text

    def _destroy_group(self) -> None:
        """Close the connections. Otherwise ranks that wait for this one would wait until their timeout."""
        group, self._group = self._group, None
        if group is not None:
            if dist.is_initialized():
                dist.destroy_process_group(group)
            del group
            gc.collect()  # connections close with the last reference, and some references are in cycles
