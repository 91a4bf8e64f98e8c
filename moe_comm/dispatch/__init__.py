"""Dispatch and combine: rows to their experts and back."""

from moe_comm.dispatch.base import DROPPED, INVALID_LOGITS, Dispatched, Dispatcher, DispatchOptions, Layout
from moe_comm.dispatch.factory import BACKENDS, make_dispatcher

__all__ = [
    "BACKENDS",
    "DROPPED",
    "INVALID_LOGITS",
    "DispatchOptions",
    "Dispatched",
    "Dispatcher",
    "Layout",
    "make_dispatcher",
]
