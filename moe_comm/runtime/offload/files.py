"""Stores of chunks at byte offsets: the file of a rank, and host memory.

The file has no name, so nothing remains when the process ends in any way. All of its blocks are allocated when it is
created, so a full disk is found before training. Reads and writes bypass the page cache, which would use memory beyond
the budget.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_comm.errors import CorruptFile, StoreFull, StoreIOError
from moe_comm.runtime.safe_files import file_system, open_unnamed

BLOCK = 4096
"""Alignment of chunks in bytes, as direct I/O requires."""

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are in memory."""


def aligned_bytes(nbytes: int, device: torch.device) -> Tensor:
    """Return uninitialized memory as uint8 [nbytes], at a multiple of ``BLOCK`` bytes on the CPU.

    Threads that are not in the caller's inference mode can write to it.

    Raises:
        StoreFull: it cannot be allocated.
    """
    with torch.inference_mode(False):
        try:
            if device.type != "cpu":
                return torch.empty(nbytes, dtype=torch.uint8, device=device)
            raw = torch.empty(nbytes + BLOCK, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_initialized())
        except RuntimeError as error:
            raise StoreFull(f"{nbytes} bytes of memory for offloaded state cannot be allocated: {error}") from None
        start = -raw.data_ptr() % BLOCK
        return raw[start : start + nbytes]


class Backing(ABC):
    """Reads and writes chunks at byte offsets, from several threads. Raises ``StoreIOError``."""

    @abstractmethod
    def read(self, offset: int, target: Tensor) -> None:
        """Fill ``target``, uint8 [N]."""

    @abstractmethod
    def write(self, offset: int, source: Tensor) -> None:
        """Write ``source``, uint8 [N]."""

    @abstractmethod
    def extend(self, nbytes: int) -> None:
        """Add ``nbytes`` bytes at the end. Chunks do not cross from one extension to the next. Raises ``StoreFull``."""

    @abstractmethod
    def close(self) -> None:
        """Release memory or the file."""


class HostMemory(Backing):
    """Chunks in the host's memory, page-locked, for tensors on a GPU."""

    def __init__(self, nbytes: int) -> None:
        self._starts: list[int] = []
        self._extents: list[Tensor] = []
        self._total = 0
        self.extend(nbytes)

    def extend(self, nbytes: int) -> None:
        self._extents.append(aligned_bytes(nbytes, torch.device("cpu")))
        self._starts.append(self._total)
        self._total += nbytes

    def read(self, offset: int, target: Tensor) -> None:
        target.copy_(self._chunk(offset, target.numel()), non_blocking=True)

    def write(self, offset: int, source: Tensor) -> None:
        self._chunk(offset, source.numel()).copy_(source, non_blocking=True)

    def close(self) -> None:
        self._extents.clear()

    def _chunk(self, offset: int, nbytes: int) -> Tensor:
        number = bisect_right(self._starts, offset) - 1
        start = offset - self._starts[number]
        return self._extents[number][start : start + nbytes]


class LocalFile(Backing):
    """A file without a name in ``folder``, of ``nbytes`` bytes.

    Args:
        checksums: verify the CRC-32 of chunks that are read.

    Raises:
        StoreFull: the disk has not enough space.
        StoreIOError: the file cannot be created, or its file system is in memory.
    """

    def __init__(self, folder: Path, nbytes: int, checksums: bool) -> None:
        self._folder = folder
        self._sums: dict[int, int] | None = {} if checksums else None
        self._bounce = threading.local()
        self._total = 0
        try:
            kind = file_system(folder)
            if kind in IN_MEMORY:
                raise StoreIOError(f"offload.path {str(folder)!r} is on {kind}, which is memory: choose a local disk")
            self._file, self._direct = open_unnamed(folder)
        except OSError as error:
            raise StoreIOError(f"cannot create a file in offload.path {str(folder)!r}: {error.strerror}") from None
        try:
            self.extend(nbytes)
        except BaseException:
            self.close()
            raise

    def extend(self, nbytes: int) -> None:
        try:
            if nbytes:
                os.posix_fallocate(self._file, self._total, nbytes)
        except OSError as error:
            folder = str(self._folder)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = os.statvfs(self._folder)
                raise StoreFull(
                    f"the offloaded state of this rank needs {self._total + nbytes} bytes in {folder!r}, which has "
                    f"{free.f_bavail * free.f_frsize} free: free space, or choose another offload.path"
                ) from None
            raise StoreIOError(f"cannot extend a file in offload.path {folder!r}: {error.strerror}") from None
        self._total += nbytes

    def read(self, offset: int, target: Tensor) -> None:
        memory = self._in_memory(target)
        view = _view(memory)
        done = 0
        while done < len(view):
            try:
                count = read_block(self._file, view[done:], offset + done)
            except OSError as error:
                raise self._error("read", offset, error) from None
            if not count:
                raise CorruptFile(f"the file of offloaded state in {self._folder} ends before byte {offset + done}")
            done += count
        if self._sums is not None and self._sums.get(offset) != zlib.crc32(view):
            raise CorruptFile(f"offloaded state at byte {offset} of the file in {self._folder} fails its checksum")
        self._forget(offset, len(view))
        if memory is not target:
            target.copy_(memory, non_blocking=True)

    def write(self, offset: int, source: Tensor) -> None:
        memory = self._in_memory(source)
        if memory is not source:
            memory.copy_(source)
        view = _view(memory)
        if self._sums is not None:
            self._sums[offset] = zlib.crc32(view)
        done = 0
        try:
            while done < len(view):
                done += write_block(self._file, view[done:], offset + done)
            if not self._direct:
                os.fdatasync(self._file)
        except OSError as error:
            raise self._error("write", offset, error) from None
        self._forget(offset, len(view))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _in_memory(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, or page-locked memory of this thread of the same size for a tensor on a GPU."""
        if tensor.device.type == "cpu":
            return tensor
        held: Tensor | None = getattr(self._bounce, "memory", None)
        if held is None or held.numel() < tensor.numel():
            held = self._bounce.memory = aligned_bytes(tensor.numel(), torch.device("cpu"))
        return held[: tensor.numel()]

    def _forget(self, offset: int, nbytes: int) -> None:
        """Drop a range from the page cache, if the file system does not support direct I/O."""
        if not self._direct:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._file, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _error(self, what: str, offset: int, error: OSError) -> StoreIOError:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        return StoreIOError(
            f"cannot {what} offloaded state at byte {offset} of the file in {self._folder}: {name}, {error.strerror}"
        )


def _view(memory: Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)


def read_block(file: int, view: memoryview, offset: int) -> int:
    """Read into ``view``; return the number of bytes. All reads are made here, so that faults can be injected."""
    return os.preadv(file, [view], offset)


def write_block(file: int, view: memoryview, offset: int) -> int:
    """Write ``view``; return the number of bytes. All writes are made here, so that faults can be injected."""
    return os.pwritev(file, [view], offset)
