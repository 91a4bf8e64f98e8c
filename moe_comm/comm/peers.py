"""The processes of a group's ranks, and the state of a rank that does not respond.

torch.distributed reports that an operation failed, but often not which rank caused it. Ranks on one host can inspect
each other's process. Ranks on any host write a note to the group's store when they wait long. The rank without a note
is the one that the others wait for (MegaScale, arXiv 2402.15627, section 5).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Store

from moe_comm.runtime.groups import host_key_int64

STORE_TIMEOUT_S = 2.0
GAVE_UP = "gave up"


def _stat(pid: int) -> tuple[str, int] | None:
    """Return the state letter and the start time of a process; None if it does not exist."""
    try:
        # Of the main thread, as in memory_server.start_ticks.
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


@dataclass(frozen=True)
class Process:
    """A rank's process: host, pid and start time. The start time distinguishes processes that reuse a pid."""

    host: int
    pid: int
    started: int

    @classmethod
    def own(cls) -> Process:
        stat = _stat(os.getpid())
        # 62 bits of the key, so that the number is not negative.
        return cls(host_key_int64(), os.getpid(), stat[1] if stat else 0)

    def status(self, own_host: int) -> str:
        """Return "ended", "stopped", "alive" or "on another host", as seen from host ``own_host``."""
        if self.host != own_host:
            return "on another host"
        if not Path("/proc/self/stat").exists():
            return "alive"
        stat = _stat(self.pid)
        if stat is None or stat[1] != self.started or stat[0] in "ZX":
            return "ended"
        return "stopped" if stat[0] in "Tt" else "alive"


class Peers:
    """The processes of a group, by rank. name: prefix of the group's notes in ``store``."""

    def __init__(self, processes: Sequence[Process], rank: int, store: Store, name: str) -> None:
        self.processes = tuple(processes)
        self.rank = rank
        self._store = store
        self._name = name
        self._store_answers = True

    def ended(self) -> list[int]:
        """Return the ranks on this host whose process has ended."""
        own_host = self.processes[self.rank].host
        return [rank for rank, process in enumerate(self.processes) if process.status(own_host) == "ended"]

    def lost(self) -> str:
        """Return text like ``rank 1 (pid 123, ended)`` for the ranks on this host whose process ends within a second.

        A connection closes slightly before its process ends. "" if no process has ended.
        """
        end = time.monotonic() + 1.0
        while not (ended := self.ended()) and time.monotonic() < end:
            time.sleep(0.02)
        return ", ".join(map(self.describe, ended))

    def describe(self, rank: int) -> str:
        """Return text like ``rank 1 (pid 123, stopped)``."""
        process = self.processes[rank]
        return f"rank {rank} (pid {process.pid}, {process.status(self.processes[self.rank].host)})"

    def note(self, operation: str, text: str) -> None:
        """Write a note that this rank waits in ``operation``. Errors of the store are ignored."""
        _with_deadline(lambda: self._store.set(f"{self._name}/{operation}/{self.rank}", text))

    def give_up(self, text: str) -> None:
        """Write a note, for all channels of the group, that this rank abandoned an operation."""
        _with_deadline(lambda: self._store.set(GAVE_UP, text))

    def gave_up(self) -> str:
        """Return the note of a rank that gave up; "" if there is none, or if the store does not respond."""
        notes: list[str] = []

        def read() -> None:
            store = self._store
            notes.append(store.get(GAVE_UP).decode() if store.check([GAVE_UP]) else "")

        if self._store_answers:
            _with_deadline(read)
            self._store_answers = bool(notes)  # after one timeout do not ask again: each call would time out
        return notes[0] if notes else ""

    def silent(self, operation: str) -> list[int]:
        """Return the ranks without a note for ``operation``, after a short wait; [] if the store does not respond."""
        results: list[list[int]] = []

        def read() -> None:
            others = [rank for rank in range(len(self.processes)) if rank != self.rank]
            end = time.monotonic() + STORE_TIMEOUT_S / 2
            while True:
                missing = [rank for rank in others if not self._store.check([f"{self._name}/{operation}/{rank}"])]
                if time.monotonic() > end or not missing:
                    results.append(missing)
                    return
                time.sleep(0.05)

        _with_deadline(read)
        return results[0] if results else []


def _with_deadline(action: Callable[[], None]) -> None:
    """Run a store call in a thread for at most STORE_TIMEOUT_S.

    The store's own deadline is minutes, and its host may be the dead rank.
    """

    def guarded() -> None:
        with suppress(Exception):  # without the store, error messages have less detail
            action()

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(STORE_TIMEOUT_S)
