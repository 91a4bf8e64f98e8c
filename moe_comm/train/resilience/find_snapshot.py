"""Finding, among what the hosts keep in memory, the newest step of which every rank's state is there and undamaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.errors import CheckpointError, MoeCommError, PeerDied
from moe_comm.runtime import persistent_memory as memory
from moe_comm.runtime.persistent_memory import Header, PersistentMemory
from moe_comm.runtime.untrusted import parse_object
from moe_comm.train.ranks import Ranks

BLOCK = 32 << 20
"""Bytes of one message."""


@dataclass(frozen=True)
class Recalled:
    """This rank's state, checked. content: its bytes, a writable buffer; lives as long as this does."""

    header: Header
    content: Any
    state: dict[str, Any]


@dataclass(frozen=True)
class _Copy:
    """A complete slot somewhere. host: the first rank there."""

    host: int
    name: str
    slot: int
    header: Header


class Search:
    """What is kept of a run, on all hosts. Collective; over the default group.

    Args:
        hosts: by rank, what tells memory servers apart.
    """

    def __init__(self, kept: PersistentMemory, ranks: Ranks, hosts: Sequence[str], run: str) -> None:
        self._kept, self._ranks = kept, ranks
        self._host_of = [hosts.index(host) for host in hosts]
        own = self._listing(run) if self._host_of[ranks.rank] == ranks.rank else []
        self.copies = [
            _Copy(host, name, slot, Header(**header))
            for host, text in enumerate(ranks.texts(json.dumps(own)))
            for name, slot, header in json.loads(text)
        ]

    def newest(self, layout: str, least: int, say: Callable[[str], None]) -> Recalled | None:
        """This rank's part of the newest step from ``least`` on; None on all ranks where there is none.

        Args:
            layout: of this rank's state; only what has the same is of use.
        """
        layouts = self._ranks.texts(layout)
        found: dict[tuple[int, str], dict[int, list[_Copy]]] = {}
        for copy in self.copies:
            header = copy.header
            fits = header.owner < self._ranks.world and header.layout == layouts[header.owner]
            if fits and header.step >= least:
                owners = found.setdefault((header.step, header.epoch), {})
                owners.setdefault(header.owner, []).append(copy)
        if self.copies and not found:
            say("what is kept in memory is older than the checkpoint, or of another mapping or model")
        for (step, _), owners in sorted(found.items(), reverse=True):
            missing = [rank for rank in range(self._ranks.world) if rank not in owners]
            if missing:
                say(f"step {step} is not in memory as a whole: nothing of rank {', '.join(map(str, missing[:8]))}")
            elif (recalled := self._fetch(owners, say)) is not None:
                return recalled
        return None

    def _listing(self, run: str) -> list[tuple[str, int, dict[str, Any]]]:
        found = []
        for name in self._kept.names():
            slots = self._kept.find(name)
            for slot in range(memory.SLOTS) if slots is not None else ():
                header = slots.header(slot) if slots is not None else None
                if header is not None and header.run == run:
                    found.append((name, slot, vars(header)))
        return found

    def _fetch(self, owners: dict[int, list[_Copy]], say: Callable[[str], None]) -> Recalled | None:
        """Every rank's state of one step, from its own host where that has it; other copies where one is damaged."""
        left = {owner: sorted(copies, key=lambda c: c.host != self._host_of[owner]) for owner, copies in owners.items()}
        while all(left.values()):
            recalled, problem = None, ""
            try:
                recalled = self._take({owner: copies[0] for owner, copies in left.items()})
            except (MoeCommError, OSError, ValueError) as error:
                if isinstance(error, PeerDied):
                    raise
                problem = str(error)
            problems = self._ranks.texts(problem)
            if not any(problems):
                return recalled
            for owner, text in enumerate(problems):
                if text:
                    gone = left[owner].pop(0)
                    say(f"a copy of rank {owner}'s state after step {gone.header.step} cannot be used: {text}")
        return None

    def _take(self, chosen: dict[int, _Copy]) -> Recalled:
        """Send what others lack, and take this rank's own. All ranks take part in every transfer that names them."""
        rank = self._ranks.rank
        works, alive = [], []
        for owner, copy in sorted(chosen.items()):
            if self._host_of[owner] != copy.host and self._sender(owner, copy.host) == rank:
                data = self._bytes(copy)
                alive.append(data)
                works += [self._transfer(dist.isend, data[at : at + BLOCK], owner) for at in range(0, len(data), BLOCK)]
        own = chosen[rank]
        size = own.header.content + own.header.state
        if self._host_of[rank] == own.host:
            data = self._bytes(own)
        else:
            data = torch.empty(size, dtype=torch.uint8)
            sender = self._sender(rank, own.host)
            works += [self._transfer(dist.irecv, data[at : at + BLOCK], sender) for at in range(0, size, BLOCK)]
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise PeerDied(f"a rank is gone while state was taken from memory: {error}") from error
        content: Any = memoryview(data.numpy())  # type: ignore[arg-type]
        if memory.checksum(content[:size]) != own.header.crc:
            raise CheckpointError("its checksum differs")
        return Recalled(own.header, content, parse_object(bytes(content[own.header.content : size])))

    def _sender(self, owner: int, host: int) -> int:
        """Which rank of ``host`` sends ``owner`` its state: they take turns."""
        here = [rank for rank, first in enumerate(self._host_of) if first == host]
        return here[owner % len(here)]

    def _bytes(self, copy: _Copy) -> Tensor:
        """Content and state of a copy on this host; zeros, whose checksum differs, where it is gone."""
        size = copy.header.content + copy.header.state
        try:
            slots = self._kept.find(copy.name)
        except (MoeCommError, OSError):
            slots = None
        if slots is None or slots.header(copy.slot) != copy.header:
            return torch.zeros(size, dtype=torch.uint8)
        return torch.frombuffer(slots.content(copy.slot)[:size], dtype=torch.uint8)

    @staticmethod
    def _transfer(call: Callable[..., Any], data: Tensor, peer: int) -> Any:
        try:
            return call(data, peer)
        except RuntimeError as error:
            raise PeerDied(f"a rank is gone while state was taken from memory: {error}") from error
