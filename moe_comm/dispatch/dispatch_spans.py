"""Trace spans of dispatch and combine, with the number of bytes sent."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from moe_comm.dispatch.wire.wire_dtype import SAME, bytes_per_row
from moe_comm.runtime.event_layout import NO_NAME, Kind
from moe_comm.runtime.events import EVENTS, Open, communication_span

if TYPE_CHECKING:
    from moe_comm.dispatch.base import Dispatcher
    from moe_comm.dispatch.types import DispatchHandle

KINDS = {
    "dispatch": Kind.DISPATCH,
    "combine backward": Kind.DISPATCH,
    "combine": Kind.COMBINE,
    "dispatch backward": Kind.COMBINE,
}
"""Span kind of each operation. DISPATCH sends rows to experts; COMBINE sends rows back to the ranks of the tokens."""


def dispatch_span(
    dispatcher: Dispatcher, op: str, label: str, handle: DispatchHandle | None = None, *, counted: bool = True
) -> AbstractContextManager[Open]:
    """Return the span of operation ``op`` of layer ``label``. Its kind is COMPUTE if the dispatcher has no group.

    Args:
        handle: the dispatch handle. None if the dispatch has not created it yet; then call ``record_handle`` later.
        counted: whether to count the span as a call of the group. Set it only if every rank enters the span.
    """
    kind = KINDS[op]
    if dispatcher.comm is None:
        return EVENTS.span(Kind.COMPUTE, op, layer=label)
    group = dispatcher.comm.span_group if counted else NO_NAME
    nbytes = 0 if handle is None else sent_bytes(dispatcher, op, handle)
    return communication_span(kind, op, layer=label, group=group, nbytes=nbytes)


def record_handle(span: Open, dispatcher: Dispatcher, handle: DispatchHandle) -> None:
    """Record the sent bytes and the rows per expert of a dispatch in its span."""
    if span.index >= 0:
        nbytes = sent_bytes(dispatcher, "dispatch", handle) if dispatcher.comm is not None else 0
        span.put_rows(handle.rows_per_expert, nbytes)


def sent_bytes(dispatcher: Dispatcher, op: str, handle: DispatchHandle) -> int:
    """Return the bytes of rows that this rank sends to other ranks in ``op``, without routing weights and group scales.

    Returns 0 if rows are relayed or gathered: the inner collectives record their bytes.
    """
    if not EVENTS.enabled:
        return 0
    slots = handle.num_tokens * handle.top_k - handle.num_dropped
    rows = slots if KINDS[op] is Kind.DISPATCH else handle.num_rows
    own = dispatcher.own_rows(handle, rows)
    if own is None:
        return 0
    key = op, handle.hidden, handle.dtype
    row_bytes = dispatcher.row_bytes.get(key)
    if row_bytes is None:
        wire_dtype = dispatcher.options.wire_dtypes.of(op) if dispatcher.packs else SAME
        row_bytes = dispatcher.row_bytes[key] = bytes_per_row(handle.hidden, wire_dtype, handle.dtype)
    return (rows - own) * row_bytes
