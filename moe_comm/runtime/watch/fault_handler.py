"""When a rank counts as stuck, and its reaction to a detected fault: write a report, kill the culprit, end a vain wait.

The culprit is the rank that caused the fault. The reporter is the rank that detected it. The leader of a host is its
first rank that runs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_comm.runtime.event_layout import ACTIVE_AT, LONG, RECORDS
from moe_comm.runtime.event_reader import read_open
from moe_comm.runtime.launch.agent import ENDED_BY_WATCH
from moe_comm.runtime.safe_files import make_folders, open_to_append
from moe_comm.runtime.seconds import seconds_of
from moe_comm.runtime.untrusted import printable
from moe_comm.runtime.watch.graph import SLOW_KINDS
from moe_comm.runtime.watch.report import DetectedFault
from moe_comm.runtime.watch.status_table import Phase, StatusTable

ACKNOWLEDGE_S = 1.0
"""Maximum time to wait until the other ranks of the host have received a fault."""
WRITE_S = 0.5
"""Time for reports to be written before a culprit is killed. A disk that hangs must not prevent the kill."""
EXIT_S = 5.0
"""A rank ends itself if its main thread waits this long for a rank that has failed."""

POLL_S = 0.1
EARLY = 0.9
"""Fraction of ``stuck_s`` after which a rank is judged stuck. The rest of it is for informing all ranks."""
PAUSES = 10
"""The timeout is at least this multiple of the longest pause measured so far."""


@dataclass(frozen=True)
class WatchOptions:
    """Options of the watcher.

    Args:
        stuck_s: seconds within which a stuck rank is detected during a step.
        start_s: the same before the end of the first step and between steps.
        end: kill a stuck rank, so that the waits of the other ranks end.
        records: number of spans in the event ring of each rank.
    """

    stuck_s: float = 5.0
    start_s: float = 300.0
    end: bool = True
    records: int = RECORDS

    def __post_init__(self) -> None:
        for name in ("stuck_s", "start_s"):
            object.__setattr__(self, name, seconds_of(name, getattr(self, name)))


class ProgressTimeout:
    """The progress timeout of this rank. Each change is published in ``table``."""

    def __init__(self, table: StatusTable, options: WatchOptions) -> None:
        self._table, self._options = table, options
        self._own = table.region(table.rank)
        self._phase, self._steps = Phase.STARTING, 0
        self._pause = self._first_pause = self._longest = 0.0
        table.publish(self._phase, options.start_s)

    def begin(self) -> None:
        """Begin a step. The short timeout applies from the second step on."""
        self._pause = 0.0
        if self._steps:
            self._phase = Phase.STEP
            self._table.publish(self._phase, self.timeout_s)

    def end(self) -> None:
        """End a step. ``start_s`` applies until the next one begins."""
        if self._steps:
            self._longest = max(self._longest, self._pause)
        else:
            self._first_pause = self._pause  # includes compilation, so later steps replace it
        self._steps += 1
        self._phase = Phase.BETWEEN
        self._table.publish(self._phase, self._options.start_s)

    @property
    def timeout_s(self) -> float:
        """Seconds that this rank may make no progress in a step while others wait for it."""
        longest = self._longest if self._steps > 1 else self._first_pause
        return max(EARLY * self._options.stuck_s, PAUSES * longest)

    def measure(self, now: int, since: int) -> None:
        """Update the longest pause of this step that this rank caused itself, without time before ``since``; ns."""
        pause = (now - max(LONG.unpack_from(self._own, ACTIVE_AT)[0], since)) / 1e9
        if pause > max(self._pause, 2 * POLL_S) and self._phase != Phase.BETWEEN:
            kinds = {span.kind for span in read_open(self._own) if not span.thread}
            if not any(kind.is_communication or kind in SLOW_KINDS for kind in kinds):
                self._pause = pause


class FaultHandler:
    """Handles the faults that are posted in ``table``. Calls ``on_fault`` with each fault, on a separate thread.

    Attributes:
        fault: the newest fault.
        stopping: the ranks must end.
        reported: set when a report was written and ``on_fault`` was called.
        handled: number of the last fault that this rank has handled.
    """

    def __init__(
        self,
        table: StatusTable,
        options: WatchOptions,
        folder: Path,
        on_fault: Sequence[Callable[[DetectedFault], None]],
        is_leader: Callable[[], bool],
    ) -> None:
        self.fault: DetectedFault | None = None
        self.stopping = False
        self.reported = threading.Event()
        self._table, self._options, self._is_leader = table, options, is_leader
        self._folder, self._on_fault = folder, tuple(on_fault)
        self.handled = self._stopping_ns = self._culprit_ended_ns = 0
        self._writer: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Number of a fault that this rank has not handled yet; 0 if there is none."""
        return self._table.fault_number if self._table.fault_number > self.handled else 0

    def handle(self, number: int) -> None:
        """Handle the newest fault, which has this number."""
        table = self._table
        table.acknowledge(number)
        self.handled = number
        values: dict[str, Any] = json.loads(table.fault_text())
        reporter, victims = values.pop("reporter"), values.pop("victims")
        path = self._folder / f"rank-{table.rank:05d}-step{values['step']}.txt"
        values |= {"ranks": tuple(values["ranks"]), "path": str(path), "noticed_s": math.nan}
        fault = DetectedFault(**{**values, "is_reporter": reporter == table.rank})
        self.fault = fault
        self.stopping, self._stopping_ns = fault.action == "stop", time.monotonic_ns()
        if fault.is_reporter:
            noticed = (self._wait_acknowledged(number, fault) - fault.healthy_ns) / 1e9
            self.fault = fault = replace(fault, noticed_s=noticed)
        arguments = (fault, self._writer)
        self._writer = threading.Thread(target=self._write, args=arguments, name="moe_comm-watch-report", daemon=True)
        self._writer.start()
        self._writer.join(WRITE_S)
        local = [rank for rank in victims if rank in table.local_ranks]
        # The reporter kills the victims on its own host. On other hosts, the leader does.
        kills = table.rank == reporter if reporter in table.local_ranks else self._is_leader()
        if local and kills:
            self._wait_acknowledged(number, fault)
            for rank in local:
                table.kill(rank)

    def exit_if_waiting(self, now: int) -> None:
        """End this process if its main thread still waits for a rank that has failed."""
        table = self._table
        entry = table.entry(table.rank)
        if entry.phase >= Phase.LEFT or self._culprit_is_ending(now):
            return
        own = table.region(table.rank)
        active = LONG.unpack_from(own, ACTIVE_AT)[0]
        stalled = (now - max(active, self._stopping_ns, self._culprit_ended_ns)) / 1e9
        waits = (
            any(span.kind.is_communication for span in read_open(own) if not span.thread) if stalled > EXIT_S else False
        )
        if stalled > (EXIT_S if waits else max(EXIT_S, entry.timeout_s)):
            reason = self.fault.summary if self.fault is not None else "another rank has failed"
            print(f"rank {table.rank} ends itself after waiting {stalled:.1f} s in vain: {reason}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(ENDED_BY_WATCH)

    def close(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the report."""
        if self._writer is not None:
            self._writer.join(seconds)

    def _culprit_is_ending(self, now: int) -> bool:
        """Whether a rank that failed with an error has not ended yet. Its end ends the waits of the other ranks.

        It may still write its part of a checkpoint, together with threads of this rank, and the reason of its failure.
        """
        if self.fault is None or self.fault.kind != "error" or now - self._stopping_ns > self._options.start_s * 1e9:
            return False
        ended = all(self._table.ended(rank) for rank in self.fault.ranks)
        self._culprit_ended_ns = self._culprit_ended_ns if ended else now
        return not ended

    def _write(self, fault: DetectedFault, previous: threading.Thread | None) -> None:
        """Write the report and call ``on_fault``, after the thread of the previous fault has done so."""
        if previous is not None:
            previous.join()
        with contextlib.suppress(OSError):  # a full disk must not prevent the ranks from ending
            make_folders(self._folder.parent, self._folder.name)
            with open_to_append(Path(fault.path)) as file:
                file.write(fault.report.encode(errors="backslashreplace"))
        if fault.is_reporter:
            line = f"{fault.summary} (noticed after {fault.noticed_s:.2f} s); report: {fault.path}"
            print(printable(line), file=sys.stderr, flush=True)
        for call in self._on_fault:
            try:
                call(fault)
            except Exception:
                print(f"rank {self._table.rank}: {traceback.format_exc()}", file=sys.stderr)
        self.reported.set()

    def _wait_acknowledged(self, number: int, fault: DetectedFault) -> int:
        """Wait up to ``ACKNOWLEDGE_S`` until the healthy ranks of this host acknowledge a fault; return when."""
        table = self._table
        end = time.monotonic() + ACKNOWLEDGE_S
        latest = time.monotonic_ns()
        waiting = [rank for rank in table.local_ranks if rank not in fault.ranks and rank != table.rank]
        while waiting and time.monotonic() < end:
            for rank in list(waiting):
                entry = table.entry(rank)
                if entry.acknowledged >= number:
                    latest = max(latest, entry.acknowledged_ns)
                if entry.acknowledged >= number or entry.phase == Phase.LEFT or table.ended(rank):
                    waiting.remove(rank)
            if waiting:
                table.wait(0.01)
        return latest
