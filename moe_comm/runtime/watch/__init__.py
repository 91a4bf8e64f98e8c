"""Ranks that watch each other: detection of ranks that died or are stuck.

Setup raises on every rank: HeapError if a rank cannot share memory with the other ranks of its host, and
MissingDependency if a rank has no native core, without which no spans are recorded.
"""

from __future__ import annotations

from moe_comm.runtime.watch.fault_handler import WatchOptions
from moe_comm.runtime.watch.watcher import Watcher, watching

__all__ = ["WatchOptions", "Watcher", "watching"]
