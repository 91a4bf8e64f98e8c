"""Ranks that watch each other: which rank died, which is stuck, and which only wait for them."""

from __future__ import annotations

from moe_comm.runtime.watch.pace import WatchOptions
from moe_comm.runtime.watch.watcher import Watcher, watching

__all__ = ["WatchOptions", "Watcher", "watching"]
