"""A run's state in the memory of its hosts, from which ranks that are started again go on without the disk.

    training     after step 100 │ forward, backward of 101 │ wait_staged() │ update 101 │ forward …
    background                  │ copy to this host's memory server ──▶    │ checksum, commit, send to the buddy, commit

Every rank's state is kept twice: by its own host, for when only processes have died, and by a rank on another host that
shares none of its parallel groups (``topology.buddies``), for when a host is lost (Gemini, SOSP 2023; ByteRobust, arXiv
2509.16293). Weights do not change between two updates, so the copy runs beside forward and backward.

A slot is written only when every rank has completed the step in the other one: at any moment there is a step that all
have. What a slot holds is checked (CRC-32) by who receives it and by who goes on from it, before any tensor changes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import CheckpointError, MoeCommError
from moe_comm.runtime import persistent_memory as memory
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.persistent_memory import HEADER_BYTES, Header, PersistentMemory, Slots
from moe_comm.runtime.untrusted import abridged
from moe_comm.topology import ParallelMesh
from moe_comm.topology.buddies import buddies
from moe_comm.train.checkpoint import Entry
from moe_comm.train.hooks import StepHook
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience.find_snapshot import Search
from moe_comm.train.resilience.persistent_state import Layout, run_id

STATE_BYTES = 64 << 10
"""Least room for the JSON beside the tensors; it grows a little from step to step."""
BLOCK = 32 << 20
"""Bytes of one message to the buddy."""
_log = logging.getLogger(__name__)

Capture = Callable[[int], tuple[dict[str, Entry], dict[str, Any]]]
"""The tensors of this rank's state after so many steps, and what JSON can hold."""


@dataclass(frozen=True)
class Kept:
    """One copy of this rank's state. Seconds; bytes are those of its tensors.

    stage_s: from the step's end to the end of the copy in this host. total_s: until every rank's copies were complete.
    buddy: the rank whose host has the second one; -1: there is only one host.
    """

    step: int
    bytes: int
    stage_s: float
    total_s: float
    buddy: int = -1


