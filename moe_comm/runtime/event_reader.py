"""Reads what ``moe_comm.runtime.events`` records: of this process, or of another one that still writes."""

from __future__ import annotations

import struct

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
    spans = (_read_span(region, state.rank, records, index) for index in range(first, state.head))
    return [span for span in spans if span is not None]


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
    spans = (_read_span(region, state.rank, records, index) for index in sorted(unended))
    return [span for span in spans if span is not None and span.open]


def read_calls(region: memoryview) -> dict[tuple[tuple[int, ...], Kind], int]:
    """How many calls a rank has begun, by group and kind."""
    found = {}
    for at in range(CALLS_AT, HEADER_BYTES - CALLS.size + 1, CALLS.size):
        group, kind, count = CALLS.unpack_from(region, at)
        if not group:
            break
        if kind in Kind._value2member_map_:
            found[ranks_of(_read_name(region, group)), Kind(kind)] = count
    return found


def _read_span(region: memoryview, rank: int, records: int, index: int) -> Span | None:
    """None where it is overwritten, or half of it."""
    rows_at = HEADER_BYTES + NAMES_BYTES
    at = rows_at + 4 * ROWS_WORDS + index % records * RECORD_BYTES
    (
        number,
        begin,
        end,
        on,
        off,
        call,
        nbytes,
        rows,
        step,
        micro,
        kind,
        thread,
        name,
        layer,
        group,
        peer,
        experts,
    ) = RECORD.unpack_from(bytes(region[at : at + RECORD_BYTES]))
    if number != index or not begin or kind not in Kind._value2member_map_:
        return None
    loads: tuple[int, ...] = ()
    if 0 < experts <= ROWS_WORDS - rows % ROWS_WORDS:
        loads = struct.unpack_from(f"<{experts}I", region, rows_at + 4 * (rows % ROWS_WORDS))
        if LONG.unpack_from(region, ROWS_HEAD_AT)[0] - rows > ROWS_WORDS:  # others stand there by now
            loads = ()
    return Span(
        rank=rank,
        index=index,
        kind=Kind(kind),
        name=_read_name(region, name),
        layer=_read_name(region, layer),
        begin_ns=begin,
        end_ns=end,
        device_ns=(on, off),
        step=step,
        micro=micro,
        group=ranks_of(_read_name(region, group)),
        call=call,
        peer=peer,
        nbytes=nbytes,
        rows=loads,
        thread=thread,
    )


def _read_name(region: memoryview, at: int) -> str:
    if not HEADER_BYTES < at < HEADER_BYTES + NAMES_BYTES - 2:
        return ""
    (size,) = struct.unpack_from("<H", region, at)
    return bytes(region[at + 2 : min(at + 2 + size, HEADER_BYTES + NAMES_BYTES)]).decode(errors="replace")
