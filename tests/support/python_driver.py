"""A CUDA driver in Python, for tests without a device: its kernels are functions, which run when they are launched."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from moe_comm.runtime.native_core import native

Kernel = Callable[[tuple[int, ...], list[int]], None]
"""Runs a kernel with a grid and the addresses of its parameters."""
CONTEXT = 1000
Pointers = ctypes.POINTER(ctypes.c_void_p)
FAILED = 719


class Launched(NamedTuple):
    """A launch. kernel: the number that ``add`` returned."""

    kernel: int
    grid: tuple[int, ...]
    threads: int
    shared: int
    stream: int
    context: int


class PythonDriver:
    """The driver's functions, of one context. ``calls`` has their addresses.

    Attributes:
        kernels, names: by number.
        launches: launches that it received.
        named: the functions that were called: "cuCtxGetCurrent" once by each native call.
        error: raised by a kernel, whose launch then fails.
    """

    def __init__(self) -> None:
        self.launches: list[Launched] = []
        self.named: list[str] = []
        self.error: Exception | None = None
        self.kernels: dict[int, Kernel] = {}
        self.names: dict[int, str] = {}
        self._current = 0
        integer, unsigned, pointer = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p
        text = ctypes.POINTER(ctypes.c_char_p)
        functions: dict[str, tuple[Any, ...]] = {
            "cuLaunchKernel": (self._launch, pointer, *[unsigned] * 7, pointer, Pointers, pointer),
            "cuFuncSetAttribute": (lambda *_: 0, pointer, integer, integer),
            "cuCtxGetCurrent": (self._get_context, Pointers),
            "cuCtxSetCurrent": (self._set_context, pointer),
            "cuGetErrorName": (lambda *_: 1, integer, text),
            "cuGetErrorString": (lambda *_: 1, integer, text),
            "cuTensorMapEncodeTiled": (
                self._encode, Pointers, integer, unsigned, pointer, *[ctypes.POINTER(ctypes.c_uint64)] * 2,
                *[ctypes.POINTER(unsigned)] * 2, *[integer] * 4,
            ),
        }  # fmt: skip
        self._callbacks = {
            name: ctypes.CFUNCTYPE(integer, *arguments)(call) for name, (call, *arguments) in functions.items()
        }
        self.calls = {name: ctypes.cast(callback, pointer).value or 0 for name, callback in self._callbacks.items()}

    def add(self, name: str, kernel: Kernel) -> int:
        """Return the number of a kernel, which is its handle for the driver."""
        number = len(self.kernels) + 1
        self.kernels[number], self.names[number] = kernel, name
        return number

    def record(self, device: Any, buffers: Sequence[tuple[int, int]]) -> Any:
        """Return an empty record, as ``gpu.record.new_record``."""
        return native().GpuRecord(self.calls, CONTEXT, buffers)

    def _get_context(self, to: Any) -> int:
        self.named.append("cuCtxGetCurrent")
        to[0] = self._current or None
        return 0

    def _set_context(self, context: int | None) -> int:
        self._current = context or 0
        return 0

    def _launch(
        self, kernel: int, x: int, y: int, z: int, threads: int, _y: int, _z: int, shared: int, stream: int | None,
        parameters: Any, extra: int | None,
    ) -> int:  # fmt: skip
        self.named.append("cuLaunchKernel")
        self.launches.append(Launched(kernel, (x, y, z), threads, shared, stream or 0, self._current))
        try:
            self.kernels[kernel]((x, y, z), parameters)
        except Exception as error:
            self.error = error
            return FAILED
        return 0

    def _encode(self, to: Any, dtype: int, rank: int, address: int, *_: Any) -> int:
        to[0] = address  # all that the emulated kernels need of the map
        return 0
