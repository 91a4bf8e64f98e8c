"""Snapshots of a run's state in the memory of its hosts, from which restarted ranks resume without the disk.

    training     after step 100 │ forward, backward of 101 │ wait_staged() │ update 101 │ forward …
    background                  │ copy to this host's memory server ──▶    │ checksum, commit, send to the buddy, commit

Each rank's state has two replicas. One is on its own host, for failures of processes. The other is on the host of its
buddy, for failures of hosts (Gemini, SOSP 2023; ByteRobust, arXiv 2509.16293). The buddy is a rank that shares none of
its parallel groups (``topology.buddies``). Weights do not change between two updates, so the copy overlaps forward and
backward.

A replica has two slots, each with room for one snapshot. A slot is written only after every rank has completed the step
in the other slot. So at any time there is one step that all ranks have. The receiver of a replica verifies its CRC-32,
and so does a restarted rank before any tensor changes.
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
from moe_comm.runtime.persistent_memory import HEADER_BYTES, PersistentMemory, SlotHeader, Slots
from moe_comm.runtime.seconds import seconds_of
from moe_comm.runtime.untrusted import abridged
from moe_comm.topology import ParallelMesh
from moe_comm.topology.buddies import buddies
from moe_comm.train.checkpoint.entries import CopiesToCpu, Entry
from moe_comm.train.hooks import StepHook
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience.persistent_state import SnapshotLayout, SnapshotSearch, run_id

STATE_BYTES = 64 << 10
"""Minimum room for the JSON after the tensors."""
BLOCK = 32 << 20
"""Bytes per message to the buddy."""
_log = logging.getLogger(__name__)

Capture = Callable[[int], tuple[dict[str, Entry], dict[str, Any]]]
"""Returns this rank's state after a number of steps: tensors, and values for JSON."""


@dataclass(frozen=True)
class SnapshotStats:
    """Statistics of a snapshot of this rank."""

    step: int
    bytes: int  # size of the tensors
    stage_s: float  # seconds from the end of the step until the copy on this host was complete
    total_s: float  # seconds from the end of the step until the replicas of all ranks were complete
    buddy: int = -1  # rank whose host has the second replica; -1 for a single host


