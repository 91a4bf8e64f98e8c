"""The numbers that identify process groups in spans (``EventRecorder.group``)."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_comm.runtime.event_layout import NO_NAME, group_text
from moe_comm.runtime.events import EVENTS


def group_of(group: ProcessGroup | None) -> int:
    """Return the number of ``group`` for ``EVENTS.span``; ``NO_NAME`` for None and for destroyed groups."""
    if group is None or not EVENTS.enabled:
        return NO_NAME
    text = EVENTS.group_texts.get(group)
    if text is None:
        try:
            text = group_text(dist.get_process_group_ranks(group))
        except (KeyError, ValueError):
            return NO_NAME
        EVENTS.group_texts[group] = text
    return EVENTS.name(text)
