"""A heap over this rank's block: where rows stand that peers write to or read from.

    block   [ control | rows of a dispatch | free | output of experts | free ... ]

Its memory is one block of fixed size that all ranks have mapped, so places are found here and not by the device's
allocator. A place belongs to the storage of the tensor that was made over it and comes back when that dies, whatever
views and detached tensors there were of it.

Streams: a place is used in the order of the stream that was current when it was allocated. It goes to another stream,
or is used on one (``record``), only with an event between: it is given out again once those have passed. A place that
dies on the stream it is wanted on is given out at once, as with torch's own allocator. What is free has been used up to
the last stream that took something; when another takes something, it waits for that one.
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
from moe_comm.gpu.blocks import ALIGN, up
from moe_comm.gpu.launch import matrix_of_memory

_DLPACK = {
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
    torch.float16: (2, 16),
    torch.float64: (2, 64),
    torch.uint8: (1, 8),
    torch.int64: (0, 64),
}
"""Kinds and bits of elements, by which DLPack names them."""


class _Freed(NamedTuple):
    """Bytes of the block whose last tensor has died; events: on the other streams that used them."""

    first: int
    size: int
    streams: set[Any]
    events: tuple[torch.cuda.Event, ...] = ()


class Place:
    """Bytes of the block; torch keeps it for as long as a storage over it lives.

    first: its offset in the block; size: in bytes.
    """

    __slots__ = ("_block", "_dead", "_streams", "first", "size")

    def __init__(self, block: Tensor, first: int, size: int, dead: deque[_Freed], streams: set[Any]) -> None:
        self.first, self.size = first, size
        self._block, self._dead, self._streams = block, dead, streams

    def __del__(self) -> None:
        # On any thread, even in the middle of an allocation: only written down.
        self._dead.append(_Freed(self.first, self.size, self._streams))

    def matrix(self, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """[rows, columns] dense, from ``offset`` bytes behind its start on; a storage of its own."""
        device = self._block.device
        if not rows or not columns:
            return torch.empty(rows, columns, dtype=dtype, device=device)
        on = (2, device.index) if device.type == "cuda" else (1, 0)
        at = self._block.data_ptr() + self.first + offset
        made: Tensor = torch.from_dlpack(matrix_of_memory(at, rows, columns, *_DLPACK[dtype], *on, self))
        return made


class Heap:
    """Places in ``block``, a tensor of bytes, from ``first`` on. Not to be used by two threads at once; tensors may die
    on any."""

    def __init__(self, block: Tensor, first: int) -> None:
        self.first, self.end = up(first), block.numel() // ALIGN * ALIGN
        self._block = block
        self._base = block.data_ptr()
        self._free: list[tuple[int, int]] = [(self.first, self.end)]
        """(first, end) of what is free, in order, none touching another."""
        self._graphs: list[Place] = []
        """What CUDA graphs use whenever they run; it does not come back."""
        self._dead: deque[_Freed] = deque()
        self._waiting: list[_Freed] = []
        self._streams: dict[int, set[Any]] = {}
        """Of the places in use, by their first byte."""
        self._last: Any = None
        """The stream in whose order what is free may be used."""

    @property
    def device(self) -> torch.device:
        return self._block.device

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.end - self.first

    @property
    def used(self) -> int:
        """Bytes that are not free, with those that still wait for a stream."""
        self._collect(None, capturing(self.device))
        return self.size - sum(end - first for first, end in self._free)

    def room(self) -> int:
        """Bytes of the largest place that could be had now."""
        self._collect(_stream(self.device), capturing(self.device))
        return self._largest()

    def place(self, num_bytes: int) -> Place:
        """``num_bytes`` uninitialised bytes, at a multiple of 256; they come back when nothing has the place any more.

        Raises:
            HeapError: no room. This rank's own error: peers must be told.
        """
        size = max(up(num_bytes), ALIGN)
        stream, in_graph = _stream(self.device), capturing(self.device)
        self._collect(stream, in_graph)
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
                f"free place has {self._largest()}. Raise PeerToPeerOptions.heap_bytes, alike on every rank"
            )
        streams = self._streams[first] = {stream}
        found = Place(self._block, first, size, self._dead, streams)
        if in_graph:
            self._graphs.append(found)
        return found

    def allocate(self, num_bytes: int) -> Tensor:
        """``num_bytes`` uninitialised bytes; as ``place``."""
        return self.place(num_bytes).matrix(0, 1, num_bytes, torch.uint8).view(-1)

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, width] uninitialised and dense; as ``place``."""
        return self.place(num_rows * width * dtype.itemsize).matrix(0, num_rows, width, dtype)

    def owns(self, x: Tensor) -> bool:
        """Whether ``x`` has memory of this heap."""
        return x.device == self.device and self._base + self.first <= x.data_ptr() < self._base + self.end

    def offset(self, x: Tensor) -> int:
        """Bytes from the start of the block to the start of ``x``, which this heap owns."""
        return x.data_ptr() - self._base

    def record(self, x: Tensor, stream: torch.cuda.Stream) -> None:
        """``x``, of this heap, is used on ``stream``, too: its place is not given out before what is queued there now
        and until it dies has run."""
        first = x.untyped_storage().data_ptr() - self._base
        if first in self._streams:
            self._streams[first].add(stream)

    def _take(self, size: int) -> int | None:
        """The first place that fits, from its front: places that live shortly stay together."""
        for i, (first, end) in enumerate(self._free):
            if end - first >= size:
                self._free[i : i + 1] = [(first + size, end)] if end - first > size else []
                return first
        return None

    def _largest(self) -> int:
        return max((end - first for first, end in self._free), default=0)

    def _collect(self, stream: Any, in_graph: bool) -> None:
        """Take back what has died, as far as ``stream`` may have it at once or the streams of its use have passed.

        stream: that may now have all that is free; None: as it is. in_graph: whether it is captured.
        """
        if stream is not None and stream != self._last and not in_graph:
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last = stream
        while self._dead:
            freed = self._dead.popleft()
            self._streams.pop(freed.first, None)
            if (others := freed.streams - {stream}) and not in_graph:
                self._waiting.append(_Freed(freed.first, freed.size, freed.streams, _events(others)))
            else:
                self._give(freed)
        if in_graph or not self._waiting:
            return
        waiting = []
        for freed in self._waiting:
            if all(event.query() for event in freed.events):
                self._give(freed)
            else:
                waiting.append(freed)
        self._waiting = waiting

    def _give(self, freed: _Freed) -> None:
        first, end = freed.first, freed.first + freed.size
        i = bisect_left(self._free, (first, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == first:
            first = self._free.pop(i - 1)[0]
        insort(self._free, (first, end))


def heap_bytes(rows: int, width: int, dtype: torch.dtype, blocks: int = 4) -> int:
    """What a heap needs for ``blocks`` blocks of ``rows`` rows at a time, each a dispatch's rows, an expert's output or
    the gradient of one."""
    return blocks * up(rows * width * dtype.itemsize)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Of a GPU with an index. ``torch.cuda.current_stream`` makes an object, which takes microseconds; this does once
    for each stream."""
    return _stream_object(device.index, torch._C._cuda_getCurrentRawStream(device.index))


@cache
def _stream_object(index: int, raw_stream: int) -> torch.cuda.Stream:
    """That of ``raw_stream``, which is the current one of this GPU."""
    return torch.cuda.current_stream(index)


def _stream(device: torch.device) -> Any:
    return current_stream(device) if device.type == "cuda" else None


def capturing(device: torch.device) -> bool:
    """Whether the current stream of ``device``, which need not be the current one, is captured in a CUDA graph."""
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
