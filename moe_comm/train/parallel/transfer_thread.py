"""A thread for collectives that run during the forward and backward passes of the main thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.errors import MoeCommError
from moe_comm.runtime.events import COMMUNICATION

Collective = Callable[[Tensor], Tensor]
CLOSE_S = 1.0
"""Seconds that ``close`` waits for a collective that is still running after an error."""
CLOSED = "the thread that transfers gradients and weights is closed; the training state must not be used after close"


@dataclass(frozen=True)
class _Call:
    collective: Collective
    x: Tensor
    ready: torch.cuda.Event | None
    future: Future[tuple[Tensor, torch.cuda.Event | None]]


@dataclass(frozen=True)
class Transfer:
    """A collective in flight.

    Attributes:
        future: the tensor and, on a GPU, the event after which it is complete; or the exception of the collective.
    """

    future: Future[tuple[Tensor, torch.cuda.Event | None]]

    def wait(self) -> Tensor:
        """Return the tensor; raise the error of the collective."""
        result, complete = self.future.result()
        if complete is not None:
            current = torch.cuda.current_stream(result.device)
            current.wait_event(complete)
            result.record_stream(current)
        return result


class TransferThread:
    """Run collectives one after the other, in the order of ``submit``, in a thread that starts with the first one.

    All ranks of a group must submit the same collectives of the group in the same order. No other thread may use these
    groups. The time in the thread does not count as communication; the time that the main thread waits does.

    On a GPU, the collectives run on a stream of their own, which waits for the work that was queued before ``submit``.

    Args:
        device: device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, collective: Collective, x: Tensor) -> Transfer:
        """Start ``collective`` of ``x``.

        Raises:
            MoeCommError: the thread is closed.
        """
        if self._closed:
            raise MoeCommError(CLOSED)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="moe_comm transfers", daemon=True)
            self._thread.start()
        ready = None if self._stream is None else torch.cuda.current_stream(x.device).record_event()
        call = _Call(collective, x, ready, Future())
        self._calls.put(call)
        return Transfer(call.future)

    def close(self) -> bool:
        """End the thread. Collectives that have not started are dropped: waiting for them raises. Not collective.

        Returns:
            Whether the thread has ended. It has not if a collective still waits for a peer.
        """
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while (call := self._calls.get_nowait()) is not None:
                call.future.set_exception(MoeCommError(CLOSED))
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        COMMUNICATION.ignore_thread()
        while (call := self._calls.get()) is not None:
            self._transfer(call)
            del call  # its tensors, while the thread waits for the next one

    def _transfer(self, call: _Call) -> None:
        try:
            with torch.no_grad(), self._on_stream(call.ready, call.x):
                result = call.collective(call.x)
                complete = None if self._stream is None else self._stream.record_event()
        except BaseException as error:
            call.future.set_exception(error)
        else:
            call.future.set_result((result, complete))

    def _on_stream(self, ready: torch.cuda.Event | None, x: Tensor) -> contextlib.AbstractContextManager[object]:
        if self._stream is None or ready is None:
            return contextlib.nullcontext()
        self._stream.wait_event(ready)
        x.record_stream(self._stream)
        return torch.cuda.stream(self._stream)
