"""A heap in this rank's memory block, for rows that peers write or read.

    block   [ control | rows of a dispatch | free | output of experts | free ... ]

All ranks map the block, which has a fixed size, so this heap allocates from it instead of the device's allocator. An
allocation (``HeapBlock``) belongs to the storage of the tensor created from it. It is freed when that storage is freed,
including all views and detached tensors.

Streams: an allocation is used on the stream that was current when it was made, and on streams that were recorded
(``record``). After it is freed, it is reused on the same stream immediately, as by torch's allocator. It is reused on
other streams after events on the streams of its use have completed. Free memory belongs to the last stream that
allocated. Another stream that allocates waits for that stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_comm.errors import HeapError
from moe_comm.gpu.blocks import ALIGN, round_up
from moe_comm.runtime.native_core import native

_DLPACK = {
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
    torch.float16: (2, 16),
    torch.float64: (2, 64),
    torch.uint8: (1, 8),
    torch.int64: (0, 64),
}
"""DLPack codes and bits of dtypes."""


class _Freed(NamedTuple):
    """A freed range of the block that other streams may use. events: recorded on these streams."""

    first: int
    size: int
    streams: set[Any]
    events: tuple[torch.cuda.Event, ...]


class _Memory:
    """The block of a heap, and the (first byte, size, streams) of allocations that were freed in it."""

    __slots__ = ("base", "block", "dead", "dlpack_device", "make_tensor")

    def __init__(self, block: Tensor) -> None:
        self.block, self.base = block, block.data_ptr()
        self.dlpack_device = (2, block.device.index) if block.device.type == "cuda" else (1, 0)
        self.dead: deque[tuple[int, int, set[Any]]] = deque()
        self.make_tensor = native().p2p_tensor


class HeapBlock:
    """An allocated range of the block, at offset ``first``. torch keeps this object while a storage over it exists."""

    __slots__ = ("_memory", "_streams", "first", "size")

    def __init__(self, memory: _Memory, first: int, size: int, streams: set[Any]) -> None:
        self._memory, self.first, self.size, self._streams = memory, first, size, streams

    def __del__(self) -> None:
        # This may run on any thread and during an allocation, so it only records the range.
        if self.size:
            self._memory.dead.append((self.first, self.size, self._streams))

    def matrix(self, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return a dense [rows, columns] tensor with its own storage, starting at byte ``offset``."""
        memory = self._memory
        if not rows or not columns:
            return torch.empty(rows, columns, dtype=dtype, device=memory.block.device)
        address = memory.base + self.first + offset
        # The tensor keeps ``self`` alive.
        tensor = memory.make_tensor(address, rows, columns, *_DLPACK[dtype], *memory.dlpack_device, self)
        return torch.from_dlpack(tensor)


