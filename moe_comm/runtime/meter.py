"""How long this process has spent in a kind of work; what a training step's time is split by.

    with COMMUNICATION:            # around every dispatch, combine and collective
        ...
    with COMMUNICATION.paused():   # inside of that, around what others do between their transfers
        ...
    COMMUNICATION.take()           # seconds since the last call, on the host's clock

On a GPU the host only queues the work, so the seconds are those it could not go on, not those on the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Meter:
    """Seconds between entering and leaving, summed; what is nested counts once. Each thread enters for itself."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._seconds = 0.0

    def __enter__(self) -> None:
        depth = getattr(self._local, "depth", 0)
        if depth == 0:
            self._local.began = time.perf_counter()
        self._local.depth = depth + 1

    def __exit__(self, *error: Any) -> None:
        self._local.depth -= 1
        if self._local.depth == 0:
            with self._lock:
                self._seconds += time.perf_counter() - self._local.began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count until it ends, but for what enters anew meanwhile."""
        depth = getattr(self._local, "depth", 0)
        if not depth:
            yield
            return
        self._local.depth = 1
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
            self._local.depth = depth

    def take(self) -> float:
        """Seconds since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds


COMMUNICATION = Meter()
"""Dispatch, combine, and every collective of this library: all that moves data between ranks, and the waits in it."""
