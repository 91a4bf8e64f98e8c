"""The number by which spans name a process group: of its global ranks, in the region that is being recorded into."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_comm.runtime.event_layout import NO_NAME, group_text
from moe_comm.runtime.events import EVENTS

_texts: weakref.WeakKeyDictionary[ProcessGroup, str] = weakref.WeakKeyDictionary()


def group_of(group: ProcessGroup | None) -> int:
    """What ``EVENTS.span`` takes as ``group``; ``NO_NAME`` for this rank alone, and for a group that was destroyed."""
    if group is None or not EVENTS.enabled:
        return NO_NAME
    text = _texts.get(group)
    if text is None:
        try:
            text = group_text(dist.get_process_group_ranks(group))
        except (KeyError, ValueError):
            return NO_NAME
        _texts[group] = text
    return EVENTS.name(text)