class Heap:
    """Allocates from ``block``, a tensor of bytes, starting at byte ``first``.

    Only one thread may allocate at a time. Tensors may be freed on any thread.
    """

    def __init__(self, block: Tensor, first: int) -> None:
        self.first, self.end = round_up(first), block.numel() // ALIGN * ALIGN
        self.device = block.device
        self._memory = _Memory(block)
        self._base = self._memory.base
        self._free: list[tuple[int, int]] = [(self.first, self.end)]
        """(first, end) of free ranges, sorted and merged."""
        self._graphs: list[HeapBlock] = []
        """Allocations of CUDA graphs, which are never freed."""
        self._waiting: list[_Freed] = []
        """Allocations that other streams may still use."""
        self._streams: dict[int, set[Any]] = {}
        """Streams that use each allocation, by its first byte."""
        self._last: Any = None
        """The stream that may use free memory without waiting."""

    @property
    def size(self) -> int:
        """Size of the heap in bytes."""
        return self.end - self.first

    @property
    def used(self) -> int:
        """Bytes that are allocated or wait for a stream."""
        self._collect(None, capturing(self.device))
        return self.size - sum(end - first for first, end in self._free)

    def reserve(self) -> HeapBlock | None:
        """Allocate the largest free range, for rows whose number is not known yet. ``keep`` frees what they do not use.

        The current stream waits for other streams that still use freed memory. Not during the capture of a graph.

        Returns:
            The block; None if nothing is free.
        """
        stream = _stream(self.device)
        self._collect(stream, capturing(self.device))
        for freed in self._waiting:  # let the stream wait instead of the CPU
            for event in freed.events:
                stream.wait_event(event)
            self._release(freed.first, freed.size)
        self._waiting = []
        at, size = 0, 0
        for i, (first, end) in enumerate(self._free):
            if end - first > size:
                at, size = i, end - first
        if not size:
            return None
        first, _ = self._free.pop(at)
        streams = self._streams[first] = {stream}
        return HeapBlock(self._memory, first, size, streams)

    def shrink(self, block: HeapBlock, num_bytes: int) -> None:
        """Keep the first ``num_bytes`` of a block from ``reserve`` that no tensor uses yet, and free the rest."""
        kept = (num_bytes + ALIGN - 1) // ALIGN * ALIGN
        if kept < block.size:
            self._release(block.first + kept, block.size - kept)
            block.size = kept
        if not kept:
            del self._streams[block.first]

    def keep(self, block: HeapBlock, *ranges: tuple[int, int]) -> list[HeapBlock]:
        """Replace ``block`` by blocks for ``ranges``, and free the rest.

        Args:
            block: from ``reserve``. No tensor may use it yet.
            ranges: (offset in the block, bytes), in ascending order. Offsets are multiples of ``ALIGN``.
        """
        streams, start, end = self._streams.pop(block.first), block.first, block.first + block.size
        block.size = 0
        kept = []
        for offset, num_bytes in ranges:
            first = block.first + offset
            if first > start:
                self._release(start, first - start)
            used = self._streams[first] = set(streams)
            kept.append(HeapBlock(self._memory, first, round_up(num_bytes), used))
            start = first + kept[-1].size
        if end > start:
            self._release(start, end - start)
        return kept

    def block(self, num_bytes: int) -> HeapBlock:
        """Allocate ``num_bytes`` uninitialised bytes, aligned to 256 bytes.

        HeapError: there is no room. Only this rank raises; the caller must report it to its peers.
        """
        stream, in_graph = _stream(self.device), capturing(self.device)
        self._collect(stream, in_graph)
        return self._block(num_bytes, stream, in_graph)

    def _block(self, num_bytes: int, stream: Any, in_graph: bool) -> HeapBlock:
        """Run ``block`` after freed memory has been collected."""
        size = (num_bytes + ALIGN - 1) // ALIGN * ALIGN or ALIGN
        first = self._take(size)
        if first is None and self._waiting:
            for freed in self._waiting:
                for event in freed.events:
                    event.synchronize()
            self._collect(stream, in_graph)
            first = self._take(size)
        if first is None:
            raise HeapError(
                f"no room for {num_bytes} bytes in the heap of {self.size}: {self.used} are in use and the largest "
                f"free block has {self._largest()}. Increase PeerToPeerOptions.heap_bytes on every rank"
            )
        streams = self._streams[first] = {stream}
        block = HeapBlock(self._memory, first, size, streams)
        if in_graph:
            self._graphs.append(block)
        return block

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate ``num_bytes`` uninitialised bytes as a tensor; see ``block``."""
        return self.block(num_bytes).matrix(0, 1, num_bytes, torch.uint8).view(-1)

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Allocate a dense, uninitialised tensor [num_rows, width]; see ``block``."""
        return self.block(num_rows * width * dtype.itemsize).matrix(0, num_rows, width, dtype)

    def matrices(self, num_rows: int, *shapes: tuple[int, torch.dtype]) -> list[Tensor]:
        """Allocate ``rows`` of each width and dtype, with one look at streams and freed memory."""
        stream, in_graph = _stream(self.device), capturing(self.device)
        self._collect(stream, in_graph)
        memory, found = self._memory, []
        for width, dtype in shapes:
            num_bytes = num_rows * width * dtype.itemsize
            size, taken = (num_bytes + ALIGN - 1) // ALIGN * ALIGN, False
            for i, (first, end) in enumerate(self._free):  # as ``_take``: this function makes few calls
                if size and not in_graph and end - first >= size:
                    self._free[i : i + 1] = [(first + size, end)] if end - first > size else []
                    taken = True
                    break
            if not taken:
                found.append(self._block(num_bytes, stream, in_graph).matrix(0, num_rows, width, dtype))
                continue
            streams = self._streams[first] = {stream}
            block = HeapBlock(memory, first, size, streams)
            codes = *_DLPACK[dtype], *memory.dlpack_device
            found.append(torch.from_dlpack(memory.make_tensor(memory.base + first, num_rows, width, *codes, block)))
        return found

    def address(self, offset: int) -> int:
        """Return the address of byte ``offset`` of the block."""
        return self._base + offset

    def owns(self, x: Tensor) -> bool:
        """Return whether the memory of ``x`` belongs to this heap."""
        return x.device == self.device and self._base + self.first <= x.data_ptr() < self._base + self.end

    def offset(self, x: Tensor) -> int:
        """Return the offset of ``x`` from the start of the block, in bytes. The heap must own ``x``."""
        return x.data_ptr() - self._base

    def record(self, x: Tensor, stream: torch.cuda.Stream) -> None:
        """Record that ``stream`` also uses ``x``: its memory is not reused before work queued there has run."""
        first = x.untyped_storage().data_ptr() - self._base
        if first in self._streams:
            self._streams[first].add(stream)

    def _take(self, size: int) -> int | None:
        """Return the first range that fits (first fit keeps short-lived allocations together), or None."""
        for i, (first, end) in enumerate(self._free):
            if end - first >= size:
                self._free[i : i + 1] = [(first + size, end)] if end - first > size else []
                return first
        return None

    def _largest(self) -> int:
        return max((end - first for first, end in self._free), default=0)

    def _collect(self, stream: Any, in_graph: bool) -> None:
        """Free dead allocations whose streams allow reuse on ``stream``.

        Args:
            stream: the stream that will allocate; None does not change the stream of free memory.
        """
        if stream is not None and stream != self._last and not in_graph:
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last = stream
        dead = self._memory.dead
        while dead:
            first, size, streams = dead.popleft()
            self._streams.pop(first, None)
            if (others := streams - {stream}) and not in_graph:
                self._waiting.append(_Freed(first, size, streams, _events(others)))
            else:
                self._release(first, size)
        if in_graph or not self._waiting:
            return
        waiting = []
        for freed in self._waiting:
            if all(event.query() for event in freed.events):
                self._release(freed.first, freed.size)
            else:
                waiting.append(freed)
        self._waiting = waiting

    def _release(self, first: int, size: int) -> None:
        end = first + size
        i = bisect_left(self._free, (first, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == first:
            first = self._free.pop(i - 1)[0]
        insort(self._free, (first, end))


def heap_bytes(rows: int, width: int, dtype: torch.dtype, blocks: int = 4) -> int:
    """Return the heap size for ``blocks`` blocks of ``rows`` rows: dispatched rows, expert outputs, or gradients."""
    return blocks * round_up(rows * width * dtype.itemsize)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a GPU, whose device must have an index.

    ``torch.cuda.current_stream`` creates an object, which takes microseconds. This function caches one per stream.
    """
    return _stream_object(device.index, torch._C._cuda_getCurrentRawStream(device.index))


@cache
def _stream_object(index: int, raw_stream: int) -> torch.cuda.Stream:
    """Return the stream object of ``raw_stream``, which must be the current stream of this GPU."""
    return torch.cuda.current_stream(index)


def _stream(device: torch.device) -> Any:
    return current_stream(device) if device.type == "cuda" else None


def capturing(device: torch.device) -> bool:
    """Return whether the current stream of ``device`` is captured in a CUDA graph."""
    if device.type != "cuda":
        return False
    if device.index is None or device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _events(streams: Iterable[Any]) -> tuple[torch.cuda.Event, ...]:
    events = []
    for stream in streams:
        event = torch.cuda.Event()
        event.record(stream)
        events.append(event)
    return tuple(events)
