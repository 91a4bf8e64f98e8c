"""Results as lines of JSON, written and flushed one by one, so that a run that is cut off keeps what it measured."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

FATAL = 75
"""Exit code of a part whose CUDA context is unusable. The driver starts the part again for the remaining operations."""


MARGIN_S = 5.0
"""No operation starts so shortly before the end of a part: a part that is killed counts as one that hangs."""


class Work(Protocol):
    """An operation: returns rows of results."""

    def __call__(self) -> dict[str, Any] | Iterable[dict[str, Any]]:
        """Return one row, or yield rows, which are written as they come."""


@dataclass
class Recorder:
    """Runs the operations of one part, one after the other, and appends a line for each event to a file.

    A line is ``{"part", "operation", "event"}`` with event ``started``, ``row`` (the values of a result), ``done`` or
    ``failed`` (``error``). An operation that raises does not stop the next one. After a restart, operations that have
    started before are skipped.

    Args:
        part: name of the part.
        path: the file; None prints only.
        device: ``cuda`` or ``cpu``. Memory is freed and, on CUDA, errors are read after each operation.
        limit_s: seconds after which an operation prints all Python stacks and ends the process.
        rank: of several processes only rank 0 writes.
        only: start of the names of operations to run.
    """

    part: str
    path: Path | None
    device: str
    limit_s: float = 0.0
    rank: int = 0
    only: str = ""
    failures: int = 0
    started: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        attempt = os.environ.get("MOE_COMM_GPU_ATTEMPT")
        if self.path is not None and attempt:
            self.started = {line["operation"] for line in read(self.path) if line.get("attempt") == attempt}
        self._end = float(os.environ.get("MOE_COMM_GPU_END", "0"))  # by time.monotonic(), which all processes share
        self._common = {"part": self.part} | ({"attempt": attempt} if attempt else {})

    def run(self, operation: str, work: Work) -> None:
        """Run ``work`` and record its rows.

        Raises:
            SystemExit: with ``FATAL``: the CUDA context is unusable.
        """
        if operation in self.started or not operation.startswith(self.only):
            return
        if self._end and time.monotonic() > self._end - MARGIN_S:
            self.failures += 1
            self._write(operation, "failed", error="not run: the part has no time left")
            return
        self._write(operation, "started")
        if self.limit_s:
            faulthandler.dump_traceback_later(self.limit_s, exit=True)
        begin = time.perf_counter()
        try:
            rows = work()
            for row in [rows] if isinstance(rows, dict) else rows:
                self._synchronize()
                self._write(operation, "row", **row)
            self._synchronize()
            self._write(operation, "done", seconds=round(time.perf_counter() - begin, 3))
        except Exception as error:
            self.failures += 1
            # The message of a SystemExit or of an assertion can be empty; the type never is.
            self._write(operation, "failed", error=f"{type(error).__name__}: {error}".strip()[:2000])
            traceback.print_exc()
            if self.device == "cuda" and not isinstance(error, torch.OutOfMemoryError) and not self._usable():
                self._write(operation, "failed", error="the CUDA context is unusable after this operation")
                sys.stdout.flush()
                os._exit(FATAL)  # destructors of CUDA objects would only raise again
        finally:
            faulthandler.cancel_dump_traceback_later()
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()

    def run_all(self, operations: Iterable[tuple[str, Work]]) -> int:
        """Run (name, work) pairs. Return the exit code: 1 if any failed."""
        for name, work in operations:
            self.run(name, work)
        return 1 if self.failures else 0

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _usable(self) -> bool:
        try:
            torch.cuda.synchronize()
            return bool(torch.ones(1, device="cuda").item() == 1.0)
        except RuntimeError:
            return False

    def _write(self, operation: str, event: str, **values: Any) -> None:
        if self.rank:
            return
        line = json.dumps({**self._common, "operation": operation, "event": event, **values})
        print(line, flush=True)
        if self.path is not None:
            append(self.path, line)


def append(path: Path, line: str) -> None:
    """Append a line to ``path`` and wait until it is stored."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of ``path``. A line that was cut off is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def unfinished(path: Path, part: str, attempt: str) -> str | None:
    """Return the operation of ``part`` that started last and has not ended, or None."""
    current = None
    for line in read(path):
        if line.get("part") == part and line.get("attempt") == attempt:
            current = line["operation"] if line["event"] in ("started", "row") else None
    return current
