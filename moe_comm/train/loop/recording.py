"""Records of a run: spans of each rank (see ``moe_comm.observe.rank_log``), and metrics that a thread writes.

    training   write ─▶ │ until it is written │ ─▶ next step ─▶ write ─▶ │ at most patience_s │ ─▶ next step ─▶
    thread              │ sink.write          │                          │ sink.write ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─

While a sink responds, a report is written before the call returns: a killed run leaves the metrics of its last step.
After a timeout, training continues without waiting, and reports are buffered until the sink responds or the run ends.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from moe_comm.errors import PeerDied
from moe_comm.observe.probe import Probe, first_ranks
from moe_comm.observe.rank_log import RankLog, StepParts
from moe_comm.observe.records import FaultRecord
from moe_comm.runtime.device_clock import cuda_times
from moe_comm.runtime.event_layout import region_bytes
from moe_comm.runtime.event_reader import read_header
from moe_comm.runtime.events import EVENTS, add_lock
from moe_comm.train.hooks import StepHook
from moe_comm.train.metrics import MetricsSink, StepReport
from moe_comm.train.ranks import Ranks
from moe_comm.train.sections import ObserveSection

ROUND_TRIPS = 8
"""Time requests per host in ``clock_skew``."""


class Recording(StepHook):
    """Write this rank's step lines and spans. Collective.

    Args:
        done: completed steps when the run resumes.
        device: "cuda" measures spans with GPU time stamps.
    """

    def __init__(self, folder: Path, ranks: Ranks, settings: ObserveSection, done: int, device: str = "cpu") -> None:
        ensure_region(ranks.rank, settings.records)
        hosts = ranks.gather_texts(socket.gethostname())
        EVENTS.reset_call_counts()  # ranks attach at different times, so their counts can differ
        several = len(set(hosts)) > 1
        skew_ns = clock_skew(ranks, hosts)[0] if several else 0
        self._every = settings.every
        self._probe = Probe(hosts, ranks.world_group) if several and settings.every and can_send() else None
        EVENTS.device = cuda_times() if device == "cuda" else None
        self._log = RankLog(folder, ranks.rank, done=done, every=settings.every, skew_ns=skew_ns)
        self._began_s = time.time()

    on_disk = True

    def before_step(self, step: int) -> None:
        self._log.begin(step)
        self._began_s = time.time()

    def after_step(self, report: StepReport) -> None:
        times = report.times
        parts = StepParts(
            self._began_s,
            times.total,
            times.compute,
            times.communication,
            times.data,
            times.checkpoint,
            report.memory_bytes,
            self._links(report.step),
        )
        self._log.end(report.step, parts)

    def close(self) -> None:
        self._log.close()
        if self._probe is not None:
            self._probe.close()
        EVENTS.device = None

    def _links(self, step: int) -> dict[int, float]:
        """Probe the links between hosts in every ``observe.every``-th step."""
        if self._probe is None or step % self._every:
            return {}
        try:
            return self._probe()
        except RuntimeError as error:
            raise PeerDied(f"a probe between hosts did not complete: {error}") from error


def ensure_region(rank: int, records: int) -> None:
    """Attach ``EVENTS`` to a ring of ``records`` spans for ``rank``, unless it already has one."""
    header = read_header(EVENTS.region)
    # A forked rank inherits the region of its parent process, which it shares with other ranks.
    if header is None or (header.rank, header.pid) != (rank, os.getpid()) or EVENTS.records < records:
        EVENTS.attach(memoryview(mmap.mmap(-1, region_bytes(records))), rank, records)


def can_send() -> bool:
    """Return whether the default process group can send CPU tensors."""
    return dist.is_initialized() and "cpu" in dist.get_backend_config()


def clock_skew(ranks: Ranks, hosts: Sequence[str], now: Callable[[], int] = time.time_ns) -> tuple[int, int]:
    """Return the offset from this host's clock to that of rank 0's host, and its maximum error, in ns. Collective.

    One host after the other, the first rank of each host requests the time from rank 0 several times. The round trip
    with the shortest duration is used, with the local time at its midpoint (Cristian 1989). The error is at most half
    of its duration.
    """
    skews = torch.zeros(ranks.world, 2, dtype=torch.int64, device="cpu")
    clients = [rank for rank in first_ranks(hosts) if hosts[rank] != hosts[0]]
    if can_send():
        for client in clients:
            if ranks.rank == client:
                skews[client] = torch.tensor(_measure_skew(now), dtype=torch.int64, device="cpu")
            elif ranks.rank == 0:
                for _ in range(ROUND_TRIPS):
                    dist.recv(torch.empty(1, dtype=torch.int64, device="cpu"), client)
                    dist.send(torch.tensor([now()], dtype=torch.int64, device="cpu"), client)
    skews = ranks.sum(skews)
    by_host = {hosts[client]: skews[client].tolist() for client in clients}
    skew, error = by_host.get(hosts[ranks.rank], (0, 0))
    return int(skew), int(error)


def _measure_skew(now: Callable[[], int]) -> tuple[int, int]:
    round_trips = []
    for _ in range(ROUND_TRIPS):
        server_ns = torch.empty(1, dtype=torch.int64, device="cpu")
        before = now()
        dist.send(torch.zeros(1, dtype=torch.int64, device="cpu"), 0)
        dist.recv(server_ns, 0)
        after = now()
        round_trips.append((after - before, int(server_ns) - (before + after) // 2))
    duration, skew = min(round_trips)
    return skew, duration // 2 + 1


PATIENCE_S = 5.0
"""Default number of seconds that a call waits for the sink."""
RECORD_S = 1.0
"""Seconds to wait until the fault record is written."""
MAX_REPORTS = 100
"""Maximum number of buffered reports; later ones are dropped. A report of a large model has 100 kB."""


class NonblockingSink(MetricsSink):
    """Wrap ``sink``: a call blocks for at most ``patience_s``. After one timeout, later calls return immediately.

    Errors of ``sink`` are raised by the call that waited for it, or by the next one.

    Args:
        name: name of the sink in messages.
        log: logs a line.
        record_fault: receives a fault record, in a separate thread because its file may be on the same disk.
        patience_s: timeout in seconds; None: ``PATIENCE_S``.
    """

    _changed: threading.Condition

    def __init__(
        self,
        sink: MetricsSink,
        name: str,
        log: Callable[[str], None],
        record_fault: Callable[[FaultRecord], None],
        patience_s: float | None = None,
    ) -> None:
        self._sink, self._name, self._log, self._record_fault = sink, name, log, record_fault
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        add_lock(self, "_changed", threading.Condition)
        self._calls: deque[Callable[[], None]] = deque()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stalled = self._closed = False
        self._step = self._dropped = 0

    def write(self, report: StepReport) -> None:
        self._step = report.step
        self._call(lambda: self._sink.write(report))

    def summary(self, step: int, values: dict[str, float]) -> None:
        self._step = step
        self._call(lambda: self._sink.summary(step, values))

    def close(self) -> None:
        """Wait at most ``patience_s`` for buffered reports, then drop them. A second call does nothing."""
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._enqueue(self._sink.close)
            done = self._changed.wait_for(lambda: not self._calls, self._patience_s)
            lost = self._dropped + max(len(self._calls) - 1, 0)
        if not done or lost:
            not_closed = "" if done else " and was not closed: it did not respond until the run ended"
            self._report_fault(f"{self._name} lost {lost} report(s){not_closed}")
        self._raise()

    def _call(self, call: Callable[[], None]) -> None:
        """Enqueue ``call``, and wait for it unless the sink is stalled."""
        with self._changed:
            recovered = self._stalled and not self._calls
            if recovered:
                self._stalled = False
            if len(self._calls) >= MAX_REPORTS:
                self._dropped += 1
            else:
                self._enqueue(call)
            done = self._stalled or self._changed.wait_for(lambda: not self._calls, self._patience_s)
            self._stalled = self._stalled or not done
        if recovered:
            lost = f"; {self._dropped} report(s) were lost" if self._dropped else ""
            self._report_fault(f"{self._name} accepts reports again{lost}")
        if not done:
            self._report_fault(
                f"{self._name} did not accept the report of step {self._step} within {self._patience_s:g} s; training "
                f"continues and buffers up to {MAX_REPORTS} reports"
            )
        self._raise()

    def _enqueue(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"writes {self._name}", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls)
                call = self._calls[0]
            raised: BaseException | None = None
            try:
                call()
            except BaseException as error:
                raised = error
            with self._changed:
                self._error = self._error or raised
                self._calls.popleft()
                self._changed.notify_all()
                if self._closed and not self._calls:
                    return

    def _raise(self) -> None:
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _report_fault(self, message: str) -> None:
        self._log(f"step {self._step}: {message}")
        record = FaultRecord(time.time(), self._step, "error", [], "none", message)
        thread = threading.Thread(target=self._record_fault, args=(record,), name="writes a fault", daemon=True)
        thread.start()
        thread.join(RECORD_S)
