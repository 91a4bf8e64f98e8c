"""Reads what ``moe_comm.runtime.events`` records: of this process, or of another one that still writes."""

from __future__ import annotations

import struct
from typing import TypeAlias

from moe_comm.runtime.event_layout import (
    ACTIVE_AT,
    BEAT_AT,
    CALLS,
    CALLS_AT,
    FIXED,
    HEAD_AT,
    HEADER_BYTES,
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
    Span,
    State,
    ranks_of,
    region_bytes,
)

Record: TypeAlias = tuple[int, ...]
_KINDS = frozenset(int(kind) for kind in Kind)


def read_state(region: memoryview) -> State | None:
    """What a region's header says; None where nothing records into it."""
    if len(region) < HEADER_BYTES:
        return None
    magic, pid, rank, records, ticks = FIXED.unpack_from(region, 0)
    if magic != MAGIC or len(region) < region_bytes(max(records, 0)):
        return None
    head, active, beat, step = (LONG.unpack_from(region, at)[0] for at in (HEAD_AT, ACTIVE_AT, BEAT_AT, STEP_AT))
    return State(rank, pid, ticks, step, head, active, beat)


def read_spans(region: memoryview, last: int = RECORDS, since: int = 0) -> list[Span]:
    """The ``last`` spans of a region from index ``since`` on, oldest first.

    It may be written to meanwhile: what is half overwritten is left out.
    """
    state = read_state(region)
    if state is None:
        return []
    records = FIXED.unpack_from(region, 0)[3]
    first = max(state.head - min(last, records), since, 0)
    return [_span(region, state.rank, record) for record in _records(region, records, first, state.head)]


def read_records(region: memoryview, last: int = RECORDS, since: int = 0) -> list[Record]:
    """As ``read_spans``, the fields as they stand in ``event_layout.RECORD``: much cheaper."""
    state = read_state(region)
    if state is None:
        return []
    records = FIXED.unpack_from(region, 0)[3]
    return _records(region, records, max(state.head - min(last, records), since, 0), state.head)


def read_open(region: memoryview) -> list[Span]:
    """The spans of a region that have begun and not ended, oldest first; much cheaper than to read all."""
    state = read_state(region)
    if state is None:
        return []
    records = FIXED.unpack_from(region, 0)[3]
    ring_at = HEADER_BYTES + NAMES_BYTES + 4 * ROWS_WORDS
    words = region[ring_at : ring_at + records * RECORD_BYTES].cast("q")
    every = RECORD_BYTES // words.itemsize
    indices, ends = words[::every].tolist(), words[2::every].tolist()
    first = max(state.head - records, 0)
    # A set: places that were never written to all say 0.
    unended = {index for index, end in zip(indices, ends, strict=True) if not end and first <= index < state.head}
    found = (record for index in sorted(unended) for record in _records(region, records, index, index + 1))
    spans = (_span(region, state.rank, record) for record in found)
    return [span for span in spans if span.open]


def read_calls(region: memoryview) -> dict[tuple[tuple[int, ...], Kind], int]:
    """How many calls a rank has begun, by group and kind."""
    found = {}
    for at in range(CALLS_AT, HEADER_BYTES - CALLS.size + 1, CALLS.size):
        group, kind, count = CALLS.unpack_from(region, at)
        if not group:
            break
        if kind in Kind._value2member_map_:
            found[ranks_of(read_name(region, group)), Kind(kind)] = count
    return found


def read_rows(region: memoryview, rows: int, experts: int) -> tuple[int, ...]:
    """What a record's ``rows`` and ``experts`` stand for; () where others stand there by now."""
    if not 0 < experts <= ROWS_WORDS - rows % ROWS_WORDS:
        return ()
    loads = struct.unpack_from(f"<{experts}I", region, HEADER_BYTES + NAMES_BYTES + 4 * (rows % ROWS_WORDS))
    return loads if LONG.unpack_from(region, ROWS_HEAD_AT)[0] - rows <= ROWS_WORDS else ()


def _records(region: memoryview, records: int, first: int, head: int) -> list[Record]:
    """Those from index ``first`` to before ``head``, at most ``records``, without what is overwritten or half so."""
    if first >= head:
        return []
    ring_at = HEADER_BYTES + NAMES_BYTES + 4 * ROWS_WORDS
    ring = region[ring_at : ring_at + records * RECORD_BYTES]
    begin, end = first % records, first % records + head - first
    data = bytes(ring[begin * RECORD_BYTES : end * RECORD_BYTES])
    if end > records:  # it goes on at the start
        data += bytes(ring[: (end - records) * RECORD_BYTES])
    every = enumerate(RECORD.iter_unpack(data), first)
    return [record for index, record in every if record[0] == index and record[1] and record[10] in _KINDS]


def _span(region: memoryview, rank: int, record: Record) -> Span:
    index, begin, end, on, off, call, nbytes, rows, step, micro, kind, thread, name, layer, group, peer, experts = (
        record
    )
    return Span(
        rank=rank,
        index=index,
        kind=Kind(kind),
        name=read_name(region, name),
        layer=read_name(region, layer),
        begin_ns=begin,
        end_ns=end,
        device_ns=(on, off),
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
    """The text whose number is ``at``; "" for no name."""
    if not HEADER_BYTES < at < HEADER_BYTES + NAMES_BYTES - 2:
        return ""
    (size,) = struct.unpack_from("<H", region, at)
    return bytes(region[at + 2 : min(at + 2 + size, HEADER_BYTES + NAMES_BYTES)]).decode(errors="replace")
