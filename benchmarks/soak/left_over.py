"""What runs leave behind on this machine: processes and shared memory, told from those of others."""

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
class Before:
    """Names in shared memory at one time. own: ids of our processes, and names that they have mapped, seen since."""

    names: frozenset[str]
    own: set[str] = field(default_factory=set)

    def watch(self, token: str) -> None:
        """Call it now and then while it runs: what our processes use is how what they leave is known to be theirs."""
        for path in Path("/proc").glob("[0-9]*"):
            if _has(path, token):
                self.own.update((path.name, *_mapped(path)))

    def left(self, token: str, within_s: float) -> list[str]:
        """What is still there ``within_s`` seconds from now: processes that have ``token`` in their environment
        ("NAME=value"), and new names in shared memory that they have used, or that hold the id of one of them."""
        end = time.monotonic() + within_s
        while True:
            fresh = [name for name in _listed() if name not in self.names and self._is_own(name)]
            found = [*_processes(token), *(f"{SHARED}/{name}" for name in fresh)]
            if not found or time.monotonic() > end:
                return found
            time.sleep(LOOK_S)

    def _is_own(self, name: str) -> bool:
        return bool(self.own.intersection((name, *re.findall(r"(?<![0-9a-z])\d+(?![0-9a-z])", name))))


def look() -> Before:
    """Now."""
    return Before(frozenset(_listed()))


def _listed() -> list[str]:
    return sorted(os.listdir(SHARED)) if SHARED.is_dir() else []


def _processes(token: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        if _has(path, token):
            with contextlib.suppress(OSError):
                command = (path / "cmdline").read_bytes()[:80].decode(errors="replace")
                found.append(f"process {path.name} ({command!r})")
    return found


def _mapped(process: Path) -> list[str]:
    """Names in shared memory that a process has mapped."""
    with contextlib.suppress(OSError):
        return re.findall(rf"{SHARED}/(\S+)", (process / "maps").read_text(errors="replace"))
    return []


def _has(process: Path, token: str) -> bool:
    try:
        return token.encode() in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
