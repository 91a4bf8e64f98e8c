"""The layout of a rank's state in the memory of its host, and the runs that have snapshots there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.runtime.launch import STORE_VARIABLE, under_torchrun
from moe_comm.runtime.persistent_memory import LauncherProcess, PersistentMemory
from moe_comm.train.checkpoint import Entry
from moe_comm.train.ranks import Ranks

ALIGN = 64
"""Alignment of each tensor in bytes."""


@dataclass(frozen=True)
class SnapshotLayout:
    """Offsets of the tensors in a slot (the buffer of one snapshot), their total size, and a digest of names, shapes
    and mapping."""

    offsets: dict[str, int]
    content: int
    digest: str

    @classmethod
    def of(cls, entries: Mapping[str, Entry], mapping: str) -> SnapshotLayout:
        offsets, end = {}, 0
        for name, entry in entries.items():
            offsets[name] = end
            end += -(-entry.tensor.numel() * entry.tensor.element_size() // ALIGN) * ALIGN
        # Without boxes, which follow from the mapping and the placement of experts in the snapshot's state.
        parts = [mapping, *(f"{n} {tuple(e.tensor.shape)} {e.tensor.dtype} {e.shape}" for n, e in entries.items())]
        return cls(offsets, end, hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest())

    def views(self, entries: Mapping[str, Entry], content: Any) -> dict[str, Tensor]:
        """Return the tensors in ``content`` (a writable buffer) that correspond to the non-empty entries."""
        return {
            name: torch.frombuffer(
                content, dtype=entry.tensor.dtype, count=entry.tensor.numel(), offset=self.offsets[name]
            ).view(entry.tensor.shape)
            for name, entry in entries.items()
            if entry.tensor.numel()
        }


def run_id(folder: Path) -> str:
    """Return the id of a run, which depends on its folder."""
    return hashlib.blake2b(os.path.abspath(folder).encode(), digest_size=8).hexdigest()


def open_host_memory(ranks: Ranks, log: Callable[[str], None], host: str = "") -> PersistentMemory | None:
    """Connect to the memory server of this host. Returns None on all ranks if one of them cannot. Collective.

    Snapshots in memory are only used where torchrun or ``launch`` restarts the ranks.
    """
    host_memory, problem = None, ""
    try:
        if not under_torchrun():
            raise ConfigError("no launcher would restart these ranks; use torchrun or moe-comm train --restarts")
        store = os.environ.get(STORE_VARIABLE)
        owner = LauncherProcess.parent(str(Path(store).parent) if store else "")
        host_memory = PersistentMemory(owner, host=host, start=os.environ.get("LOCAL_RANK", "0") == "0")
    except (MoeCommError, OSError) as error:
        problem = str(error)
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(ranks.gather_texts(problem)) if text]
    if not problems:
        return host_memory
    if host_memory is not None:
        host_memory.close()
    log(f"no snapshots are saved in memory: {problems[0]}")
    return None


def runs_in_memory(host_memory: PersistentMemory | None, ranks: Ranks) -> frozenset[str]:
    """Return the ``run_id`` of all runs with snapshots on any host. Collective."""
    local = {header.run for _, _, header in host_memory.headers()} if host_memory is not None else set()
    return frozenset(run for text in ranks.gather_texts(json.dumps(sorted(local))) for run in json.loads(text))
