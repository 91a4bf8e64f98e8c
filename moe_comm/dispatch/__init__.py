"""Dispatch and combine: rows to their experts and back."""

from typing import Any

from moe_comm.deprecated import loads_renamed
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.capacity import Capacity, apply_capacity
from moe_comm.dispatch.choice import Traffic
from moe_comm.dispatch.factory import BACKENDS, explain_choice, make_dispatcher
from moe_comm.dispatch.peer_options import PeerToPeerOptions
from moe_comm.dispatch.types import DROPPED, INVALID_LOGITS, Dispatched, DispatchHandle, DispatchOptions
from moe_comm.dispatch.wire_dtype import WireDtype, WireDtypes

__all__ = [
    "BACKENDS",
    "DROPPED",
    "INVALID_LOGITS",
    "Capacity",
    "DispatchHandle",
    "DispatchOptions",
    "Dispatched",
    "Dispatcher",
    "PeerToPeerOptions",
    "Traffic",
    "WireDtype",
    "WireDtypes",
    "apply_capacity",
    "explain_choice",
    "make_dispatcher",
]


def _load(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


_RENAMED = {"Layout": "DispatchHandle", "Payload": "WireDtype", "Payloads": "WireDtypes"}
__getattr__ = loads_renamed(__name__, _RENAMED, _load)
