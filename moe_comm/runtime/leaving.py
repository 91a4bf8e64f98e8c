"""What this process keeps for its process groups, let go of before the interpreter ends.

A thread of gloo takes the interpreter's lock to let go of the tensors of a collective, which may be a while after the
collective is over. If the interpreter is ending by then, the thread is ended in the middle of it, and that aborts the
process ("terminate called without an active exception"). A group joins its threads when it is freed; so nothing that
is kept by group may outlive the group's use.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable

_kept: list[Callable[[], None]] = []


def at_leave(forget: Callable[[], None]) -> None:
    """Have ``leave`` call ``forget``, which drops what is kept for groups."""
    _kept.append(forget)


def leave() -> None:
    """Once no group of this process is used any more, as after ``destroy_process_group``."""
    for forget in _kept:
        forget()


def _end() -> None:
    leave()
    gc.collect()  # or groups in cycles would stay


atexit.register(_end)
