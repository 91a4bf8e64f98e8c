"""What a rank is doing and has just done: typed spans in a ring of fixed size, always on.

    region of one rank (an anonymous map, or a part of a board that the ranks of a host share)
    ┌────────┬───────────────┬──────────────────────┬───────────────────────────────────┐
    │ header │ names, groups │ rows of experts, ring │ ring of records, one for each span │
    └────────┴───────────────┴──────────────────────┴───────────────────────────────────┘

A record is written when its span begins and completed when it ends, so that whoever maps the region, a peer or the
launcher, reads what a rank was in the middle of, even if it was killed or is stopped. One span costs a few
microseconds; nothing is allocated after the start and nothing waits.

    with EVENTS.span(Kind.DISPATCH, "layers.0", group=group_id, nbytes=...):    a region only
    with moving(Kind.COLLECTIVE, "gradients", group=...):                       and counted by COMMUNICATION
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol, Self

from moe_comm.runtime.event_layout import (
    ACTIVE_AT,
    BEAT_AT,
    BYTES_AT,
    CALLS,
    CALLS_AT,
    CALLS_COUNT_AT,
    DEVICE_AT,
    END_AT,
    EXPERTS_AT,
    FIXED,
    HEAD_AT,
    HEADER_BYTES,
    LONG,
    MAGIC,
    MICRO_AT,
    NAME_AT,
    NAMES_AT,
    NAMES_BYTES,
    NO_NAME,
    PEER_AT,
    RECORD,
    RECORD_BYTES,
    RECORDS,
    ROWS_AT,
    ROWS_HEAD_AT,
    ROWS_WORDS,
    STEP_AT,
    Kind,
    Totals,
    group_text,
    region_bytes,
)
from moe_comm.runtime.meter import COMMUNICATION


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


class Recorder:
    """Writes a rank's spans. Any thread may record.

    Spans with a group count as its calls, of each kind for itself: every member of the group enters them in the same
    order and equally often, on its main thread or one of torch's own, or leaves out the group.

    step, micro: set by who knows them (the training loop, the pipeline's stages); every span takes them over.
    enabled: where False, spans cost an attribute look-up. device: takes the times of spans on a GPU, if there is one.
    """

    _head: int
    _ring_at: int
    _names: dict[str, int]
    _names_end: int

    def __init__(self, records: int = RECORDS) -> None:
        self.step = 0
        self.micro = 0
        self.enabled = True
        self.device: DeviceClock | None = None
        self._lock = threading.RLock()  # names are added with it held and without
        self._totals = Totals()
        self._outer: Open | None = None
        self._inside = (0, NO_NAME)
        self._main = threading.main_thread().ident
        self._region(memoryview(mmap.mmap(-1, region_bytes(records))), records, 0)

    def attach(self, region: memoryview, rank: int, records: int = RECORDS) -> None:
        """Record into ``region`` from now on, as ``rank``; what was recorded before stays behind. Numbers of names and
        groups stay good, calls of groups count anew.

        Raises:
            ValueError: it is smaller than ``region_bytes(records)``.
        """
        if len(region) < region_bytes(records):
            raise ValueError(f"a region of {records} records takes {region_bytes(records)} bytes; got {len(region)}")
        with self._lock:
            names, end, table = self._names, self._names_end, bytes(self._buffer[HEADER_BYTES : self._names_end])
            self._outer = None
            self._region(region, records, rank)
            self._names, self._names_end = names, end
            region[HEADER_BYTES:end] = table
            LONG.pack_into(region, NAMES_AT, end)

    @property
    def region(self) -> memoryview:
        """What is being recorded into."""
        return self._buffer

    def beat(self) -> None:
        """Say that this process's threads run."""
        LONG.pack_into(self._buffer, BEAT_AT, time.monotonic_ns())

    def at(self, step: int) -> None:
        """A step begins."""
        self.step, self.micro, self._outer = step, 0, None
        LONG.pack_into(self._buffer, STEP_AT, step)
        if self.device is not None:
            self.device.poll()

    def count_anew(self) -> None:
        """The next calls of all groups are their first ones. Every rank does so at the same place of the program."""
        with self._lock:
            self._calls.clear()
            self._calls_at.clear()
            self._buffer[CALLS_AT:HEADER_BYTES] = bytes(HEADER_BYTES - CALLS_AT)

    def take(self) -> Totals:
        """Sums since the last call."""
        with self._lock:
            totals, self._totals = self._totals, Totals()
        return totals

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

    def span(
        self,
        kind: Kind,
        name: str,
        *,
        layer: str = "",
        group: int = NO_NAME,
        peer: int = -1,
        nbytes: int = 0,
    ) -> Open:
        """A context manager around what it names. With ``group`` it counts as the group's next call."""
        return Open(self, kind, name, layer, group, peer, nbytes)

    # --- for Open ---

    def _begin(self, span: Open) -> None:
        now = time.monotonic_ns()
        aside = threading.get_ident() != self._main and _is_aside()
        with self._lock:
            index = self._head
            self._head = index + 1
            call = 0
            if span.group and not aside:
                counted = (span.group, span.kind)
                call = self._calls.get(counted, 0) + 1
                self._calls[counted] = call
                if at := self._calls_at.get(counted) or self._add_calls(counted):
                    LONG.pack_into(self._buffer, at + CALLS_COUNT_AT, call)
            if self._outer is None and span.kind >= Kind.DISPATCH and not aside:
                self._outer, self._inside = span, (0, NO_NAME)
            at = self._ring_at + index % self.records * RECORD_BYTES
            RECORD.pack_into(
                self._buffer,
                at,
                index,
                now,
                0,
                0,
                0,
                call,
                span.nbytes,
                0,
                self.step,
                self.micro,
                span.kind,
                aside,
                self.name(span.name),
                self.name(span.layer),
                span.group,
                span.peer,
                0,
            )
            LONG.pack_into(self._buffer, HEAD_AT, index + 1)
            LONG.pack_into(self._buffer, ACTIVE_AT, now)
        span.index, span.begin_ns, span.buffer = index, now, self._buffer
        if self.device is not None and span.kind not in _ON_HOST:
            self.device.begun(span)

    def _end(self, span: Open) -> None:
        if self.device is not None and span.kind not in _ON_HOST:
            self.device.ended(span)
        now = time.monotonic_ns()
        if span.buffer is not self._buffer:  # begun in another region
            return
        at = self._ring_at + span.index % self.records * RECORD_BYTES
        with self._lock:
            if LONG.unpack_from(self._buffer, at)[0] == span.index:  # else the ring has gone round since
                LONG.pack_into(self._buffer, at + END_AT, now)
            LONG.pack_into(self._buffer, ACTIVE_AT, now)
            if self._outer is span:
                self._outer = None
                self._count(span, now)
            elif span.nbytes and self._outer is not None:
                nbytes, group = self._inside
                self._inside = (nbytes + span.nbytes, span.group or group)
                if span.peer >= 0:
                    peers = self._totals.peers
                    peers[span.peer] = peers.get(span.peer, 0) + span.nbytes

    def _count(self, span: Open, now: int) -> None:
        totals, kind = self._totals, span.kind
        nbytes, group = (span.nbytes, span.group) if span.nbytes else self._inside
        totals.ns[kind] = totals.ns.get(kind, 0) + now - span.begin_ns
        if not nbytes:
            return
        totals.nbytes[kind] = totals.nbytes.get(kind, 0) + nbytes
        if span.nbytes and span.peer >= 0:
            totals.peers[span.peer] = totals.peers.get(span.peer, 0) + nbytes
        elif group:
            totals.groups[group] = totals.groups.get(group, 0) + nbytes

    def _put_rows(self, span: Open, rows: Sequence[int]) -> None:
        number = min(len(rows), ROWS_WORDS)
        self._totals.rows += sum(rows)
        at = self._ring_at + span.index % self.records * RECORD_BYTES
        with self._lock:
            if span.buffer is not self._buffer or LONG.unpack_from(self._buffer, at)[0] != span.index:
                return
            LONG.pack_into(self._buffer, at + BYTES_AT, span.nbytes)
            if self._rows_head % ROWS_WORDS + number > ROWS_WORDS:  # rows of one span stand together
                self._rows_head += ROWS_WORDS - self._rows_head % ROWS_WORDS
            place = self._rows_at + 4 * (self._rows_head % ROWS_WORDS)
            struct.pack_into(f"<{number}I", self._buffer, place, *rows[:number])
            LONG.pack_into(self._buffer, at + ROWS_AT, self._rows_head)
            struct.pack_into("<I", self._buffer, at + EXPERTS_AT, number)
            self._rows_head += number
            LONG.pack_into(self._buffer, ROWS_HEAD_AT, self._rows_head)

    def _put(self, span: Open) -> None:
        at = self._ring_at + span.index % self.records * RECORD_BYTES
        with self._lock:
            if span.buffer is self._buffer and LONG.unpack_from(self._buffer, at)[0] == span.index:
                LONG.pack_into(self._buffer, at + BYTES_AT, span.nbytes)
                struct.pack_into("<i", self._buffer, at + MICRO_AT, self.micro)
                struct.pack_into("<II", self._buffer, at + NAME_AT, self.name(span.name), self.name(span.layer))
                struct.pack_into("<i", self._buffer, at + PEER_AT, span.peer)

    def _put_device(self, span: Open, begin_ns: int, end_ns: int) -> None:
        at = self._ring_at + span.index % self.records * RECORD_BYTES
        with self._lock:
            if span.buffer is self._buffer and LONG.unpack_from(self._buffer, at)[0] == span.index:
                struct.pack_into("<qq", self._buffer, at + DEVICE_AT, begin_ns, end_ns)

    def _region(self, buffer: memoryview, records: int, rank: int) -> None:
        self._buffer, self.records = buffer, records
        self._head = self._rows_head = 0
        self._names = {"": NO_NAME}
        self._names_end = HEADER_BYTES + 2
        self._calls: dict[tuple[int, int], int] = {}
        self._calls_at: dict[tuple[int, int], int] = {}
        self._rows_at = HEADER_BYTES + NAMES_BYTES
        self._ring_at = self._rows_at + 4 * ROWS_WORDS
        # Regions are used again by ranks that were started again: nothing old may be left.
        buffer[: self._rows_at] = bytes(self._rows_at)
        buffer[self._ring_at : self._ring_at + records * RECORD_BYTES] = bytes(records * RECORD_BYTES)
        LONG.pack_into(buffer, NAMES_AT, self._names_end)
        LONG.pack_into(buffer, ACTIVE_AT, time.monotonic_ns())
        LONG.pack_into(buffer, STEP_AT, self.step)
        FIXED.pack_into(buffer, 0, MAGIC, os.getpid(), rank, records, start_ticks())

    def _add_calls(self, counted: tuple[int, int]) -> int:
        at = CALLS_AT + len(self._calls_at) * CALLS.size
        if at + CALLS.size > HEADER_BYTES:
            return 0
        CALLS.pack_into(self._buffer, at, *counted, 0)
        self._calls_at[counted] = at
        return at

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


class Open:
    """A span under way. ``put``: what is known of it only later."""

    __slots__ = ("_recorder", "begin_ns", "buffer", "group", "index", "kind", "layer", "name", "nbytes", "peer")

    def __init__(
        self, recorder: Recorder, kind: Kind, name: str, layer: str, group: int, peer: int, nbytes: int
    ) -> None:
        self._recorder, self.kind, self.name, self.layer = recorder, kind, name, layer
        self.group, self.peer, self.nbytes = group, peer, nbytes
        self.index, self.begin_ns = -1, 0
        self.buffer: memoryview | None = None

    def __enter__(self) -> Self:
        if self._recorder.enabled:
            self._recorder._begin(self)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.index >= 0:
            self._recorder._end(self)

    def put_rows(self, rows: Sequence[int], nbytes: int) -> None:
        """Rows that came for each of this rank's experts, and the bytes that this rank sent."""
        self.nbytes = nbytes
        if self.index >= 0:
            self._recorder._put_rows(self, rows)

    def put(
        self, *, name: str | None = None, layer: str | None = None, peer: int | None = None, nbytes: int | None = None
    ) -> None:
        """What it turned out to be; the micro-batch becomes that of now."""
        self.name = self.name if name is None else name
        self.layer = self.layer if layer is None else layer
        self.peer = self.peer if peer is None else peer
        self.nbytes = self.nbytes if nbytes is None else nbytes
        if self.index >= 0:
            self._recorder._put(self)

    def put_device(self, begin_ns: int, end_ns: int) -> None:
        """When the work began and ended on a GPU, on the host's clock; may be known long after the span ended."""
        if self.index >= 0:
            self._recorder._put_device(self, begin_ns, end_ns)


_ON_HOST: Final = frozenset({Kind.DATA, Kind.CHECKPOINT, Kind.PAUSE, Kind.MARK})
"""Kinds of spans that queue no work on a device."""


def _is_aside() -> bool:
    """Whether this thread was started by Python: what it does is beside the main one, which does not wait for it."""
    return not isinstance(threading.current_thread(), threading._DummyThread)


EVENTS = Recorder()
"""This process's."""


class moving:
    """A span of ``EVENTS`` that ``COMMUNICATION`` counts too: around what moves data between ranks."""

    __slots__ = ("_open",)

    def __init__(
        self, kind: Kind, name: str, *, layer: str = "", group: int = NO_NAME, peer: int = -1, nbytes: int = 0
    ) -> None:
        self._open = Open(EVENTS, kind, name, layer, group, peer, nbytes)

    def __enter__(self) -> Open:
        COMMUNICATION.__enter__()
        return self._open.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)
        COMMUNICATION.__exit__(*error)
