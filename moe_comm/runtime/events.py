"""The recorder of spans (named time intervals of operations): what a rank executes and has just executed.

Spans are recorded at all times, into a ring of fixed size that overwrites the oldest ones.

    region of one rank (an anonymous mapping, or a part of the status table that the ranks of a host share)
    ┌────────┬───────────────┬──────────────────────┬───────────────────────────┐
    │ header │ names, groups │ rows of experts, ring │ ring of records, one a span │
    └────────┴───────────────┴──────────────────────┴───────────────────────────┘

A record is written when its span begins and completed when it ends. So another process that maps the region (a peer or
the launcher) can read the open spans of a rank, even if the rank was killed or is stopped. A span costs one or two
microseconds (csrc/cpu/spans.cpp writes it), and never waits.

    with EVENTS.span(Kind.DISPATCH, "layers.0", group=group_id, nbytes=...):         records only
    with communication_span(Kind.COLLECTIVE, "gradients", group=...):                 and is counted by COMMUNICATION
    with COMMUNICATION.paused():                  inside a communication span, around other work between its transfers
    COMMUNICATION.take()                          seconds since the last call; used to split the time of a training step
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from moe_comm.runtime import memory_server
from moe_comm.runtime.event_layout import (
    ACTIVE_AT,
    FIXED,
    HEADER_BYTES,
    HEARTBEAT_AT,
    LONG,
    MAGIC,
    NAMES_AT,
    NAMES_BYTES,
    NO_NAME,
    RECORD_BYTES,
    RECORDS,
    ROWS_WORDS,
    STEP_AT,
    Kind,
    Totals,
    fence,
    group_text,
    region_bytes,
)

if TYPE_CHECKING:
    from moe_comm._C import Open, SpanRecorder
else:
    try:
        from moe_comm._C import Open, SpanRecorder
    except ImportError as error:
        from moe_comm.runtime.no_spans import NullSpan as Open, NullSpanRecorder as SpanRecorder

        # All packages import this module, and a process imports it once.
        warnings.warn(
            f"the native core of moe_comm is not built ({error}): plain torch replaces it, which is slower, ranks "
            "share no memory, and no spans are recorded. To build it, run: pip install -e .",
            RuntimeWarning,
            stacklevel=2,
        )

__all__ = [
    "COMMUNICATION",
    "EVENTS",
    "EventRecorder",
    "Meter",
    "Open",
    "add_lock",
    "communication_span",
    "start_ticks",
]


_owners_of_locks: weakref.WeakKeyDictionary[object, tuple[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()


def add_lock(owner: object, name: str, make: Callable[[], Any] = threading.Lock) -> None:
    """Set attribute ``name`` of ``owner`` to ``make()``, now and in each forked child. One lock per owner.

    A child has only the thread that forked. A lock that another thread held would stay locked in the child forever.
    (The logging and the import system of Python renew theirs; the native core has ``ForkSafeMutex``.)
    """
    setattr(owner, name, make())
    _owners_of_locks[owner] = (name, make)


def _renew_locks() -> None:
    for owner, (name, make) in list(_owners_of_locks.items()):
        setattr(owner, name, make())


os.register_at_fork(after_in_child=_renew_locks)


def start_ticks(pid: int | None = None) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if it is unknown."""
    try:
        return memory_server.start_ticks(pid or os.getpid())
    except OSError:
        return 0


