"""The channel of each process group, over which everything but dispatch travels: made once, with options for all.

Made on first use, which is collective: ranks learn each other's processes, by which a later error can say who is
missing, and whether they share a host.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_comm.dispatch.exchange import SharedChannel
from moe_comm.dispatch.handshake import meet
from moe_comm.errors import ConfigError, HeapError
from moe_comm.runtime.group_place import place_in
from moe_comm.runtime.leaving import at_leave
from moe_comm.runtime.shared import SharedGroup, host_word, native_is_built


@dataclass(frozen=True)
class CollectiveOptions:
    """How collectives wait and check.

    timeout_s: seconds to wait for a peer that lives but does not arrive before ``PeerTimeout``.
    checked: compare operation, shape, dtype and number of the call over the group before each one, at the price of a
        small exchange; ranks that differ get ``RankMismatch`` instead of a wrong answer. Through shared memory calls
        are always compared, at no price.
    shared_memory: CPU tensors of a group whose ranks are all on one host travel through shared memory.
    """

    timeout_s: float = 300.0
    checked: bool = False
    shared_memory: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s must be a positive, finite number of seconds; got {self.timeout_s}")


class _State:
    """Of this process, as process groups are."""

    def __init__(self) -> None:
        self.options = CollectiveOptions()
        self.channels: dict[ProcessGroup, SharedChannel] = {}


_state = _State()
at_leave(_state.channels.clear)


def configure_collectives(options: CollectiveOptions) -> None:
    """Set the options of this process's collectives, once at the start and alike on every rank."""
    _state.options = options
    for channel in _state.channels.values():
        _configure(channel, options)


def _configure(channel: SharedChannel, options: CollectiveOptions) -> None:
    channel.timeout_s, channel.sharing, channel.checked = options.timeout_s, options.shared_memory, options.checked


def group_size(group: ProcessGroup | None) -> int:
    """Ranks in ``group``; 1 for None."""
    return group.size() if isinstance(group, ProcessGroup) else place_in(group)[1]


def group_rank(group: ProcessGroup | None) -> int:
    """This rank's place in ``group``; 0 for None."""
    return place_in(group)[0]


def channel_of(group: ProcessGroup) -> SharedChannel:
    """The channel over which the collectives of ``group`` run. The first call for a group is collective.

    Raises:
        ConfigError: this process is not in ``group``.
        PeerDied, PeerTimeout: a rank does not take part.
    """
    channel = _state.channels.get(group)
    if channel is None:
        rank, world = place_in(group)
        for other in [other for other in _state.channels if not alive(other)]:
            del _state.channels[other]  # or destroyed groups would never be freed
        channel = SharedChannel(group, rank, world, _state.options.timeout_s)
        _configure(channel, _state.options)
        same = {"checked": int(channel.checked), "shared_memory": int(channel.sharing)}
        told = {"host": host_word(), "native core": int(native_is_built())}
        found = meet(channel, group, "the collectives of a group", same, told)
        one_host = len(set(found["host"])) == 1 and all(found["native core"])
        if one_host and channel.rows_device.type == "cpu":
            _share(channel, group)
        _state.channels[group] = channel
    return channel


def _share(channel: SharedChannel, group: ProcessGroup) -> None:
    try:
        channel.share(SharedGroup.of(group))
    except HeapError as error:  # on every rank, if on one
        warnings.warn(
            f"{error}; collectives go over the group's backend, which is slower", RuntimeWarning, stacklevel=3
        )


def alive(group: ProcessGroup) -> bool:
    """Whether ``group`` has not been destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True
