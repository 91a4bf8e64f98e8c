"""Who the ranks of a group are, and what became of one that does not answer.

torch.distributed says that an operation failed, seldom because of whom. Ranks on one host can look at each
other's process; ranks anywhere leave a note in the group's store when they wait long, so that the one without
a note is the one waited for (MegaScale, arXiv 2402.15627, section 5: the silent rank is the culprit).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Store

from moe_comm.runtime.host import host_key

STORE_PATIENCE_S = 2.0
GAVE_UP = "gave up"


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a process; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


@dataclass(frozen=True)
class Process:
    """A rank's process: host, pid, and start time, since pids are used again."""

    host: int
    pid: int
    started: int

    @classmethod
    def own(cls) -> Process:
        stat = _stat(os.getpid())
        # 62 bits of the key, so that the word is not negative.
        return cls(int(host_key(), 16) >> 2, os.getpid(), stat[1] if stat else 0)

    def fate(self, here: int) -> str:
        """What became of it as seen from host ``here``: ended, stopped, alive, or on another host."""
        if self.host != here:
            return "on another host"
        if not Path("/proc/self/stat").exists():
            return "alive"
        stat = _stat(self.pid)
        if stat is None or stat[1] != self.started or stat[0] in "ZX":
            return "ended"
        return "stopped" if stat[0] in "Tt" else "alive"


class Peers:
    """The processes of a group, by rank."""

    def __init__(self, processes: Sequence[Process], rank: int, store: Store, name: str) -> None:
        self.processes = tuple(processes)
        self.rank = rank
        self._store = store
        self._name = name
        self._store_answers = True

    def ended(self) -> list[int]:
        """Ranks on this host whose process has ended."""
        here = self.processes[self.rank].host
        return [rank for rank, process in enumerate(self.processes) if process.fate(here) == "ended"]

    def describe(self, rank: int) -> str:
        """``rank 1 (pid 123, stopped)``."""
        process = self.processes[rank]
        return f"rank {rank} (pid {process.pid}, {process.fate(self.processes[self.rank].host)})"

    def note(self, place: str, text: str) -> None:
        """Leave a note that this rank waits at ``place``; gives up silently if the store does not answer."""
        _patiently(lambda: self._store_set(f"{self._name}/{place}/{self.rank}", text))

    def give_up(self, text: str) -> None:
        """Leave a note, for all channels of the group, that this rank left an operation in the middle."""
        _patiently(lambda: self._store_set(GAVE_UP, text))

    def gave_up(self) -> str:
        """Return the note of a rank that gave up; empty if there is none, or if the store does not answer."""
        found: list[str] = []

        def look() -> None:
            store = self._store
            found.append(store.get(GAVE_UP).decode() if store.check([GAVE_UP]) else "")

        if self._store_answers:
            _patiently(look)
            self._store_answers = bool(found)  # once it does not, each look would take as long as the patience
        return found[0] if found else ""

    def silent(self, place: str) -> list[int]:
        """Ranks that left no note at ``place``; they get a moment to. Empty if the store does not answer."""
        found: list[list[int]] = []

        def look() -> None:
            others = [rank for rank in range(len(self.processes)) if rank != self.rank]
            end = time.monotonic() + STORE_PATIENCE_S / 2
            while True:
                missing = [rank for rank in others if not self._store.check([f"{self._name}/{place}/{rank}"])]
                if time.monotonic() > end or not missing:
                    found.append(missing)
                    return
                time.sleep(0.05)

        _patiently(look)
        return found[0] if found else []

    def _store_set(self, key: str, text: str) -> None:
        self._store.set(key, text)


def _patiently(action: Callable[[], None]) -> None:
    """Run a store call beside this thread: the store's own deadline is minutes, and its host may be the dead rank."""

    def guarded() -> None:
        try:
            action()
        except Exception:  # the store is a help for a message; without it the message is shorter
            return

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(STORE_PATIENCE_S)
