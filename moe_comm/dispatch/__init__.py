"""Dispatch and combine: rows to their experts and back."""

from moe_comm.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(
    __name__, __file__, {"Layout": "DispatchHandle", "Payload": "WireDtype", "Payloads": "WireDtypes"}
)
