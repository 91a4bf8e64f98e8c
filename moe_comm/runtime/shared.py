"""The native core, memory whose pages stay mapped, and the name of this host."""

from __future__ import annotations

import hashlib
import os
import socket
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_comm.errors import MissingDependency

if TYPE_CHECKING:
    from moe_comm import _C

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def native() -> ModuleType:
    """The native core.

    Raises:
        MissingDependency: it was not built.
    """
    try:
        from moe_comm import _C
    except ImportError as error:
        raise MissingDependency(
            f"the native core moe_comm._C is not built ({error}); run `pip install -e .`"
        ) from error
    return _C


@lru_cache(maxsize=1)
def native_is_built() -> bool:
    """Whether this process has the native core."""
    try:
        native()
    except MissingDependency:
        return False
    return True


@lru_cache(maxsize=1)
def private_heap() -> _C.Heap:
    """This process's heap of private memory, for dispatch without peers. Pages stay mapped and warm: faulting in
    fresh ones costs more than the copies into them."""
    heap: _C.Heap = native().Heap("")
    return heap


def block(heap: _C.Heap, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised [rows, width] tensor in ``heap``; its memory goes back when the tensor dies, on any thread."""
    if rows == 0 or width == 0:
        return torch.empty(rows, width, dtype=dtype)
    return torch.from_dlpack(heap.tensor(rows, width, DTYPE_CODES[dtype]))


WARM_BYTES = 128 << 10
"""malloc keeps smaller tensors' pages mapped by itself (its mmap threshold)."""


def warm(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised [rows, width] CPU tensor; a large one from the private heap, whose pages are already mapped."""
    size = rows * width * dtype.itemsize
    if size < WARM_BYTES:
        return torch.empty(rows, width, dtype=dtype)
    if dtype in DTYPE_CODES:
        return block(private_heap(), rows, width, dtype)
    words = block(private_heap(), 1, -(-size // 4), torch.float32).view(-1).view(torch.uint8)
    return words[:size].view(dtype).view(rows, width)


def host_key() -> str:
    """Equal for two processes exactly when they see the same /dev/shm on the same kernel and name pids alike."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(os.stat("/dev/shm").st_dev))
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError as error:
        parts.append(f"unknown: {error.errno}")
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def host_word() -> int:
    """``host_key`` as a number that fits an int64."""
    return int(host_key(), 16) >> 2
