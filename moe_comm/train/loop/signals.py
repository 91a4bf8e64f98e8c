"""What SIGINT and SIGTERM do to a rank that trains."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from moe_comm.runtime.launch import SAME_PRESS_S


@contextlib.contextmanager
def stop_on_signals(request: Callable[[], None]) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM end training after the step in progress, on all ranks together; a second one ends it at once.
    Yields the signals that came.

    A rank that left in the middle of a step would leave its peers waiting, and the weights half updated. A terminal
    and a launcher may both pass on one press, so signals right after the first are taken for the same one.

    Where an exception leaves it, SIGTERM stays as it is here until ``handler_put_back``: a rank that has failed is told
    to end by its agent and is about to, and what it still writes down is not to be cut off.

    Args:
        request: asks for the end; called at each signal.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen  # Python delivers signals to the main thread only
        return
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    presses: list[float] = []

    def stop(kind: int, frame: FrameType | None) -> None:
        presses.append(time.monotonic())
        seen.append(int(kind))
        request()
        if len(presses) > 1 and presses[-1] - presses[0] >= SAME_PRESS_S:
            signal.signal(kind, before[signal.Signals(kind)])
            signal.raise_signal(kind)

    for kind in before:
        signal.signal(kind, stop)
    try:
        yield seen
    except BaseException:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        raise
    for kind, handler in before.items():
        signal.signal(kind, handler)


@contextlib.contextmanager
def handler_put_back(kind: signal.Signals) -> Iterator[None]:
    """Whoever handles ``kind`` now does so again at the end."""
    handler = signal.getsignal(kind)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(kind, handler)
