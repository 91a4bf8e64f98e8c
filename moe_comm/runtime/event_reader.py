"""Readers of recorded spans, of this process or of another one that still records."""

from __future__ import annotations

import struct
from typing import TypeAlias

from moe_comm.runtime.event_layout import (
    ACTIVE_AT,
    CALLS,
    CALLS_AT,
    CALLS_COUNT_AT,
    FIXED,
    HEAD_AT,
    HEADER_BYTES,
    HEARTBEAT_AT,
    LONG,
    MAGIC,
    NAMES_BYTES,
    RECORD,
    RECORD_BYTES,
    RECORDS,
    ROWS_HEAD_AT,
    ROWS_WORDS,
    STEP_AT,
    Kind,
    RegionHeader,
    Span,
    fence,
    ranks_of,
    region_bytes,
)

Record: TypeAlias = tuple[int, ...]
_KINDS = frozenset(int(kind) for kind in Kind)


def read_header(region: memoryview) -> RegionHeader | None:
    """Return the header of a region, or None if it has none."""
    if len(region) < HEADER_BYTES:
        return None
    magic, pid, rank, records, ticks = FIXED.unpack_from(region, 0)
    if magic != MAGIC or len(region) < region_bytes(max(records, 0)):
        return None
    head, active, heartbeat, step = (
        LONG.unpack_from(region, at)[0] for at in (HEAD_AT, ACTIVE_AT, HEARTBEAT_AT, STEP_AT)
    )
    return RegionHeader(rank, pid, records, ticks, step, head, active, heartbeat)


def read_spans(region: memoryview, last: int = RECORDS, since: int = 0) -> list[Span]:
    """Return the newest spans of a region, oldest first.

    The region may be written concurrently: records that are being overwritten are left out.

    Args:
        last: maximum number of spans.
        since: smallest index.
    """
    header = read_header(region)
    return [] if header is None else [_span(region, header, record) for record in read_records(region, last, since)]


def read_records(region: memoryview, last: int = RECORDS, since: int = 0) -> list[Record]:
    """Like ``read_spans``, but return the raw fields of ``event_layout.RECORD``, which is much cheaper."""
    header = read_header(region)
    if header is None:
        return []
    return _records(region, header.records, max(header.head - min(last, header.records), since, 0), header.head)


def read_open(region: memoryview) -> list[Span]:
    """Return the open spans of a region, oldest first. Much cheaper than ``read_spans``."""
    header = read_header(region)
    if header is None:
        return []
    ring_at = HEADER_BYTES + NAMES_BYTES + 4 * ROWS_WORDS
    words = region[ring_at : ring_at + header.records * RECORD_BYTES].cast("q")
    stride = RECORD_BYTES // words.itemsize
    # The first word of a record is its index, the third one (``END_AT``) its end.
    indices, ends = words[::stride].tolist(), words[2::stride].tolist()
    oldest = max(header.head - header.records, 0)
    # A set, because all unused records have index 0.
    pending = {index for index, end in zip(indices, ends, strict=True) if not end and oldest <= index < header.head}
    records = (record for index in sorted(pending) for record in _records(region, header.records, index, index + 1))
    return [span for span in (_span(region, header, record) for record in records) if span.open]


def read_calls(region: memoryview) -> dict[tuple[tuple[int, ...], Kind], int]:
    """Return the number of calls that a rank has begun, by group and kind."""
    results = {}
    numbers = region[CALLS_AT:HEADER_BYTES].cast("q")[CALLS_COUNT_AT // LONG.size :: CALLS.size // LONG.size].tolist()
    fence()  # the number of an entry is written after its group and kind
    for at, count in zip(range(CALLS_AT, HEADER_BYTES, CALLS.size), numbers, strict=True):
        if not count:
            break
        group, kind, _ = CALLS.unpack_from(region, at)
        if kind in Kind._value2member_map_:
            results[ranks_of(read_name(region, group)), Kind(kind)] = count
    return results


def read_rows(region: memoryview, rows: int, experts: int) -> tuple[int, ...]:
    """Return the row counts of a record from its ``rows`` and ``experts``; () if they were overwritten."""
    if not 0 < experts <= ROWS_WORDS - rows % ROWS_WORDS:
        return ()
    loads = struct.unpack_from(f"<{experts}I", region, HEADER_BYTES + NAMES_BYTES + 4 * (rows % ROWS_WORDS))
    fence()
    return loads if LONG.unpack_from(region, ROWS_HEAD_AT)[0] - rows <= ROWS_WORDS else ()


def _records(region: memoryview, records: int, first: int, head: int) -> list[Record]:
    """Return the records with index ``first`` to ``head - 1``, without those that are being overwritten."""
    if first >= head:
        return []
    ring_at = HEADER_BYTES + NAMES_BYTES + 4 * ROWS_WORDS
    ring = region[ring_at : ring_at + records * RECORD_BYTES]
    begin, end = first % records, first % records + head - first
    fence()  # records below head were written before head
    data = bytes(ring[begin * RECORD_BYTES : end * RECORD_BYTES])
    if end > records:  # the range wraps around
        data += bytes(ring[: (end - records) * RECORD_BYTES])
    fence()
    # The next span of the writer overwrites the record ``overwritten``, whose index changes first.
    overwritten = LONG.unpack_from(region, HEAD_AT)[0] - records
    if first <= overwritten and LONG.unpack_from(ring, overwritten % records * RECORD_BYTES)[0] == overwritten:
        overwritten -= 1
    return [
        record
        for index, record in enumerate(RECORD.iter_unpack(data), first)
        if index > overwritten and record[0] == index and record[1] and record[10] in _KINDS
    ]


def _span(region: memoryview, header: RegionHeader, record: Record) -> Span:
    index, begin, end, gpu_begin, gpu_end, call, nbytes, rows, step, micro = record[:10]
    kind, thread, name, layer, group, peer, experts = record[10:]
    return Span(
        rank=header.rank,
        index=index,
        kind=Kind(kind),
        name=read_name(region, name),
        layer=read_name(region, layer),
        begin_ns=begin,
        end_ns=end,
        device_ns=(gpu_begin, gpu_end),
        step=step,
        micro=micro,
        group=ranks_of(read_name(region, group)),
        call=call,
        peer=peer,
        nbytes=nbytes,
        rows=read_rows(region, rows, experts),
        thread=thread,
    )


def read_name(region: memoryview, at: int) -> str:
    """Return the text with number ``at``; "" for none."""
    if not HEADER_BYTES < at < HEADER_BYTES + NAMES_BYTES - 2:
        return ""
    (size,) = struct.unpack_from("<H", region, at)
    return bytes(region[at + 2 : min(at + 2 + size, HEADER_BYTES + NAMES_BYTES)]).decode(errors="replace")
