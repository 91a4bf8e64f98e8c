"""Snapshots in the memory of hosts: their layout, the runs that have some, and the search for the newest.

``peer_memory`` describes snapshots, their replicas and slots.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.errors import CheckpointError, ConfigError, MoeCommError, PeerDied
from moe_comm.runtime import persistent_memory as memory
from moe_comm.runtime.launch import STORE_VARIABLE, under_torchrun
from moe_comm.runtime.persistent_memory import LauncherProcess, PersistentMemory, SlotHeader
from moe_comm.runtime.untrusted import parse_object
from moe_comm.train.checkpoint import Entry
from moe_comm.train.ranks import Ranks

ALIGN = 64
"""Alignment of each tensor in bytes."""


@dataclass(frozen=True)
class SnapshotLayout:
    """Offsets of the tensors in a slot (the buffer of one snapshot), their total size, and a digest of names, shapes
    and mapping."""

    offsets: dict[str, int]
    content: int
    digest: str

    @classmethod
    def of(cls, entries: Mapping[str, Entry], mapping: str) -> SnapshotLayout:
        offsets, end = {}, 0
        for name, entry in entries.items():
            offsets[name] = end
            end += -(-entry.tensor.numel() * entry.tensor.element_size() // ALIGN) * ALIGN
        # Without boxes, which follow from the mapping and the placement of experts in the snapshot's state.
        parts = [mapping, *(f"{n} {tuple(e.tensor.shape)} {e.tensor.dtype} {e.shape}" for n, e in entries.items())]
        return cls(offsets, end, hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest())

    def views(self, entries: Mapping[str, Entry], content: Any) -> dict[str, Tensor]:
        """Return the tensors in ``content`` (a writable buffer) that correspond to the non-empty entries."""
        return {
            name: torch.frombuffer(
                content, dtype=entry.tensor.dtype, count=entry.tensor.numel(), offset=self.offsets[name]
            ).view(entry.tensor.shape)
            for name, entry in entries.items()
            if entry.tensor.numel()
        }


def run_id(folder: Path) -> str:
    """Return the id of a run, which depends on its folder."""
    return hashlib.blake2b(os.path.abspath(folder).encode(), digest_size=8).hexdigest()


def open_host_memory(ranks: Ranks, log: Callable[[str], None], host: str = "") -> PersistentMemory | None:
    """Connect to the memory server of this host. Returns None on all ranks if one of them cannot. Collective.

    Snapshots in memory are only used where torchrun or ``launch`` restarts the ranks.
    """
    host_memory, problem = None, ""
    try:
        if not under_torchrun():
            raise ConfigError("no launcher would restart these ranks; use torchrun or moe-comm train --restarts")
        store = os.environ.get(STORE_VARIABLE)
        owner = LauncherProcess.parent(str(Path(store).parent) if store else "")
        host_memory = PersistentMemory(owner, host=host, start=os.environ.get("LOCAL_RANK", "0") == "0")
    except (MoeCommError, OSError) as error:
        problem = str(error)
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(ranks.gather_texts(problem)) if text]
    if not problems:
        return host_memory
    if host_memory is not None:
        host_memory.close()
    log(f"no snapshots are saved in memory: {problems[0]}")
    return None


def runs_in_memory(host_memory: PersistentMemory | None, ranks: Ranks) -> frozenset[str]:
    """Return the ``run_id`` of all runs with snapshots on any host. Collective."""
    local = {header.run for _, _, header in host_memory.headers()} if host_memory is not None else set()
    return frozenset(run for text in ranks.gather_texts(json.dumps(sorted(local))) for run in json.loads(text))


BLOCK = 32 << 20
"""Bytes per message."""


@dataclass(frozen=True)
class Snapshot:
    """The verified snapshot of this rank. ``content`` is a writable buffer that is valid as long as this object."""

    header: SlotHeader
    content: Any
    state: dict[str, Any]


@dataclass(frozen=True)
class _Copy:
    """A replica of a rank's state: a complete slot in the memory of a host. ``host``: first rank of that host."""

    host: int
    name: str
    slot: int
    header: SlotHeader


