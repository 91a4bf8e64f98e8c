"""Handling of SIGINT and SIGTERM during training."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from moe_comm.runtime.launch import SAME_SIGNAL_S


@contextlib.contextmanager
def stop_on_signals(request: Callable[[], None]) -> Iterator[list[int]]:
    """Stop training after the current step on SIGINT or SIGTERM; a second signal ends the process at once.

    A rank that exits in the middle of a step would block its peers and leave the weights partly updated. The terminal
    and a launcher can both deliver one Ctrl-C, so signals shortly after the first one count as the same.

    After an exception the SIGTERM handler stays installed until ``restored_handler``: the agent sends SIGTERM to a
    failed rank, which must still write its records.

    Args:
        request: requests the stop; called at each signal.

    Yields:
        The received signals.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python delivers signals to the main thread only
        return
    handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    times: list[float] = []

    def stop(kind: int, frame: FrameType | None) -> None:
        times.append(time.monotonic())
        received.append(int(kind))
        request()
        if len(times) > 1 and times[-1] - times[0] >= SAME_SIGNAL_S:
            signal.signal(kind, handlers[signal.Signals(kind)])
            signal.raise_signal(kind)

    for kind in handlers:
        signal.signal(kind, stop)
    try:
        yield received
    except BaseException:
        signal.signal(signal.SIGINT, handlers[signal.SIGINT])
        raise
    for kind, handler in handlers.items():
        signal.signal(kind, handler)


@contextlib.contextmanager
def restored_handler(kind: signal.Signals) -> Iterator[None]:
    """Restore the current handler of ``kind`` on exit."""
    handler = signal.getsignal(kind)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(kind, handler)