@dataclass
class _Job:
    step: int
    entries: dict[str, Entry]
    state: bytes
    started: float
    ready: dict[torch.device, Any]
    stage_s: float = 0.0
    staged: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class PeerMemory(StepHook):
    """Keeps the state of a run in memory every ``every`` steps. Every rank makes one alike. Collective.

    Args:
        kept: of this host. run: the run's folder. capture: called where the weights are those after the step.
        timeout_s: seconds that ranks wait for each other in the background.

    Attributes:
        reports: of every step that all ranks have kept. stalls: seconds of every wait of training.
    """

    def __init__(
        self,
        kept: PersistentMemory,
        ranks: Ranks,
        mesh: ParallelMesh,
        run: Path,
        every: int,
        capture: Capture,
        *,
        timeout_s: float = 300.0,
    ) -> None:
        self._kept, self._ranks, self._mesh, self._every, self._capture = kept, ranks, mesh, every, capture
        self._run = ranks.text_from_first(run_id(run))  # hosts may see the folder under other names
        self._epoch = ranks.text_from_first(secrets.token_hex(8))
        self.hosts = ranks.texts(kept.token)
        self.buddies = buddies(mesh.config, self.hosts)
        self._group: ProcessGroup | None = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if ranks.world > 1 else None
        )
        self._good: tuple[str, int] | None = None
        self._first = 0
        self._last = -1
        self._own: Slots | None = None
        self._others: dict[int, Slots] = {}
        self._rooms: list[int] = []
        self._pinned: list[int] = []
        self._streams: dict[torch.device, Any] = {}
        self._job: _Job | None = None
        self._broken = ""
        self.reports: list[Kept] = []
        self.stalls: list[float] = []
        self._queue: queue.Queue[_Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name="peer-memory", daemon=True)
        self._thread.start()

    # --- keeping ---

    def before_step(self, step: int) -> None:
        """Start to copy the state after ``step - 1`` steps where it is time to; never waits."""
        done = step - 1
        if self._broken or done <= self._first or done == self._last or done % self._every:
            return
        self._last = done
        started = time.perf_counter()
        entries, state = self._capture(done)
        devices = {entry.tensor.device for entry in entries.values() if entry.tensor.is_cuda}
        ready = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        self._job = _Job(done, entries, json.dumps(state, allow_nan=False).encode(), started, ready)
        self._queue.put(self._job)

    def wait_staged(self) -> float:
        """Wait until the tensors may change; call it just before the update. Returns the seconds waited.

        That includes waiting for the copies of an earlier step that are still on their way.
        """
        job = self._job
        if job is None or job.staged.is_set():
            return 0.0
        began = time.perf_counter()
        job.staged.wait()
        waited = time.perf_counter() - began
        self.stalls.append(waited)
        return waited

    def wait(self) -> None:
        """Wait until every rank's copies of the last step are complete, or could not be made."""
        if self._job is not None:
            self._job.done.wait()

    def close(self) -> None:
        """Complete what is on its way, and give up the group; the memory stays kept. A second call does nothing."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned = []
        self._give_up_group()

    def _give_up_group(self) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def finish(self) -> None:
        """The run is over: nothing is kept any more. Collective."""
        self.close()
        self._ranks.barrier()
        if self._leads():
            self._kept.end()
        else:
            self._kept.close()

    def summary(self) -> dict[str, float]:
        """Of all copies this rank has made: how many, bytes of the last, seconds of stall in all and at most, and from
        a step's end until every copy was complete (mean)."""
        done = self.reports
        return {
            "copies": len(done),
            "bytes": done[-1].bytes if done else 0,
            "stall_s": sum(self.stalls),
            "longest_stall_s": max(self.stalls, default=0.0),
            "mean_total_s": sum(one.total_s for one in done) / max(len(done), 1),
        }

    def _leads(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.hosts.index(self._kept.token) == self._ranks.rank

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if not self._broken:
                    with EVENTS.span(Kind.CHECKPOINT, "peer memory"):
                        self._keep(job)
            except Exception as error:
                # A rank is gone, or there is no memory: the run goes on, or fails, without this.
                self._broken = abridged(f"{type(error).__name__}: {error}", 160)
                _log.warning("rank %d: state is no longer kept in memory: %s", self._ranks.rank, self._broken)
                self._give_up_group()  # or the others would wait for this rank until their deadline
            finally:
                job.staged.set()
                job.done.set()
                job.entries, job.ready = {}, {}

    def _keep(self, job: _Job) -> None:
        layout = Layout.of(job.entries, str(self._mesh.config))
        if not self._rooms:
            # In large steps, so that what an attempt before this one kept has the same size and stays.
            self._make_room(layout.content + STATE_BYTES * (1 + 4 * len(job.state) // STATE_BYTES))
        assert self._own is not None
        slot = self._spare(self._own)
        self._own.clear(slot)
        room = self._own.content(slot)
        self._copy(job, layout.views(job.entries, room))
        job.stage_s = time.perf_counter() - job.started
        job.staged.set()
        used = layout.content + len(job.state)
        problem = "" if used <= self._rooms[self._ranks.rank] else f"its state takes {len(job.state)} bytes of JSON"
        header = b""
        if not problem:
            room[layout.content : used] = job.state
            found = Header(
                run=self._run,
                epoch=self._epoch,
                step=job.step,
                owner=self._ranks.rank,
                layout=layout.digest,
                content=layout.content,
                state=len(job.state),
                crc=memory.checksum(room[:used]),
            )
            self._own.commit(slot, found)
            header = found.to_bytes()
        problem = self._exchange(room, header) or problem
        if problem:
            _log.warning("rank %d: step %d is not kept in memory: %s", self._ranks.rank, job.step, problem)
        if self._failures(bool(problem)):
            return
        first = self._good is None or self._good[0] != self._epoch
        self._good = (self._epoch, job.step)
        if first and self._leads():
            with contextlib.suppress(MoeCommError):  # a memory server that has ended keeps nothing else either
                self._kept.retain([_name(rank) for rank in range(self._ranks.world) if self._holds(rank)])
        total_s = time.perf_counter() - job.started
        buddy = self.buddies[self._ranks.rank] if self.buddies else -1
        self.reports.append(Kept(job.step, layout.content, job.stage_s, total_s, buddy))

    def _holds(self, owner: int) -> bool:
        """Whether this host has a copy of ``owner``'s state."""
        here = self._kept.token
        return self.hosts[owner] == here or bool(self.buddies and self.hosts[self.buddies[owner]] == here)

    def _make_room(self, room: int) -> None:
        """Memory for this rank's state and for those it keeps. Raises on every rank where one has not enough."""
        rank = self._ranks.rank
        problem = ""
        self._rooms = self._all(room)
        try:
            self._own = self._kept.make(_name(rank), self._rooms[rank])
            for owner, buddy in enumerate(self.buddies or ()):
                if buddy == rank:
                    self._others[owner] = self._kept.make(_name(owner), self._rooms[owner])
        except (OSError, MoeCommError) as error:
            problem = str(error)
            _log.warning("rank %d: no memory to keep state in: %s", rank, problem)
        if failed := self._failures(bool(problem)):
            raise CheckpointError(f"{failed} rank(s) have no memory to keep state in; {problem or 'this one has'}")

    def _spare(self, slots: Slots) -> int:
        """The slot to write: never the one with the newest step that every rank has."""
        headers = [slots.header(slot) for slot in range(memory.SLOTS)]
        for slot, header in enumerate(headers):
            if header is not None and (header.epoch, header.step) == self._good:
                return 1 - slot
        steps = [-1 if header is None else header.step for header in headers]
        return steps.index(min(steps))

    def _copy(self, job: _Job, views: Mapping[str, Tensor]) -> None:
        """From a GPU by a stream of its own, after what the step has enqueued, to memory that is page-locked."""
        if job.ready and not self._pinned and self._own is not None:
            self._pin(self._own, next(iter(job.ready)))
        for device, event in job.ready.items():
            self._streams.setdefault(device, torch.cuda.Stream(device)).wait_event(event)
        for name, view in views.items():
            source = job.entries[name].tensor
            if source.is_cuda:
                with torch.cuda.stream(self._streams[source.device]):
                    view.copy_(source, non_blocking=True)
            else:
                view.copy_(source)
        for device in job.ready:
            self._streams[device].synchronize()

    def _pin(self, slots: Slots, device: torch.device) -> None:
        whole = torch.frombuffer(slots.whole(), dtype=torch.uint8)
        with torch.cuda.device(device):  # of this thread
            if int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)):
                _log.warning("the memory in which state is kept cannot be page-locked: copies from the GPU are slower")
        self._pinned.append(whole.data_ptr())

    def _exchange(self, content: memoryview, header: bytes) -> str:
        """Send this rank's slot to its buddy, and take in those it keeps; what is wrong with one of these, or "".

        All go on a block at a time, so that no rank waits for one that waits for it. A header is the first message, and
        is written last.
        """
        if self.buddies is None:
            return ""
        rank = self._ranks.rank
        parts = {owner: (slots, self._spare(slots)) for owner, slots in self._others.items()}
        headers = {owner: torch.zeros(HEADER_BYTES, dtype=torch.uint8) for owner in parts}
        works = [self._receive(headers[owner], owner) for owner in parts]
        works.append(self._send(torch.frombuffer(bytearray(header.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)))
        for slots, slot in parts.values():
            slots.clear(slot)
        for at in range(0, max(self._rooms[rank], *(self._rooms[owner] for owner in parts), 1), BLOCK):
            for owner, (slots, slot) in parts.items():
                if at < self._rooms[owner]:
                    block = slots.content(slot)[: self._rooms[owner]][at : at + BLOCK]
                    works.append(self._receive(torch.frombuffer(block, dtype=torch.uint8), owner))
            if at < self._rooms[rank]:
                block = content[: self._rooms[rank]][at : at + BLOCK]
                works.append(self._send(torch.frombuffer(block, dtype=torch.uint8)))
            for work in works:
                work.wait()
            works = []
        problems = []
        for owner, (slots, slot) in parts.items():
            found = Header.read(headers[owner].numpy().tobytes())
            size = 0 if found is None else found.content + found.state
            if found is None or size > self._rooms[owner]:
                problems.append(f"rank {owner} sent no whole state")
            elif memory.checksum(slots.content(slot)[:size]) != found.crc:
                problems.append(f"what rank {owner} sent arrived with another checksum")
            else:
                slots.commit(slot, found)
        return "; ".join(problems)

    def _send(self, data: Tensor) -> Any:
        assert self.buddies is not None
        return dist.isend(data, self.buddies[self._ranks.rank], group=self._group)

    def _receive(self, data: Tensor, owner: int) -> Any:
        return dist.irecv(data, owner, group=self._group)

    def _all(self, value: int) -> list[int]:
        """``value`` of every rank, over the group of the background."""
        values = torch.zeros(self._ranks.world, dtype=torch.int64)
        values[self._ranks.rank] = value
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return [int(one) for one in values]

    def _failures(self, failed: bool) -> int:
        """How many ranks have failed; all of them have come this far."""
        return sum(self._all(int(failed)))

    # --- going on ---

    def restore(
        self, entries: Mapping[str, Entry], least: int, say: Callable[[str], None]
    ) -> tuple[int, dict[str, Any]] | None:
        """Fill ``entries`` with the newest step of this run, mapping and model that every rank's state is kept of and
        is undamaged, if it is not before ``least``; returns it and the JSON beside. None: nothing has changed.
        Collective, before training.

        Args:
            say: for what was damaged.
        """
        search = Search(self._kept, self._ranks, self.hosts, self._run)
        layout = Layout.of(entries, str(self._mesh.config))
        found = search.newest(layout.digest, least, say)
        if found is None:
            return None
        with torch.no_grad():
            for name, view in layout.views(entries, found.content).items():
                entries[name].tensor.copy_(view)
        self._good = (found.header.epoch, found.header.step)
        self._first = found.header.step
        return found.header.step, found.state


def _name(owner: int) -> str:
    return f"rank-{owner:05d}"
