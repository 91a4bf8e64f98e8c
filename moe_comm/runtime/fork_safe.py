"""Locks that a forked child finds free.

A child has only the thread that forked. A lock that another thread held stays locked in the child forever. (The logging
and the import system of Python renew theirs; the native core has ``ForkSafeMutex``.)
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

_owners: weakref.WeakKeyDictionary[object, tuple[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()


def add_lock(owner: object, name: str, make: Callable[[], Any] = threading.Lock) -> None:
    """Set attribute ``name`` of ``owner`` to ``make()``, now and in each forked child. One lock per owner."""
    setattr(owner, name, make())
    _owners[owner] = (name, make)


def _renew() -> None:
    for owner, (name, make) in list(_owners.items()):
        setattr(owner, name, make())


os.register_at_fork(after_in_child=_renew)
