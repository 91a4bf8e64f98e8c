"""Where things stand in the region of memory that a rank records its spans into, and what a span is."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Final


class Kind(IntEnum):
    """What a span is. Those from ``DISPATCH`` to ``TRANSFER`` move data between ranks, and so wait for others."""

    STEP = 0
    COMPUTE = 1
    OPTIMIZER = 2
    DATA = 3
    CHECKPOINT = 4
    PAUSE = 5  # planned garbage collection
    MARK = 6  # a moment, not a span
    DISPATCH = 8
    COMBINE = 9
    COLLECTIVE = 10
    TRANSFER = 11  # between pipeline stages

    @property
    def moves(self) -> bool:
        return self >= Kind.DISPATCH


MAGIC: Final = b"moe_comm events\x01"
HEADER_BYTES: Final = 4096
NAMES_BYTES: Final = 64 << 10
ROWS_WORDS: Final = 32 << 10
RECORDS: Final = 4096
NO_NAME: Final = 0

# Header: magic, pid, rank, records, start of the process (clock ticks), then what changes, each written by itself.
FIXED = struct.Struct("<16sqiiq")
HEAD_AT, ACTIVE_AT, BEAT_AT, STEP_AT, NAMES_AT, ROWS_HEAD_AT = 64, 72, 80, 88, 96, 104
# Group, kind and number of calls so far, for as many as fit; the first one without a group ends the table.
CALLS_AT = 128
CALLS = struct.Struct("<IIq")
CALLS_COUNT_AT = 8
LONG = struct.Struct("<q")
# index, begin, end, device begin, device end, call, bytes, rows at; step, micro, kind, thread, name, layer, group, peer
# and number of experts.
RECORD = struct.Struct("<qqqqqqqqiiHHIIIiI")
END_AT, DEVICE_AT, BYTES_AT, ROWS_AT = 16, 24, 48, 56
MICRO_AT, NAME_AT, LAYER_AT, PEER_AT, EXPERTS_AT = 68, 76, 80, 88, 92
RECORD_BYTES: Final = 96
assert RECORD.size == RECORD_BYTES


@dataclass(frozen=True)
class Span:
    """One record, read back. Times are nanoseconds of CLOCK_MONOTONIC, which the ranks of a host share.

    end_ns: 0 while it is open. device_ns: begin and end on a GPU, on the same clock, (0, 0) where not known;
    with an end of 0, when that which this span waits for was begun, earlier than the span.
    layer: "" outside of layers. group: global ranks that take part, () for this rank alone. call: which of the
    group's calls of this kind, from 1, by which ranks find the one they share; 0 without a group. peer: the one rank at
    the other end, -1 for none. nbytes: sent by this rank to others. rows: for each of this rank's experts. thread: 0 is
    the main one, and those of torch's for which it waits (autograd's, on a GPU).
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
    """Sums over spans that move data, however many the ring holds. What is inside another one counts once.

    ns, nbytes: by kind; bytes are those of a span, or where it has none, of the spans inside it. peers: bytes to single
    ranks, groups: to the others of a group, by its number. rows: that came to this rank's experts.
    """

    ns: dict[Kind, int] = field(default_factory=dict)
    nbytes: dict[Kind, int] = field(default_factory=dict)
    peers: dict[int, int] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    rows: int = 0


@dataclass(frozen=True)
class State:
    """What a region's header says. start_ticks: of the process, as in /proc/PID/stat, so that a pid that was used again
    is not taken for it. active_ns: when a span last began or ended. beat_ns: when its watcher last ran; 0: never."""

    rank: int
    pid: int
    start_ticks: int
    step: int
    head: int
    active_ns: int
    beat_ns: int


def region_bytes(records: int = RECORDS) -> int:
    """Size of one rank's region."""
    return HEADER_BYTES + NAMES_BYTES + 4 * ROWS_WORDS + records * RECORD_BYTES


MOST_RANKS = 1 << 20
_EQUAL = re.compile(r"([0-9]{1,9})-([0-9]{1,9}):([0-9]{1,9})")


def group_text(ranks: Iterable[int]) -> str:
    """Ranks as they stand in a region: "3,5,6", or, at equal distances, first, last and distance, "0-992:8"."""
    listed = list(ranks)
    step = listed[1] - listed[0] if len(listed) > 2 else 0
    if step > 0 and listed == list(range(listed[0], listed[-1] + 1, step)):
        return f"{listed[0]}-{listed[-1]}:{step}"
    return ",".join(map(str, listed))


@lru_cache(maxsize=256)
def ranks_of(text: str) -> tuple[int, ...]:
    """What ``group_text`` wrote; () for anything else."""
    if found := _EQUAL.fullmatch(text):
        first, last, step = (int(part) for part in found.groups())
        ranks = range(first, last + 1, max(step, 1))
        return tuple(ranks) if len(ranks) <= MOST_RANKS else ()
    return tuple(int(part) for part in text.split(",") if part.isdecimal() and part.isascii() and len(part) < 10)