class EventRecorder(SpanRecorder):
    """Records the spans of a rank. Any thread may record.

    Spans with a group are numbered as calls of the group, separately for each kind. Every member of the group must
    begin them in the same order and number, on its main thread or a thread of torch. Otherwise leave out the group.

    Attributes:
        step, micro: step and micro-batch of new spans; set by the training loop and the pipeline.
        enabled: if False, a span only costs an attribute look-up. Without the native core, it is always False.
        device: ``device_clock.QueuedTimes`` for spans on a GPU, or None.
        skew_ns: offset from this host's wall clock to that of rank 0's host; set by ``moe_comm.observe.rank_log``.
        group_texts: ranks of process groups, cached by ``groups.group_of``.
    """

    _buffer: memoryview
    _lock: Any  # of type threading.RLock, which is a function before Python 3.13

    def __init__(self, records: int = RECORDS) -> None:
        add_lock(self, "_lock", threading.RLock)
        self.skew_ns = 0
        self.group_texts: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._names[""] = NO_NAME
        self._names_end = HEADER_BYTES + 2
        # Private, so that a forked process has its own copy.
        private = mmap.mmap(-1, region_bytes(records), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._region(memoryview(private), records, 0)

    def attach(self, region: memoryview, rank: int, records: int = RECORDS) -> None:
        """Record into ``region`` from now on, as ``rank``. Earlier spans are not copied.

        Numbers of names and groups remain valid. Calls of groups are counted from 1 again.
        """
        if len(region) < region_bytes(records):
            raise ValueError(f"a region of {records} records needs {region_bytes(records)} bytes; got {len(region)}")
        with self._lock:
            self._region(region, records, rank)

    @property
    def region(self) -> memoryview:
        """The region that is recorded into."""
        return self._buffer

    def heartbeat(self) -> None:
        """Publish that the threads of this process run."""
        LONG.pack_into(self._buffer, HEARTBEAT_AT, time.monotonic_ns())

    def begin_step(self, step: int) -> None:
        """Begin step ``step``."""
        self._begin_step(step)
        if self.device is not None:
            self.device.poll()

    def reset_call_counts(self) -> None:
        """Count the calls of all groups from 1 again. Every rank must do so at the same point of the program."""
        self._reset_calls()

    def take(self) -> Totals:
        """Return the sums since the last call."""
        ns, nbytes, peers, groups, rows = self._take()
        kinds = Kind._value2member_map_
        return Totals(
            {kinds[kind]: value for kind, value in ns.items()},  # type: ignore[misc]
            {kinds[kind]: value for kind, value in nbytes.items()},  # type: ignore[misc]
            peers,
            groups,
            rows,
        )

    def group(self, ranks: Iterable[int]) -> int:
        """Return the number of a group of global ranks, for ``span``."""
        return self.name(group_text(ranks))

    def name(self, text: str) -> int:
        """Return the number of ``text``, and store the text in the region; 0 for "" and if the region is full."""
        number = self._names.get(text)
        return number if number is not None else self._add_name(text)

    def text(self, number: int) -> str:
        """Return the text with ``number``."""
        return next((text for text, other in self._names.items() if other == number), "")

    def _region(self, buffer: memoryview, records: int, rank: int) -> None:
        names_end, ring_at = self._names_end, HEADER_BYTES + NAMES_BYTES + 4 * ROWS_WORDS
        names = bytes(self._buffer[HEADER_BYTES:names_end]) if len(self._names) > 1 else b""
        # Restarted ranks reuse regions: clear the old content.
        buffer[: HEADER_BYTES + NAMES_BYTES] = bytes(HEADER_BYTES + NAMES_BYTES)
        buffer[ring_at : ring_at + records * RECORD_BYTES] = bytes(records * RECORD_BYTES)
        buffer[HEADER_BYTES : HEADER_BYTES + len(names)] = names
        LONG.pack_into(buffer, NAMES_AT, names_end)
        LONG.pack_into(buffer, ACTIVE_AT, time.monotonic_ns())
        LONG.pack_into(buffer, STEP_AT, self.step)
        fence()
        FIXED.pack_into(buffer, 0, MAGIC, os.getpid(), rank, records, start_ticks())
        self._buffer, self.records = buffer, records
        self._bind(buffer, records, threading.main_thread().ident or 0)

    # --- called by the native core ---

    def _add_name(self, text: str) -> int:
        data = text.encode()[:60_000]
        with self._lock:
            at = self._names.get(text)  # another thread may have added it
            if at is not None:
                return at
            at = self._names_end
            if at + 2 + len(data) > HEADER_BYTES + NAMES_BYTES:
                return NO_NAME
            struct.pack_into(f"<H{len(data)}s", self._buffer, at, len(data), data)
            self._names_end = at + 2 + len(data)
            LONG.pack_into(self._buffer, NAMES_AT, self._names_end)
            self._names[text] = at
            return at

    def _is_background(self) -> bool:
        """Whether this is a background thread: one that Python started, so that the main thread does not wait for it.

        Threads of torch, such as autograd's, appear in Python as dummy threads. The main thread waits for them.
        """
        return not isinstance(threading.current_thread(), threading._DummyThread)


EVENTS: Final = EventRecorder()
"""The recorder of this process."""


class _Entered(threading.local):
    """Nesting depth of a thread in a meter, and the time of the outermost entry."""

    depth = 0
    began = 0.0


class Meter:
    """Sum of the seconds between entering and leaving, over all threads. Nested entries of a thread count once.

    On a GPU, this is the time that the CPU was blocked, not the time on the device.

    Attributes:
        read: whether a caller has called ``take``. Before, spans of communication do not enter the meter.
    """

    _lock: threading.Lock

    def __init__(self) -> None:
        self.read = False
        self._local = _Entered()
        add_lock(self, "_lock")
        self._seconds = 0.0

    def __enter__(self) -> None:
        local = self._local
        if local.depth == 0:
            local.began = time.perf_counter()
        local.depth += 1

    def __exit__(self, *error: Any) -> None:
        local = self._local
        local.depth -= 1
        if local.depth == 0:
            with self._lock:
                self._seconds += time.perf_counter() - local.began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: time inside does not count, except in new entries."""
        depth = self._local.depth
        if not depth:
            yield
            return
        self._local.depth = 1
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
            self._local.depth = depth

    def ignore_thread(self) -> None:
        """Do not count the time of the calling thread, which runs concurrently with the measured thread."""
        self._local.depth = 1  # so that no later entry is the outermost one

    def take(self) -> float:
        """Return the seconds since the last call, and start from zero."""
        self.read = True
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds


COMMUNICATION = Meter()
"""Time in dispatch, combine and all collectives of this library, including their waits."""


class communication_span:
    """A span of ``EVENTS`` around communication. ``COMMUNICATION`` counts it too."""

    __slots__ = ("_open",)

    def __init__(
        self, kind: Kind, name: str, *, layer: str = "", group: int = NO_NAME, peer: int = -1, nbytes: int = 0
    ) -> None:
        self._open = EVENTS.span(kind, name, layer=layer, group=group, peer=peer, nbytes=nbytes)

    def __enter__(self) -> Open:
        COMMUNICATION.__enter__()
        return self._open.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)
        COMMUNICATION.__exit__(*error)