@dataclass
class _Job:
    """A snapshot in progress."""

    step: int
    entries: dict[str, Entry]
    state: bytes
    started: float
    stage_s: float = 0.0
    staged: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class PeerSnapshots(StepHook):
    """Saves snapshots of a run's state in memory every ``every`` steps. Every rank creates one. Collective.

    Args:
        capture: returns the state to save; called before the weights change again.
        growth: bytes by which the JSON can grow after the first snapshot. A little growth always has room.

    Attributes:
        reports: statistics of each snapshot that all ranks have completed.
        stalls: duration of each wait of training, in seconds.
    """

    def __init__(
        self,
        host_memory: PersistentMemory,
        ranks: Ranks,
        mesh: ParallelMesh,
        run: Path,
        every: int,
        capture: Capture,
        *,
        timeout_s: float = 300.0,
        growth: int = 0,
    ) -> None:
        self._host_memory, self._ranks, self._mesh = host_memory, ranks, mesh
        self._every, self._capture = every, capture
        self._growth = growth
        self._run = ranks.broadcast_text(run_id(run))  # the path of the folder may differ between hosts
        self._epoch = ranks.broadcast_text(secrets.token_hex(8))
        self.hosts = ranks.gather_texts(host_memory.token)
        self.buddies = buddies(mesh.config, self.hosts)
        self._group: ProcessGroup | None = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds_of("timeout_s", timeout_s)))
            if ranks.world > 1
            else None
        )
        self._complete: tuple[str, int] | None = None
        self._resumed_step = 0
        self._last_step = -1
        self._own_slots: Slots | None = None
        self._peer_slots: dict[int, Slots] = {}
        self._capacities: list[int] = []
        self._pinned: list[int] = []
        self._copies = CopiesToCpu()
        self._job: _Job | None = None
        self._failure = ""
        self.reports: list[SnapshotStats] = []
        self.stalls: list[float] = []
        self._queue: queue.Queue[_Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run_jobs, name="peer-memory", daemon=True)
        self._thread.start()

    # --- saving ---

    def before_step(self, step: int) -> None:
        """Start to copy the state after ``step - 1`` steps, if a snapshot is due. Does not wait."""
        done = step - 1
        if self._failure or done <= self._resumed_step or done == self._last_step or done % self._every:
            return
        self._last_step = done
        started = time.perf_counter()
        entries, state = self._capture(done)
        self._copies.mark(entries)
        self._job = _Job(done, entries, json.dumps(state, allow_nan=False).encode(), started)
        self._queue.put(self._job)

    def wait_staged(self) -> float:
        """Wait until the tensors may change, and return the seconds waited. Call it just before the update.

        This includes the wait for replicas of an earlier step that are still being sent.
        """
        job = self._job
        if job is None or job.staged.is_set():
            return 0.0
        began = time.perf_counter()
        job.staged.wait()
        seconds = time.perf_counter() - began
        self.stalls.append(seconds)
        return seconds

    def wait(self) -> None:
        """Wait until the last snapshot is complete on every rank, or has failed."""
        if self._job is not None:
            self._job.done.wait()

    def close(self) -> None:
        """Complete pending snapshots and destroy the group. The memory is retained. A second call does nothing."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned = []
        self._destroy_group()

    def _destroy_group(self) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def finish(self) -> None:
        """Free the memory at the end of the run. Collective."""
        self.close()
        self._ranks.barrier()
        if self._is_host_leader():
            self._host_memory.end()
        else:
            self._host_memory.close()

    def summary(self) -> dict[str, float]:
        """Return the number of snapshots of this rank, bytes of the last, total and longest stall of training in
        seconds, and mean seconds from the end of a step until its snapshot was complete on all ranks."""
        reports = self.reports
        return {
            "copies": len(reports),
            "bytes": reports[-1].bytes if reports else 0,
            "stall_s": sum(self.stalls),
            "longest_stall_s": max(self.stalls, default=0.0),
            "mean_total_s": sum(report.total_s for report in reports) / max(len(reports), 1),
        }

    def _is_host_leader(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.hosts.index(self._host_memory.token) == self._ranks.rank

    def _run_jobs(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if not self._failure:
                    with EVENTS.span(Kind.CHECKPOINT, "peer memory"):
                        self._save(job)
            except Exception as error:
                # A rank has failed, or there is not enough memory. The run continues without snapshots, or fails.
                self._failure = abridged(f"{type(error).__name__}: {error}", 160)
                _log.warning("rank %d: snapshots in memory are disabled: %s", self._ranks.rank, self._failure)
                self._destroy_group()  # otherwise the other ranks would wait until their timeout
            finally:
                job.staged.set()
                job.done.set()
                job.entries = {}

    def _save(self, job: _Job) -> None:
        layout = SnapshotLayout.of(job.entries, str(self._mesh.config))
        if not self._capacities:
            # Rounded up, so that memory of an earlier attempt has the same size and is reused.
            room = STATE_BYTES * (1 + 4 * len(job.state) // STATE_BYTES) + self._growth
            self._allocate_slots(layout.content + room)
        assert self._own_slots is not None
        slot = self._free_slot(self._own_slots)
        self._own_slots.clear(slot)
        buffer = self._own_slots.content(slot)
        gpus = [entry.tensor.device for entry in job.entries.values() if entry.tensor.is_cuda]
        if gpus and not self._pinned:
            self._pin(self._own_slots, gpus[0])
        views = layout.views(job.entries, buffer)
        in_memory = {name: view for name, view in views.items() if job.entries[name].opener is None}
        self._copies.copy((view, job.entries[name].tensor) for name, view in in_memory.items())
        for name in (name for name in views if name not in in_memory):  # as stored, so that each chunk is read once
            with job.entries[name].opened() as tensor:
                views[name].copy_(tensor)
        job.stage_s = time.perf_counter() - job.started
        job.staged.set()
        used = layout.content + len(job.state)
        problem, header = "", b""
        if used > self._capacities[self._ranks.rank]:
            problem = f"the slot is too small for {len(job.state)} bytes of JSON"
        if not problem:
            buffer[layout.content : used] = job.state
            slot_header = SlotHeader(
                run=self._run,
                epoch=self._epoch,
                step=job.step,
                owner=self._ranks.rank,
                layout=layout.digest,
                content=layout.content,
                state=len(job.state),
                crc=memory.checksum(buffer[:used]),
            )
            self._own_slots.commit(slot, slot_header)
            header = slot_header.to_bytes()
        problem = self._exchange(buffer, header) or problem
        if problem:
            _log.warning("rank %d: the snapshot of step %d failed: %s", self._ranks.rank, job.step, problem)
        if self._failures(bool(problem)):
            return
        first = self._complete is None or self._complete[0] != self._epoch
        self._complete = (self._epoch, job.step)
        if first and self._is_host_leader():
            with contextlib.suppress(MoeCommError):  # the memory server may have ended, which freed the memory
                self._host_memory.retain([_name(rank) for rank in range(self._ranks.world) if self._has_replica(rank)])
        total_s = time.perf_counter() - job.started
        buddy = self.buddies[self._ranks.rank] if self.buddies else -1
        self.reports.append(SnapshotStats(job.step, layout.content, job.stage_s, total_s, buddy))

    def _has_replica(self, owner: int) -> bool:
        """Whether this host has a replica of ``owner``'s state."""
        host = self._host_memory.token
        return self.hosts[owner] == host or bool(self.buddies and self.hosts[self.buddies[owner]] == host)

    def _allocate_slots(self, capacity: int) -> None:
        """Allocate slots for this rank's state and for its replicas of others. Raises on every rank if one cannot."""
        rank = self._ranks.rank
        problem = ""
        self._capacities = self._all_gather(capacity)
        try:
            self._own_slots = self._host_memory.allocate(_name(rank), self._capacities[rank])
            for owner, buddy in enumerate(self.buddies or ()):
                if buddy == rank:
                    self._peer_slots[owner] = self._host_memory.allocate(_name(owner), self._capacities[owner])
        except (OSError, MoeCommError) as error:
            problem = str(error)
            _log.warning("rank %d: not enough memory for snapshots: %s", rank, problem)
        if failed := self._failures(bool(problem)):
            raise CheckpointError(f"{failed} rank(s) lack memory for snapshots; this rank: {problem or 'enough'}")

    def _free_slot(self, slots: Slots) -> int:
        """Return the slot to write: not the one with the newest step that every rank has completed."""
        headers = [slots.header(slot) for slot in range(memory.SLOTS)]
        for slot, header in enumerate(headers):
            if header is not None and (header.epoch, header.step) == self._complete:
                return 1 - slot
        steps = [-1 if header is None else header.step for header in headers]
        return steps.index(min(steps))

    def _pin(self, slots: Slots, device: torch.device) -> None:
        buffer = torch.frombuffer(slots.buffer(), dtype=torch.uint8)
        with torch.cuda.device(device):  # the current device of a new thread is cuda:0
            if int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)):
                _log.warning("memory for snapshots cannot be page-locked: copies from the GPU are slower")
        self._pinned.append(buffer.data_ptr())

    def _exchange(self, content: memoryview, header: bytes) -> str:
        """Send this rank's slot to its buddy, and receive replicas of other ranks. Returns their problems, or "".

        All ranks proceed block by block, which avoids deadlocks. The header is sent first and committed last.
        """
        if self.buddies is None:
            return ""
        rank = self._ranks.rank
        replicas = {owner: (slots, self._free_slot(slots)) for owner, slots in self._peer_slots.items()}
        headers = {owner: torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu") for owner in replicas}
        works = [self._receive(headers[owner], owner) for owner in replicas]
        works.append(self._send(torch.frombuffer(bytearray(header.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)))
        # A slot is incomplete while it is written.
        for slots, slot in replicas.values():
            slots.clear(slot)
        for at in range(0, max(self._capacities[rank], *(self._capacities[owner] for owner in replicas), 1), BLOCK):
            for owner, (slots, slot) in replicas.items():
                if at < self._capacities[owner]:
                    block = slots.content(slot)[: self._capacities[owner]][at : at + BLOCK]
                    works.append(self._receive(torch.frombuffer(block, dtype=torch.uint8), owner))
            if at < self._capacities[rank]:
                block = content[: self._capacities[rank]][at : at + BLOCK]
                works.append(self._send(torch.frombuffer(block, dtype=torch.uint8)))
            for work in works:
                work.wait()
            works = []
        problems = []
        for owner, (slots, slot) in replicas.items():
            slot_header = SlotHeader.read(headers[owner].numpy().tobytes())
            size = 0 if slot_header is None else slot_header.content + slot_header.state
            if slot_header is None or size > self._capacities[owner]:
                problems.append(f"rank {owner} sent no complete state")
            elif memory.checksum(slots.content(slot)[:size]) != slot_header.crc:
                problems.append(f"the checksum of rank {owner}'s state does not match")
            else:
                slots.commit(slot, slot_header)
        return "; ".join(problems)

    def _send(self, data: Tensor) -> Any:
        assert self.buddies is not None
        return dist.isend(data, self.buddies[self._ranks.rank], group=self._group)

    def _receive(self, data: Tensor, owner: int) -> Any:
        return dist.irecv(data, owner, group=self._group)

    def _all_gather(self, value: int) -> list[int]:
        """All-gather ``value`` over the background group."""
        values = torch.zeros(self._ranks.world, dtype=torch.int64, device="cpu")
        values[self._ranks.rank] = value
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return [int(item) for item in values]

    def _failures(self, failed: bool) -> int:
        """Return the number of ranks with ``failed``. Collective."""
        return sum(self._all_gather(int(failed)))

    # --- restoring ---

    def restore(
        self, entries: Mapping[str, Entry], least: int, log: Callable[[str], None]
    ) -> tuple[int, dict[str, Any]] | None:
        """Load the newest snapshot of this run, mapping and model that is complete and undamaged on every rank.

        Collective, before training. Returns the step, ``least`` or later, and the JSON values; None if there is no such
        snapshot, and nothing has changed. ``log`` receives a line for each snapshot that cannot be used.
        """
        layout = SnapshotLayout.of(entries, str(self._mesh.config))
        search = SnapshotSearch(self._host_memory, self._ranks, self.hosts, self._run)
        snapshot = search.newest(layout.digest, least, log)
        if snapshot is None:
            return None
        with torch.no_grad():
            for name, view in layout.views(entries, snapshot.content).items():
                with entries[name].opened(write=True) as tensor:
                    tensor.copy_(view)
        self._complete = (snapshot.header.epoch, snapshot.header.step)
        self._resumed_step = snapshot.header.step
        return snapshot.header.step, snapshot.state


def _name(owner: int) -> str:
    return f"rank-{owner:05d}"
