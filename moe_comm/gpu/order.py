"""The order of kernels that wait for other ranks, if a program launches them on several streams."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from moe_comm.gpu.heap import capturing


class StreamOrder:
    """Runs the kernels of a communicator that wait for other ranks in the order of their launches, on any stream.

    On two streams, one rank could run kernel A before B, and another rank B before A. If each fills its GPU, both ranks
    wait forever. The operations of ``peer_to_peer`` and the Triton operators of a communicator share one object.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[torch.cuda.Stream, ...] = ()

    def enter(self) -> None:
        """Let the current stream wait for those of the last operation. Call it before an operation's first kernel.

        Nothing waits during graph capture, where the graph has its own order.
        """
        if self._device.type != "cuda" or capturing(self._device):
            return
        stream = torch.cuda.current_stream(self._device)
        for last in self._last:
            if last != stream:
                stream.wait_stream(last)
        self._last = (stream,)

    def join(self) -> None:
        """Let the next operation also wait for the current stream, which runs kernels of the last operation."""
        if self._device.type != "cuda" or capturing(self._device):
            return
        stream = torch.cuda.current_stream(self._device)
        if stream not in self._last:
            self._last = (*self._last, stream)


Keep = Callable[[Hashable, Callable[[], StreamOrder]], StreamOrder]


def stream_order(keep: Keep | None, device: torch.device) -> StreamOrder:
    """Return the order of a communicator's kernels on ``device``.

    Args:
        keep: ``Communicator.keep``; None for a rank without peers.
    """
    return StreamOrder(device) if keep is None else keep(("stream order", device), lambda: StreamOrder(device))
