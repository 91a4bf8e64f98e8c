"""The CUDA stream of ``peer_to_peer`` operations: the caller's, or a separate one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_comm.gpu.heap import Heap


class OperationStream:
    """The stream of a dispatcher's kernels: the caller's, or with ``own`` a separate one (on GPUs).

    event: recorded after the last operation on a separate stream.
    is_separate: whether kernels run on a separate stream. If not, no other method needs to be called.
    caller_waits: whether the caller's stream waits for each operation.
    """

    def __init__(self, device: torch.device, heap: Heap, own: bool) -> None:
        self.event: torch.cuda.Event | None = None
        self.caller_waits = True
        self._device, self._heap, self._own = device, heap, own
        self._stream: torch.cuda.Stream | None = None
        self._caller: torch.cuda.Stream | None = None
        self.is_separate = own and device.type == "cuda"

    def use_side_stream(self, side: bool) -> None:
        """Run later operations on a separate stream even without ``own``, and do not make the caller's stream
        wait."""
        self.is_separate = (side or self._own) and self._device.type == "cuda"
        self.caller_waits = not side

    def enter(self, used: tuple[Tensor | None, ...]) -> None:
        """Make the stream current, after the caller's queued work. Keep ``used`` alive until the operation ends."""
        if not self.is_separate:
            return
        if self._stream is None:
            # Peers wait for these kernels, so their blocks start before those of the caller's kernels.
            self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(self._caller)
        self._record(self._stream, *used)
        torch.cuda.set_stream(self._stream)

    def leave(self, failed: bool) -> None:
        """Make the caller's stream current again."""
        if self._stream is None or self._caller is None:
            return
        if not failed:
            self.event = torch.cuda.Event()
            self.event.record(self._stream)
        torch.cuda.set_stream(self._caller)
        if self.caller_waits:
            self._caller.wait_stream(self._stream)
        self._caller = None

    @contextmanager
    def on_callers(self) -> Iterator[None]:
        """Make the caller's stream current in a block between ``enter`` and ``leave``."""
        if self._stream is None or self._caller is None:
            yield
            return
        torch.cuda.set_stream(self._caller)
        try:
            yield
        finally:
            torch.cuda.set_stream(self._stream)

    def wait(self) -> None:
        """Make the current stream wait for the operations on the separate stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def use_by_caller(self, *results: Tensor | None) -> None:
        """Record that the caller's stream uses ``results``. Call it between ``enter`` and ``leave``."""
        if self._caller is not None:
            self._record(self._caller, *results)

    def _record(self, stream: torch.cuda.Stream, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                record_stream(self._heap, tensor, stream)


def record_stream(heap: Heap, x: Tensor, stream: torch.cuda.Stream) -> None:
    """Record that ``stream`` uses ``x``, which belongs to ``heap`` or to torch's allocator."""
    if heap.owns(x):
        heap.record(x, stream)
    else:
        x.record_stream(stream)
