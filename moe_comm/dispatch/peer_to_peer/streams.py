"""The stream that operations of ``peer_to_peer`` run on: the caller's, or one of their own beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.gpu.heap import Heap


class Lane:
    """Where a dispatcher's kernels are queued.

    event: of the last operation, if the stream is its own. join: whether the caller's stream waits for it.

    Args:
        own: run on a stream of one's own; without meaning on the CPU.
    """

    def __init__(self, device: torch.device, heap: Heap, own: bool) -> None:
        self.event: torch.cuda.Event | None = None
        self.join = True
        self._device, self._heap = device, heap
        self._stream = torch.cuda.Stream(device) if own and device.type == "cuda" else None
        self._caller: torch.cuda.Stream | None = None

    def enter(self, used: tuple[Tensor | None, ...]) -> None:
        """Go on behind what the caller has queued so far; ``used`` lives until the operation is over."""
        if self._stream is None:
            return
        self._caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(self._caller)
        self._keep(self._stream, *used)
        torch.cuda.set_stream(self._stream)

    def leave(self, failed: bool) -> None:
        """Back to the caller's stream."""
        if self._stream is None or self._caller is None:
            return
        if not failed:
            self.event = torch.cuda.Event()
            self.event.record(self._stream)
        torch.cuda.set_stream(self._caller)
        if self.join:
            self._caller.wait_stream(self._stream)

    def hand_over(self, *made: Tensor | None) -> None:
        """Inside ``entered``: the caller's stream will use what was made here."""
        if self._caller is not None:
            self._keep(self._caller, *made)

    def _keep(self, stream: torch.cuda.Stream, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                record_stream(self._heap, tensor, stream)


def record_stream(heap: Heap, x: Tensor, stream: torch.cuda.Stream) -> None:
    """``x``, of ``heap`` or of torch's allocator, is used on ``stream``, too."""
    if heap.owns(x):
        heap.record(x, stream)
    else:
        x.record_stream(stream)
