"""A sink for metrics that a disk which does not answer cannot hold up: writing happens in a thread beside training.

    training   write ─▶ │ until it is written │ ─▶ next step ─▶ write ─▶ │ at most patience_s │ ─▶ next step ─▶
    thread              │ sink.write          │                          │ sink.write ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─

While the sink answers, a report is written before the call returns, as without the thread: a run that is killed leaves
the metrics of its last step. When it does not, training says so, goes on, and waits for it no more; reports are kept
until the sink takes them again, or the run ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from moe_comm.observe.records import FaultRecord
from moe_comm.train.metrics import MetricsSink, StepReport

PATIENCE_S = 5.0
RECORD_S = 1.0
"""What the record of it gets to be written before training goes on."""
KEPT = 100
"""Reports that wait for a sink; those after them are left out. With the loads of a large model one has 100 kB."""


class NonblockingSink:
    """``sink``, of which no call takes longer than ``patience_s``, and the second one in a row that would no time.

    What the sink raises is raised by the call that waited for it, or by the next one.

    Args:
        name: of the sink, in what is told. say: shows a line. noticed: takes the record, in a thread of its own where
            that does not answer either (it may be a file on the same disk).
        patience_s: seconds; None is ``PATIENCE_S``.
    """

    def __init__(
        self,
        sink: MetricsSink,
        name: str,
        say: Callable[[str], None],
        noticed: Callable[[FaultRecord], None],
        patience_s: float | None = None,
    ) -> None:
        self._sink, self._name, self._say, self._noticed = sink, name, say, noticed
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stalled = self._ended = False
        self._step = self._left_out = 0

    def write(self, report: StepReport) -> None:
        self._step = report.step
        self._do(lambda: self._sink.write(report))

    def summary(self, step: int, values: dict[str, float]) -> None:
        self._step = step
        self._do(lambda: self._sink.summary(step, values))

    def close(self) -> None:
        """What is kept gets ``patience_s`` once more; then it is lost. A second call does nothing."""
        if self._ended:
            return
        with self._changed:
            self._ended = True
            self._add(self._sink.close)
            done = self._changed.wait_for(lambda: not self._calls, self._patience_s)
            lost = self._left_out + max(len(self._calls) - 1, 0)
        if not done or lost:
            closed = "" if done else ", and is not closed: it did not answer until the run ended"
            self._tell(f"{self._name} lacks {lost} report(s){closed}")
        self._raise()

    def _do(self, call: Callable[[], None]) -> None:
        """Have ``call`` made, and wait for it unless those before it are stuck."""
        with self._changed:
            back = self._stalled and not self._calls
            if back:
                self._stalled = False
            full = len(self._calls) >= KEPT
            if full:
                self._left_out += 1
            else:
                self._add(call)
            done = self._stalled or self._changed.wait_for(lambda: not self._calls, self._patience_s)
            self._stalled = self._stalled or not done
        if back:
            without = f", without {self._left_out} report(s)" if self._left_out else ""
            self._tell(f"{self._name} takes reports again{without}")
        if not done:
            self._tell(
                f"{self._name} has not taken the report of step {self._step} for {self._patience_s:g} s; training goes "
                f"on, and {KEPT} reports are kept for it"
            )
        self._raise()

    def _add(self, call: Callable[[], None]) -> None:
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
                if self._ended and not self._calls:
                    return

    def _raise(self) -> None:
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _tell(self, what: str) -> None:
        self._say(f"step {self._step}: {what}")
        record = FaultRecord(time.time(), self._step, "error", [], "none", what)
        thread = threading.Thread(target=self._noticed, args=(record,), name="writes a fault", daemon=True)
        thread.start()
        thread.join(RECORD_S)
