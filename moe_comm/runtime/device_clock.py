"""Begin and end times of work on a GPU on the CPU's clock, measured without waiting for the GPU.

    CPU     ──begin span──[queue work]──end span──────────────── poll ────────────── poll ──▶ span.put_device
    stream  ...earlier work... | event a | work of the span | event b | ...           a, b completed: times are known

CUDA only reports the time between two events, in single-precision milliseconds. So times are measured from a reference
event that is renewed regularly. Two bounds place the reference on the CPU's clock: no event completes before it was
queued, or after ``poll`` has seen that it is completed. An idle stream completes an event at once, so the bounds are
microseconds apart. Each event corrects the drift between both clocks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_comm.runtime.events import Open, add_lock

if TYPE_CHECKING:
    import torch

MOST_PENDING = 8192
"""Maximum number of spans whose GPU times are unknown. Further spans get no GPU times."""
RENEW_MS = 1000.0
"""Maximum age of the reference. Single precision then has a resolution of a tenth of a microsecond."""


@dataclass
class _Queued:
    """An event, and the time when the CPU queued it."""

    event: torch.cuda.Event
    queued_ns: int


class QueuedTimes:
    """Measures work that is queued on one device and any number of its streams, without waiting for it.

    Args:
        make: returns a new event.
        capturing: whether the current stream is captured into a graph. Events in a graph have no time.
    """

    _lock: threading.Lock

    def __init__(self, make: Callable[[], torch.cuda.Event], capturing: Callable[[], bool] = lambda: False) -> None:
        self._make, self._capturing = make, capturing
        self._free: list[torch.cuda.Event] = []
        self._begun: dict[int, _Queued] = {}
        self._pending: deque[tuple[Open, _Queued, _Queued]] = deque()
        self._reference: torch.cuda.Event | None = None
        self._reference_ns = 0.0
        add_lock(self, "_lock")

    def begun(self, span: Open) -> None:
        """Work that is queued from now on belongs to ``span``."""
        if len(self._pending) + len(self._begun) < MOST_PENDING and not self._capturing():
            self._begun[id(span)] = self._queue()

    def ended(self, span: Open) -> None:
        """The work of ``span`` is queued. When it has completed, its times go to ``span.put_device``."""
        begin_event = self._begun.pop(id(span), None)
        if begin_event is not None and not self._capturing():
            self._pending.append((span, begin_event, self._queue()))

    def poll(self) -> None:
        """Process completed work."""
        with self._lock:
            while self._pending and self._pending[0][2].event.query():
                seen_ns = time.monotonic_ns()
                span, begin_event, end_event = self._pending.popleft()
                if not begin_event.event.query():  # this event is on another stream, which is behind
                    self._pending.append((span, begin_event, end_event))
                    return
                begin_ns = self._placed(begin_event, seen_ns)
                end_ns = begin_ns + 1e6 * begin_event.event.elapsed_time(end_event.event)
                span.put_device(round(begin_ns), round(max(begin_ns, end_ns)))
                self._free += (event for event in (begin_event.event, end_event.event) if event is not self._reference)

    def _queue(self) -> _Queued:
        try:
            event = self._free.pop()
        except IndexError:
            event = self._make()
        queued = _Queued(event, time.monotonic_ns())
        event.record()
        return queued

    def _placed(self, queued: _Queued, seen_ns: int) -> float:
        """Return the time of a completed event on the CPU's clock. It was seen completed at ``seen_ns``."""
        if self._reference is None:
            self._reference, self._reference_ns = queued.event, float(queued.queued_ns)
            return self._reference_ns
        distance_ms: float = self._reference.elapsed_time(queued.event)
        at_ns = self._reference_ns + 1e6 * distance_ms
        correction_ns = max(queued.queued_ns - at_ns, 0.0) + min(seen_ns - at_ns, 0.0)
        self._reference_ns += correction_ns
        at_ns += correction_ns
        if distance_ms > RENEW_MS:
            self._free.append(self._reference)
            self._reference, self._reference_ns = queued.event, at_ns
        return at_ns


def cuda_times() -> QueuedTimes:
    """Return a clock for spans on the current CUDA device."""
    # Imported here, so that spans can be recorded and read without torch.
    import torch

    return QueuedTimes(lambda: torch.cuda.Event(enable_timing=True), torch.cuda.is_current_stream_capturing)
