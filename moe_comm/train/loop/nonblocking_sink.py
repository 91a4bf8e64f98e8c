"""A metrics sink that writes in a thread, so that an unresponsive disk does not block training.

    training   write ─▶ │ until it is written │ ─▶ next step ─▶ write ─▶ │ at most patience_s │ ─▶ next step ─▶
    thread              │ sink.write          │                          │ sink.write ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─

While the sink responds, a report is written before the call returns: a killed run leaves the metrics of its last step.
After a timeout, training continues without waiting, and reports are buffered until the sink responds or the run ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from moe_comm.observe.records import FaultRecord
from moe_comm.runtime.fork_safe import add_lock
from moe_comm.train.metrics import MetricsSink, StepReport

PATIENCE_S = 5.0
"""Default number of seconds that a call waits for the sink."""
RECORD_S = 1.0
"""Seconds to wait until the fault record is written."""
MAX_REPORTS = 100
"""Maximum number of buffered reports; later ones are dropped. A report of a large model has 100 kB."""


class NonblockingSink:
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
