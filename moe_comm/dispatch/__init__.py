"""Dispatch and combine: rows to their experts and back."""

from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.capacity import Capacity, apply_capacity
from moe_comm.dispatch.choice import Traffic
from moe_comm.dispatch.factory import BACKENDS, explain_choice, make_dispatcher
from moe_comm.dispatch.payload import Payload, Payloads
from moe_comm.dispatch.peer_options import PeerToPeerOptions
from moe_comm.dispatch.types import DROPPED, INVALID_LOGITS, Dispatched, DispatchOptions, Layout

__all__ = [
    "BACKENDS",
    "DROPPED",
    "INVALID_LOGITS",
    "Capacity",
    "DispatchOptions",
    "Dispatched",
    "Dispatcher",
    "Layout",
    "Payload",
    "Payloads",
    "PeerToPeerOptions",
    "Traffic",
    "apply_capacity",
    "explain_choice",
    "make_dispatcher",
]