class SnapshotSearch:
    """The snapshots of the run with id ``run`` in the memory of all hosts. Collective over the default group.

    ``hosts`` has the token of each rank's memory server; ranks of one host have the same.
    """

    def __init__(self, host_memory: PersistentMemory, ranks: Ranks, hosts: Sequence[str], run: str) -> None:
        self._host_memory, self._ranks = host_memory, ranks
        self._host_of = [hosts.index(host) for host in hosts]
        is_host_leader = self._host_of[ranks.rank] == ranks.rank
        headers = host_memory.headers() if is_host_leader else []
        local = [(name, slot, vars(header)) for name, slot, header in headers if header.run == run]
        self.copies = [
            _Copy(host, name, slot, SlotHeader(**header))
            for host, text in enumerate(ranks.gather_texts(json.dumps(local)))
            for name, slot, header in json.loads(text)
        ]

    def newest(self, layout: str, least: int, log: Callable[[str], None]) -> Snapshot | None:
        """Return this rank's part of the newest snapshot from step ``least`` on, or None on all ranks.

        ``layout`` is the digest of this rank's ``SnapshotLayout``; snapshots of another layout are ignored. ``log``
        receives the reason why a snapshot cannot be used.
        """
        layouts = self._ranks.gather_texts(layout)
        # Copies by (step, epoch) and owner.
        snapshots: dict[tuple[int, str], dict[int, list[_Copy]]] = {}
        for copy in self.copies:
            header = copy.header
            matches = header.owner < self._ranks.world and header.layout == layouts[header.owner]
            if matches and header.step >= least:
                owners = snapshots.setdefault((header.step, header.epoch), {})
                owners.setdefault(header.owner, []).append(copy)
        if self.copies and not snapshots:
            log("the snapshots in memory are older than the checkpoint, or of another mapping or model")
        for (step, _), owners in sorted(snapshots.items(), reverse=True):
            missing = [rank for rank in range(self._ranks.world) if rank not in owners]
            if missing:
                log(f"the snapshot of step {step} is incomplete: it lacks rank {', '.join(map(str, missing[:8]))}")
            elif (snapshot := self._fetch(owners, log)) is not None:
                return snapshot
        return None

    def _fetch(self, owners: dict[int, list[_Copy]], log: Callable[[str], None]) -> Snapshot | None:
        """Load the state of every rank from its own host if possible, and from another host if a replica is damaged."""
        untried = {
            owner: sorted(copies, key=lambda c: c.host != self._host_of[owner]) for owner, copies in owners.items()
        }
        while all(untried.values()):
            snapshot, problem = None, ""
            try:
                snapshot = self._load({owner: copies[0] for owner, copies in untried.items()})
            except (MoeCommError, OSError, ValueError) as error:
                if isinstance(error, PeerDied):
                    raise
                problem = str(error)
            problems = self._ranks.gather_texts(problem)
            if not any(problems):
                return snapshot
            for owner, text in enumerate(problems):
                if text:
                    unusable = untried[owner].pop(0)
                    log(f"a replica of rank {owner}'s state after step {unusable.header.step} cannot be used: {text}")
        return None

    def _load(self, chosen: dict[int, _Copy]) -> Snapshot:
        """Send the replicas that other ranks need, and receive or read this rank's own. Collective."""
        rank = self._ranks.rank
        works: list[Any] = []
        buffers = []
        own_copy = chosen[rank]
        size = own_copy.header.content + own_copy.header.state
        try:
            for owner, copy in sorted(chosen.items()):
                if self._host_of[owner] != copy.host and self._sender(owner, copy.host) == rank:
                    data = self._bytes(copy)
                    buffers.append(data)
                    works += [dist.isend(data[at : at + BLOCK], owner) for at in range(0, len(data), BLOCK)]
            if self._host_of[rank] == own_copy.host:
                data = self._bytes(own_copy)
            else:
                data = torch.empty(size, dtype=torch.uint8, device="cpu")
                sender = self._sender(rank, own_copy.host)
                works += [dist.irecv(data[at : at + BLOCK], sender) for at in range(0, size, BLOCK)]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise PeerDied(f"a rank failed while snapshots were loaded from memory: {error}") from error
        content: Any = memoryview(data.numpy())  # type: ignore[arg-type]
        if memory.checksum(content[:size]) != own_copy.header.crc:
            raise CheckpointError("its checksum does not match")
        return Snapshot(own_copy.header, content, parse_object(bytes(content[own_copy.header.content : size])))

    def _sender(self, owner: int, host: int) -> int:
        """Return the rank of ``host`` that sends ``owner`` its state. The ranks of a host share this work."""
        ranks = [rank for rank, first in enumerate(self._host_of) if first == host]
        return ranks[owner % len(ranks)]

    def _bytes(self, copy: _Copy) -> Tensor:
        """Return content and state of a replica on this host. Returns zeros if it is lost; their checksum differs."""
        size = copy.header.content + copy.header.state
        try:
            slots = self._host_memory.find(copy.name)
        except (MoeCommError, OSError):
            slots = None
        if slots is None or slots.header(copy.slot) != copy.header:
            return torch.zeros(size, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(slots.content(copy.slot)[:size], dtype=torch.uint8)
