"""The launches that fake_driver.c recorded."""

from __future__ import annotations

import ctypes


class Launched(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("function", "grid", "block", "shared", "stream", "context")),
        ("words", ctypes.c_ubyte * 768),
    )


def launches(library: ctypes.CDLL) -> list[Launched]:
    count = ctypes.c_int()
    first = library.fake_launches(ctypes.byref(count))
    return [first[i] for i in range(count.value)]
