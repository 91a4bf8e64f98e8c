"""What a rank is doing and has just done: typed spans in a ring of fixed size, always on.

    region of one rank (an anonymous map, or a part of a board that the ranks of a host share)
    ┌────────┬───────────────┬──────────────────────┬───────────────────────────────────┐
    │ header │ names, groups │ rows of experts, ring │ ring of records, one for each span │
    └────────┴───────────────┴──────────────────────┴───────────────────────────────────┘

A record is written when its span begins and completed when it ends, so that whoever maps the region, a peer or the
launcher, reads what a rank was in the middle of, even if it was killed or is stopped. A span costs a microsecond or
two (csrc/cpu/spans.cpp writes it); nothing waits.

    with EVENTS.span(Kind.DISPATCH, "layers.0", group=group_id, nbytes=...):    a region only
    with moving(Kind.COLLECTIVE, "gradients", group=...):                       and counted by COMMUNICATION
    with COMMUNICATION.paused():                  inside of that, around what others do between their transfers
    COMMUNICATION.take()                          seconds since the last call, by which a training step's time is split
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from moe_comm.runtime.event_layout import (
    ACTIVE_AT,
    BEAT_AT,
    FIXED,
    HEADER_BYTES,
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
    group_text,
    region_bytes,
)

if TYPE_CHECKING:
    from moe_comm._C import Open, SpanRecorder
else:
    try:
        from moe_comm._C import Open, SpanRecorder
    except ImportError as error:
        from moe_comm.runtime.no_spans import Open, SpanRecorder

        # All of dispatch, layers and training load this module, and a module is loaded once in a process.
        warnings.warn(
            f"the native core of moe_comm is not built ({error}): plain torch does its work, which is slower, ranks "
            "share no memory, and no spans are recorded. To build it, run: pip install -e .",
            RuntimeWarning,
            stacklevel=2,
        )

__all__ = ["COMMUNICATION", "EVENTS", "DeviceClock", "Meter", "Open", "Recorder", "moving", "start_ticks"]


def start_ticks(pid: int | None = None) -> int:
    """When a process started, in clock ticks since boot; 0 if there is none."""
    try:
        with open(f"/proc/{pid or 'self'}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


class DeviceClock(Protocol):
    """Takes the time of work that is queued on a device, and never waits for it; see ``runtime.device_clock``."""

    def begun(self, span: Open) -> None:
        """What is queued from now on belongs to ``span``."""

    def ended(self, span: Open) -> None:
        """No more does. Once it is done its times go to ``span.put_device``."""

    def poll(self) -> None:
        """Look what is done by now."""


class Recorder(SpanRecorder):
    """Writes a rank's spans. Any thread may record.

    Spans with a group count as its calls, of each kind for itself: every member of the group enters them in the same
    order and equally often, on its main thread or one of torch's own, or leaves out the group.

    step, micro: set by who knows them (the training loop, the pipeline's stages); every span takes them over.
    enabled: where False, spans cost an attribute look-up. It stays False without the native core.
    device: takes the times of spans on a GPU, if there is one.
    """

    _buffer: memoryview

    def __init__(self, records: int = RECORDS) -> None:
        self._lock = threading.RLock()
        self._names[""] = NO_NAME
        self._names_end = HEADER_BYTES + 2
        # Private: a process that is forked from this one has a copy, and does not write into this one's.
        private = mmap.mmap(-1, region_bytes(records), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._region(memoryview(private), records, 0)

    def attach(self, region: memoryview, rank: int, records: int = RECORDS) -> None:
        """Record into ``region`` from now on, as ``rank``; what was recorded before stays behind. Numbers of names and
        groups stay good, calls of groups count anew.

        Raises:
            ValueError: it is smaller than ``region_bytes(records)``.
        """
        if len(region) < region_bytes(records):
            raise ValueError(f"a region of {records} records takes {region_bytes(records)} bytes; got {len(region)}")
        with self._lock:
            self._region(region, records, rank)

    @property
    def region(self) -> memoryview:
        """What is being recorded into."""
        return self._buffer

    def beat(self) -> None:
        """Say that this process's threads run."""
        LONG.pack_into(self._buffer, BEAT_AT, time.monotonic_ns())

    def at(self, step: int) -> None:
        """A step begins."""
        self._begin_step(step)
        if self.device is not None:
            self.device.poll()

    def count_anew(self) -> None:
        """The next calls of all groups are their first ones. Every rank does so at the same place of the program."""
        self._count_anew()

    def take(self) -> Totals:
        """Sums since the last call."""
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
        """A number for a group of global ranks, to give to ``span``."""
        return self.name(group_text(ranks))

    def name(self, text: str) -> int:
        """A number for ``text``, which the region then holds; 0 for the empty one, and when the table is full."""
        found = self._names.get(text)
        return found if found is not None else self._add_name(text)

    def text(self, number: int) -> str:
        """What ``name`` gave ``number`` for."""
        return next((text for text, found in self._names.items() if found == number), "")

    def _region(self, buffer: memoryview, records: int, rank: int) -> None:
        names_end, ring_at = self._names_end, HEADER_BYTES + NAMES_BYTES + 4 * ROWS_WORDS
        names = bytes(self._buffer[HEADER_BYTES:names_end]) if len(self._names) > 1 else b""
        # Regions are used again by ranks that were started again: nothing old may be left.
        buffer[: HEADER_BYTES + NAMES_BYTES] = bytes(HEADER_BYTES + NAMES_BYTES)
        buffer[ring_at : ring_at + records * RECORD_BYTES] = bytes(records * RECORD_BYTES)
        buffer[HEADER_BYTES : HEADER_BYTES + len(names)] = names
        LONG.pack_into(buffer, NAMES_AT, names_end)
        LONG.pack_into(buffer, ACTIVE_AT, time.monotonic_ns())
        LONG.pack_into(buffer, STEP_AT, self.step)
        FIXED.pack_into(buffer, 0, MAGIC, os.getpid(), rank, records, start_ticks())
        self._buffer, self.records = buffer, records
        self._bind(buffer, records, threading.main_thread().ident or 0)

    # --- what the native part asks ---

    def _add_name(self, text: str) -> int:
        data = text.encode()[:60_000]
        with self._lock:
            at = self._names.get(text)  # another thread may have been faster
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

    def _is_aside(self) -> bool:
        """Whether this thread was started by Python: what it does is beside the main one, which does not wait."""
        return not isinstance(threading.current_thread(), threading._DummyThread)


EVENTS: Final = Recorder()
"""This process's."""


class _Entered(threading.local):
    """How often a thread is inside of a meter, and since when."""

    depth = 0
    began = 0.0


class Meter:
    """Seconds between entering and leaving, summed; what is nested counts once. Each thread enters for itself.

    On a GPU the host only queues the work, so the seconds are those it could not go on, not those on the device.
    """

    def __init__(self) -> None:
        self._local = _Entered()
        self._lock = threading.Lock()
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
        """Do not count until it ends, but for what enters anew meanwhile."""
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

    def take(self) -> float:
        """Seconds since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds


COMMUNICATION = Meter()
"""Dispatch, combine, and every collective of this library: all that moves data between ranks, and the waits in it."""


class moving:
    """A span of ``EVENTS`` that ``COMMUNICATION`` counts too: around what moves data between ranks."""

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
