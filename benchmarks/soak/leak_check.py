"""Find processes and shared memory that a run left behind, and ignore those of other programs."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

SHARED = Path("/dev/shm")
LOOK_S = 0.2


@dataclass(frozen=True)
class LeakCheck:
    """Shared memory before a run.

    Attributes:
        names: names in shared memory before the run.
        own: process ids of the run, and names that its processes mapped, collected by ``watch``.
    """

    names: frozenset[str]
    own: set[str] = field(default_factory=set)

    def watch(self, token: str) -> None:
        """Collect the processes of the run and the names that they map. Call this regularly during the run."""
        for path in Path("/proc").glob("[0-9]*"):
            if _has(path, token):
                self.own.update((path.name, *_mapped(path)))

    def left(self, token: str, within_s: float) -> list[str]:
        """Return what still exists after ``within_s`` seconds.

        These are processes with ``token`` ("NAME=value") in their environment, and new names in shared memory that
        processes of the run mapped or that contain one of their process ids.
        """
        end = time.monotonic() + within_s
        while True:
            new = [name for name in _listed() if name not in self.names and self._is_own(name)]
            leaks = [*_processes(token), *(f"{SHARED}/{name}" for name in new)]
            if not leaks or time.monotonic() > end:
                return leaks
            time.sleep(LOOK_S)

    def _is_own(self, name: str) -> bool:
        return bool(self.own.intersection((name, *re.findall(r"(?<![0-9a-z])\d+(?![0-9a-z])", name))))


def start() -> LeakCheck:
    """Record the current names in shared memory."""
    return LeakCheck(frozenset(_listed()))


def _listed() -> list[str]:
    return sorted(os.listdir(SHARED)) if SHARED.is_dir() else []


def _processes(token: str) -> list[str]:
    leftovers = []
    for path in Path("/proc").glob("[0-9]*"):
        if _has(path, token):
            with contextlib.suppress(OSError):
                command = (path / "cmdline").read_bytes()[:80].decode(errors="replace")
                leftovers.append(f"process {path.name} ({command!r})")
    return leftovers


def _mapped(process: Path) -> list[str]:
    """Return the names in shared memory that a process maps."""
    with contextlib.suppress(OSError):
        return re.findall(rf"{SHARED}/(\S+)", (process / "maps").read_text(errors="replace"))
    return []


def _has(process: Path, token: str) -> bool:
    try:
        return token.encode() in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
