"""Process groups that callers passed: rank and size, which are checked here, their numbers in spans, and hosts."""

from __future__ import annotations

import hashlib
import os
import socket
import warnings
from functools import lru_cache
from pathlib import Path

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError
from moe_comm.runtime.event_layout import NO_NAME, group_text
from moe_comm.runtime.events import EVENTS


def rank_and_size(group: ProcessGroup | None) -> tuple[int, int]:
    """Return the rank of this process in ``group`` and the size of ``group``; (0, 1) for None.

    Warns once per process if ``group`` is None although this is one of several ranks without a process group.
    """
    if group is None:
        _warn_if_undistributed()
        return 0, 1
    # For a process outside a new group, dist.new_group returns a number (GroupMember.NON_GROUP_MEMBER).
    rank = group.rank() if isinstance(group, ProcessGroup) else -1
    if rank < 0:
        who = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
        raise ConfigError(
            f"{who} is not a member of the given process group ({group!r}); "
            "call this only on the ranks that were passed to dist.new_group"
        )
    return rank, group.size()


@lru_cache(maxsize=1)
def _warn_if_undistributed() -> None:
    world = os.environ.get("WORLD_SIZE", "")
    if not world.isdecimal() or int(world) < 2 or (dist.is_available() and dist.is_initialized()):
        return
    warnings.warn(
        f"this is one of {world} ranks (WORLD_SIZE), but torch.distributed has no process group: each rank holds all "
        "experts and computes alone. To distribute the work, write\n"
        '    torch.distributed.init_process_group("gloo")    # "nccl" on GPUs\n'
        "before building, and pass the group, for example\n"
        "    MoELayer.build(config, torch.distributed.group.WORLD)",
        RuntimeWarning,
        stacklevel=4,
    )


ALONE = "torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)"
"""A group of this rank only."""


@lru_cache(maxsize=8)
def warn_if_alone(call: str, what: str) -> None:
    """Warn once per ``call``, which was made without a group, if ``torch.distributed`` has several ranks."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            f"{call} without a group: each of the {dist.get_world_size()} ranks {what}. To distribute the work, pass "
            f"torch.distributed.group.WORLD. If this is what you want, pass a group of one rank:\n    {ALONE}",
            RuntimeWarning,
            stacklevel=4,
        )


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


def host_key() -> str:
    """Return a key that is equal for processes with the same /dev/shm, kernel and pid namespace."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(os.stat("/dev/shm").st_dev))
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError as error:
        parts.append(f"unknown: {error.errno}")
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def host_key_int64() -> int:
    """Return ``host_key`` as a number that fits int64."""
    return int(host_key(), 16) >> 2
