"""Run the operations of a part and write results as lines of JSON.

Each line is stored at once, so a run that is killed keeps the results that it has measured.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

FATAL = 75
"""Exit code of a part whose CUDA context is unusable. The driver starts the part again for the remaining operations."""
MARGIN_S = 5.0
"""No operation starts in the last seconds of a part: the driver kills what runs at the end and reports it as hung."""


class Work(Protocol):
    """An operation that returns rows of results."""

    def __call__(self) -> dict[str, Any] | Iterable[dict[str, Any]]:
        """Return one row, or yield rows. Each row is written at once."""


@dataclass
class Recorder:
    """Runs the operations of one part, one after the other, and appends a line for each event to a file.

    A line is ``{"part", "operation", "event"}`` with event ``started``, ``row`` (the values of a result), ``done`` or
    ``failed`` (``error``). If an operation raises, the next one still runs. After a restart, operations that were
    started earlier are skipped.

    Args:
        part: name of the part.
        path: the file. None: lines are only printed.
        device: ``cuda`` or ``cpu``. Memory is freed and, on CUDA, errors are read after each operation.
        limit_s: seconds after which an operation prints all Python stacks and ends the process.
        rank: rank of this process. Only rank 0 writes.
        only: prefix of the names of the operations to run.
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
            # The message of an assertion can be empty.
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


def part_parser(doc: str | None, limit_s: float) -> argparse.ArgumentParser:
    """Return a parser with the options that all parts have.

    Args:
        doc: docstring of the module, for ``--help``.
        limit_s: default of ``--limit``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="file to which lines of JSON are appended")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--limit", type=float, default=limit_s, help="seconds of one operation")
    return parser


def run_part(
    doc: str | None,
    part: str,
    operations: Callable[..., Iterable[tuple[str, Work]]],
    *,
    limit_s: float,
    shapes: Iterable[str] = (),
) -> int:
    """Parse the command line and run the operations of a part. Return the exit code.

    Args:
        doc: docstring of the module, for ``--help``.
        part: name of the part.
        operations: function of the device that yields (name, work) pairs.
        limit_s: default of ``--limit``.
        shapes: if given, the command line names one of them. It is appended to ``part`` and is the first argument of
            ``operations``.
    """
    parser = part_parser(doc, limit_s)
    if shapes:
        parser.add_argument("shape", choices=shapes)
    args = parser.parse_args()
    shape = [args.shape] if shapes else []
    recorder = Recorder("-".join([part, *shape]), args.results, args.device, args.limit)
    return recorder.run_all(operations(*shape, args.device))


def append(path: Path, line: str) -> None:
    """Append a line to ``path`` and wait until it is stored. If the last line was cut off, end it first."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of ``path``, except those that were cut off."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def unfinished(path: Path, part: str, attempt: str) -> str | None:
    """Return the operation of ``part`` that has started and not ended, or None."""
    current = None
    for line in read(path):
        if line.get("part") == part and line.get("attempt") == attempt:
            current = line["operation"] if line["event"] in ("started", "row") else None
    return current
