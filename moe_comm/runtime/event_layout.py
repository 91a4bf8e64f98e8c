"""The layout of the memory region into which a rank records its spans, and the fields of a span."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Final

# A memory fence, for words that processes share through a mapping and access from Python. x86-64 keeps the order of
# loads and of stores; aarch64 does not. So a writer calls ``fence()`` between the data and the word that announces it,
# and a reader between that word and the data.
try:
    from moe_comm._C import fence as fence
except ImportError:  # the native core is not built

    def fence() -> None:
        """Do nothing: Python has no fence of its own."""


class Kind(IntEnum):
    """Kind of a span. Spans from ``DISPATCH`` to ``TRANSFER`` communicate, so they can wait for other ranks."""

    STEP = 0
    COMPUTE = 1
    OPTIMIZER = 2
    DATA = 3
    CHECKPOINT = 4
    PAUSE = 5  # planned garbage collection
    MARK = 6  # an instant, not a span
    DISPATCH = 8
    COMBINE = 9
    COLLECTIVE = 10
    TRANSFER = 11  # between pipeline stages

    @property
    def is_communication(self) -> bool:
        return self >= Kind.DISPATCH


MAGIC: Final = b"moe_comm events\x01"
HEADER_BYTES: Final = 4096
NAMES_BYTES: Final = 64 << 10
ROWS_WORDS: Final = 32 << 10
RECORDS: Final = 4096
NO_NAME: Final = 0

# Header: magic, pid, rank, number of records, process start (clock ticks); then fields that are written individually.
FIXED = struct.Struct("<16sqiiq")
HEAD_AT, ACTIVE_AT, HEARTBEAT_AT, STEP_AT, NAMES_AT, ROWS_HEAD_AT = 64, 72, 80, 88, 96, 104
# Group, kind and number of calls. An entry without a group ends the table; calls that do not fit are not counted.
CALLS_AT = 128
CALLS = struct.Struct("<IIq")
CALLS_COUNT_AT = 8
LONG = struct.Struct("<q")
# index, begin, end, device begin, device end, call, bytes, offset of rows; step, micro, kind, thread, name, layer,
# group, peer, number of experts.
RECORD = struct.Struct("<qqqqqqqqiiHHIIIiI")
END_AT, DEVICE_AT, BYTES_AT, ROWS_AT = 16, 24, 48, 56
MICRO_AT, NAME_AT, LAYER_AT, PEER_AT, EXPERTS_AT = 68, 76, 80, 88, 92
RECORD_BYTES: Final = 96
assert RECORD.size == RECORD_BYTES


@dataclass(frozen=True)
class Span:
    """One record. Times are ns of CLOCK_MONOTONIC, which the ranks of a host share.

    Attributes:
        index: number of the span on its rank.
        layer: "" outside of layers.
        end_ns: 0 for an open span.
        device_ns: begin and end on a GPU, on the same clock; (0, 0) if unknown. If only the end is 0, the begin of the
            pending operation that this span waits for. That begin is before ``begin_ns``.
        group: global ranks that take part; () for this rank alone.
        call: number of the group's call of this kind, from 1. Ranks match their spans by it. 0 without a group.
        peer: the rank at the other end of a transfer; -1 for none.
        nbytes: bytes that this rank sent to others.
        rows: rows of each of this rank's experts.
        thread: 0 for the main thread, and for threads of torch that it waits for (autograd on a GPU).
    """

    rank: int
    index: int
    kind: Kind
    name: str
    layer: str
    begin_ns: int
    end_ns: int
    device_ns: tuple[int, int]
    step: int
    micro: int
    group: tuple[int, ...]
    call: int
    peer: int
    nbytes: int
    rows: tuple[int, ...]
    thread: int

    @property
    def open(self) -> bool:
        return self.end_ns == 0


@dataclass
class Totals:
    """Sums over communication spans, including those that the ring has overwritten. Nested spans count once."""

    ns: dict[Kind, int] = field(default_factory=dict)  # by kind
    nbytes: dict[Kind, int] = field(default_factory=dict)  # by kind; bytes of nested spans if a span has none
    peers: dict[int, int] = field(default_factory=dict)  # bytes to single ranks
    groups: dict[int, int] = field(default_factory=dict)  # bytes to the other ranks of a group, by the group's number
    rows: int = 0  # rows received by this rank's experts


@dataclass(frozen=True)
class RegionHeader:
    """Header of a region."""

    rank: int
    pid: int
    records: int  # size of the ring
    start_ticks: int  # start of the process as in /proc/PID/stat; distinguishes processes with equal pids
    step: int
    head: int  # index of the next span
    active_ns: int  # time when a span last began or ended
    heartbeat_ns: int  # time when its watcher last ran; 0 for never


def region_bytes(records: int = RECORDS) -> int:
    """Return the size of one rank's region."""
    return HEADER_BYTES + NAMES_BYTES + 4 * ROWS_WORDS + records * RECORD_BYTES


MAX_RANKS = 1 << 20
_EQUAL = re.compile(r"([0-9]{1,9})-([0-9]{1,9}):([0-9]{1,9})")


def group_text(ranks: Iterable[int]) -> str:
    """Return ranks as stored in a region: "3,5,6", or first, last and step for equal distances: "0-992:8"."""
    listed = list(ranks)
    step = listed[1] - listed[0] if len(listed) > 2 else 0
    if step > 0 and listed == list(range(listed[0], listed[-1] + 1, step)):
        return f"{listed[0]}-{listed[-1]}:{step}"
    return ",".join(map(str, listed))


@lru_cache(maxsize=256)
def ranks_of(text: str) -> tuple[int, ...]:
    """Parse the output of ``group_text``; () for any other text."""
    if match := _EQUAL.fullmatch(text):
        first, last, step = (int(part) for part in match.groups())
        ranks = range(first, last + 1, max(step, 1))
        return tuple(ranks) if len(ranks) <= MAX_RANKS else ()
    return tuple(int(part) for part in text.split(",") if part.isdecimal() and part.isascii() and len(part) < 10)
