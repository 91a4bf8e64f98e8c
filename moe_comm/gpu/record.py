"""Records of launches, which native code repeats in one call (csrc/cuda/record.h).

A record launches kernels that were loaded before, such as those of Triton, and the GEMMs of ``gpu/gemm.py``. It passes
the addresses of buffers, whose bases are arguments of each call, and describes matrices to TMA anew.

Errors: KernelError if there is no driver, or if it refuses a launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from moe_comm.gpu.launch import Driver
from moe_comm.runtime.native_core import native

if TYPE_CHECKING:
    from moe_comm import _C

AddTo = Callable[["_C.GpuRecord", Sequence[int], Sequence[Any]], bool]
"""Adds a launch with this grid and these arguments to a record, or returns False if native code cannot repeat it.
Arguments are numbers, and ``BufferIndex`` for tensors."""
ENCODE = "cuTensorMapEncodeTiled"


class BufferIndex(int):
    """The number of a buffer of a record, in place of a tensor."""


@cache
def _driver(index: int) -> tuple[dict[str, int], int]:
    """Return the addresses of driver functions, and the primary context of a device, which torch and Triton use."""
    driver, context = Driver(), ctypes.c_void_p()
    driver.init(0)
    driver.retain_context(ctypes.byref(context), index)
    return driver.addresses(ENCODE), context.value or 0


def new_record(index: int, buffers: Sequence[tuple[int, int]]) -> _C.GpuRecord:
    """Return an empty record for a device.

    Args:
        index: of the CUDA device.
        buffers: for each buffer, the number of a base, whose address ``run`` is given, and an offset in bytes.
    """
    calls, context = _driver(index)
    record: _C.GpuRecord = native().GpuRecord(calls, context, buffers)
    return record
