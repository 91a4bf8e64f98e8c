"""Recording of launches: what a program (``kernels/triton/program.py``) repeats."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from moe_comm.gpu.record import AddTo


class Number(NamedTuple):
    """An argument of a launch that differs between repetitions: the number at ``which`` of those that a call of the
    program is given, plus ``added``."""

    which: int
    added: int


class Step(NamedTuple):
    """A launch. add: None if it cannot be repeated. args: tensors, ``Number``, other values, and descriptions of
    matrices. operators: number of operators that the kernel computes."""

    add: AddTo | None
    grid: Sequence[int]
    args: Sequence[Any]
    operators: int = 1


_recording = threading.local()


@contextmanager
def recorded() -> Iterator[list[Step]]:
    """Return the launches of this thread in the context."""
    steps: list[Step] = []
    _recording.steps = steps
    try:
        yield steps
    finally:
        _recording.steps = None


def is_recording() -> bool:
    """Return whether ``record`` records."""
    return getattr(_recording, "steps", None) is not None


def record(step: Step) -> None:
    """Add a launch to those that are recorded."""
    steps = getattr(_recording, "steps", None)
    if steps is not None:
        steps.append(step)
