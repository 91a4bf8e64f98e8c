"""What ranks keep in memory of a run: how a rank's state is laid out there, and of which runs there is any."""

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
from moe_comm.runtime import persistent_memory as memory
from moe_comm.runtime.launch import STORE_VARIABLE, under_torchrun
from moe_comm.runtime.persistent_memory import Owner, PersistentMemory
from moe_comm.train.checkpoint import Entry
from moe_comm.train.ranks import Ranks

ALIGN = 64
"""Bytes; where each tensor begins."""


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in a slot."""

    offsets: dict[str, int]
    content: int
    digest: str

    @classmethod
    def of(cls, entries: Mapping[str, Entry], mapping: str) -> Layout:
        offsets, at = {}, 0
        for name, entry in entries.items():
            offsets[name] = at
            at += -(-entry.tensor.numel() * entry.tensor.element_size() // ALIGN) * ALIGN
        parts = [mapping, *(f"{name} {tuple(e.tensor.shape)} {e.signature()}" for name, e in entries.items())]
        return cls(offsets, at, hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest())

    def views(self, entries: Mapping[str, Entry], content: Any) -> dict[str, Tensor]:
        """Tensors in ``content`` (a writable buffer) that are shaped as the entries are; none for empty ones."""
        return {
            name: torch.frombuffer(
                content, dtype=entry.tensor.dtype, count=entry.tensor.numel(), offset=self.offsets[name]
            ).view(entry.tensor.shape)
            for name, entry in entries.items()
            if entry.tensor.numel()
        }


def run_id(folder: Path) -> str:
    """Names a run by its folder."""
    return hashlib.blake2b(os.path.abspath(folder).encode(), digest_size=8).hexdigest()


def open_kept(ranks: Ranks, say: Callable[[str], None], host: str = "") -> PersistentMemory | None:
    """The memory that this host keeps for the ranks; None on all, where one of them has none. Collective.

    It is of use only where something starts the ranks again: torchrun, or ``launch``.
    """
    kept, problem = None, ""
    try:
        if not under_torchrun():
            raise ConfigError("nothing would start these ranks again (torchrun, or moe-comm train --restarts)")
        store = os.environ.get(STORE_VARIABLE)
        owner = Owner.parent(str(Path(store).parent) if store else "")
        kept = PersistentMemory(owner, host=host, start=os.environ.get("LOCAL_RANK", "0") == "0")
    except (MoeCommError, OSError) as error:
        problem = str(error)
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(ranks.texts(problem)) if text]
    if not problems:
        return kept
    if kept is not None:
        kept.close()
    say(f"no state is kept in memory: {problems[0]}")
    return None


def kept_runs(kept: PersistentMemory | None, ranks: Ranks) -> frozenset[str]:
    """``run_id`` of the runs of which any host keeps something. Collective."""
    own: set[str] = set()
    for name in kept.names() if kept is not None else ():
        slots = kept.find(name) if kept is not None else None
        headers = [slots.header(slot) for slot in range(memory.SLOTS)] if slots is not None else []
        own |= {header.run for header in headers if header is not None}
    return frozenset(run for text in ranks.texts(json.dumps(sorted(own))) for run in json.loads(text))
