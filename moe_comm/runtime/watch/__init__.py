"""Ranks that watch each other: detection of ranks that died or are stuck."""

from __future__ import annotations

from moe_comm.runtime.watch.fault_handler import WatchOptions
from moe_comm.runtime.watch.watcher import Watcher, watching

__all__ = ["WatchOptions", "Watcher", "watching"]
