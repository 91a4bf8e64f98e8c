"""Prefetching of the next step's data."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls ``load(step + 1)`` in a thread while the caller works on ``step``.

        with Prefetch(load, last=steps) as data:
            for step in range(first, steps):
                batches = data.get(step)

    Args:
        load: returns the data of a step. It is called in one thread, never concurrently.
        last: stop before this step.
    """

    def __init__(self, load: Callable[[int], T], last: int) -> None:
        self._load = load
        self._last = last
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._next: tuple[int, Future[T]] | None = None

    def get(self, step: int) -> T:
        """Return the data of ``step``, or raise the error of ``load``."""
        if self._next is None or self._next[0] != step:
            self._drop()
            self._next = (step, self._pool.submit(self._load, step))
        result = self._next[1].result()
        self._next = (step + 1, self._pool.submit(self._load, step + 1)) if step + 1 < self._last else None
        return result

    def close(self) -> None:
        """End the thread, after the load in progress."""
        self._drop()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop(self) -> None:
        if self._next is not None:
            self._next[1].cancel()
            self._next = None
