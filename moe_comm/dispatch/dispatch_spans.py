"""Spans of what moves rows between the ranks that share experts, and how many bytes that is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from moe_comm.dispatch.wire_dtype import bytes_per_row
from moe_comm.runtime.event_layout import NO_NAME, Kind
from moe_comm.runtime.events import EVENTS, Open, moving

if TYPE_CHECKING:
    from moe_comm.dispatch.base import Dispatcher
    from moe_comm.dispatch.types import DispatchHandle

KINDS = {
    "dispatch": Kind.DISPATCH,
    "combine backward": Kind.DISPATCH,
    "combine": Kind.COMBINE,
    "dispatch backward": Kind.COMBINE,
}
"""Where each operation moves rows: to the experts, or home."""


def rows_moved(
    dispatcher: Dispatcher, op: str, label: str, handle: DispatchHandle | None = None, *, counted: bool = True
) -> AbstractContextManager[Open]:
    """Around ``op`` of layer ``label``; a rank alone moves nothing, and computes.

    Args:
        handle: where it is known before; else ``put_handle`` says it after.
        counted: whether it is the group's next call: every rank enters this span for this operation.
    """
    kind = KINDS[op]
    if dispatcher.comm is None:
        return EVENTS.span(Kind.COMPUTE, op, layer=label)
    group = dispatcher.comm.span_group if counted else NO_NAME
    return moving(kind, op, layer=label, group=group, nbytes=0 if handle is None else sent(dispatcher, op, handle))


def put_handle(span: Open, dispatcher: Dispatcher, handle: DispatchHandle) -> None:
    """What a dispatch turned out to be: bytes, and rows of each expert."""
    if span.index >= 0:
        nbytes = sent(dispatcher, "dispatch", handle) if dispatcher.comm is not None else 0
        span.put_rows(handle.rows_per_expert, nbytes)


def sent(dispatcher: Dispatcher, op: str, handle: DispatchHandle) -> int:
    """Bytes of the rows that this rank sends to others in ``op``, without weights and scales of groups.

    0 where rows pass through other ranks or are sent to all: the collectives inside say it.
    """
    if not EVENTS.enabled:
        return 0
    slots = handle.num_tokens * handle.top_k - handle.num_dropped
    leaving = slots if KINDS[op] is Kind.DISPATCH else handle.num_rows
    own = dispatcher.own_rows(handle, leaving)
    if own is None:
        return 0
    if not dispatcher.packs:
        return (leaving - own) * handle.hidden * handle.dtype.itemsize
    return (leaving - own) * bytes_per_row(handle.hidden, dispatcher.options.wire_dtypes.of(op), handle.dtype)
