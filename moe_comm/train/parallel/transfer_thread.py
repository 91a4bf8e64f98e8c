"""A thread for collectives that run beside the forward and backward passes of the main thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from moe_comm.runtime.events import COMMUNICATION

Collective = Callable[[Tensor], Tensor]
CLOSE_S = 1.0
"""Seconds that ``close`` waits for a collective that is still running after an error."""


class TransferThread:
    """Run collectives one after the other, in the order of ``submit``, in a thread that starts with the first one.

    All ranks of a group must submit the same collectives of the group in the same order. No other thread may use these
    groups. The time in the thread does not count as communication; the time that the main thread waits does.

    On a GPU, the collectives run on a stream of their own, which waits for the work that was queued before ``submit``.

    Args:
        device: device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, collective: Collective, x: Tensor) -> Future[Tensor]:
        """Start ``collective`` of ``x``. The result of the future is its tensor, or its exception."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="moe_comm transfers", daemon=True)
            self._thread.start()
        future: Future[Tensor] = Future()
        ready = None if self._stream is None else torch.cuda.current_stream(x.device).record_event()

        def call() -> None:
            try:
                with torch.no_grad(), self._on_stream(ready, x):
                    result = collective(x)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(call)
        return future

    def wait(self, future: Future[Tensor]) -> Tensor:
        """Return the tensor of ``future``; raise the error of its collective."""
        result = future.result()
        if self._stream is not None:
            current = torch.cuda.current_stream(result.device)
            current.wait_stream(self._stream)
            result.record_stream(current)
        return result

    def close(self) -> None:
        """End the thread. Collectives that have not started are dropped. Not collective."""
        self._closed = True
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _on_stream(self, ready: torch.cuda.Event | None, x: Tensor) -> contextlib.AbstractContextManager[object]:
        if self._stream is None or ready is None:
            return contextlib.nullcontext()
        self._stream.wait_event(ready)
        x.record_stream(self._stream)
        return torch.cuda.stream(self._stream)

    def _run(self) -> None:
        COMMUNICATION.ignore_thread()
        while (call := self._calls.get()) is not None and not self._closed:
            call()
