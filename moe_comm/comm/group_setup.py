"""Setup of the communicators and channels of a process group."""

from __future__ import annotations

import secrets
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_comm.comm import communicator
from moe_comm.comm.agree import agree, compare, gather_texts
from moe_comm.comm.channel import AbortOnError, Channel
from moe_comm.comm.communicator import CollectiveOptions, Communicator
from moe_comm.comm.peers import Peers, Process
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.comm.shared_heap import SharedHeap
from moe_comm.errors import ConfigError, HeapError, MoeCommError
from moe_comm.runtime.groups import rank_and_size
from moe_comm.runtime.native_core import native_is_built

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def communicator_of(group: ProcessGroup, timeout_s: float | None = None) -> Communicator:
    """Return the communicator of ``group``. The first call for a group is collective.

    Args:
        group: a process group that contains this process.
        timeout_s: timeout of the exchange in the first call; default: ``CollectiveOptions.timeout_s``.
    """
    comm = communicator.find_communicator(group)
    if comm is None:
        rank_and_size(group)
        comm = communicator.new_communicator(group)
        _set_up(comm, timeout_s)
        comm = communicator.register(comm)
    elif comm.peers is None and not comm.closed:  # the communicator of a subgroup is registered before its setup
        _set_up(comm, timeout_s)
    return comm


def _set_up(comm: Communicator, timeout_s: float | None) -> None:
    """Exchange facts about the processes of all ranks."""
    options, own = communicator.registry.options, Process.own()
    same = {"checked": int(options.checked), "shared_memory": int(options.shared_memory)}
    facts = {
        "host": own.host,
        "pid": own.pid,
        "started": own.started,
        "native core": int(native_is_built()),
        "name": secrets.randbits(62),  # the number of rank 0 is the prefix of this group's notes in the store
    }
    channel = Channel(comm, options.timeout_s if timeout_s is None else timeout_s)
    by_rank = compare(channel, "the collectives of a group", same, facts)
    processes = [Process(*words) for words in zip(by_rank["host"], by_rank["pid"], by_rank["started"], strict=True)]
    comm.hosts, comm.native = tuple(by_rank["host"]), all(by_rank["native core"])
    comm.peers = Peers(processes, comm.rank, comm.store, f"{by_rank['name'][0]:x}")


def heap_of(comm: Communicator, timeout_s: float) -> SharedHeap:
    """Return the shared memory of ``comm``. The first call is collective."""

    def make() -> SharedHeap:
        heap = SharedHeap(Channel(comm, timeout_s))
        comm.core, comm.core_timeout_s = heap.communicator, 0.0
        return heap

    return comm.keep("heap", make)


def channel_of(group: ProcessGroup) -> SharedChannel:
    """Return the channel for the collectives of ``group``, with the process's ``CollectiveOptions``.

    The first call for a group is collective. Raises as ``communicator_of``.
    """
    comm = communicator_of(group)
    channel: SharedChannel | None = comm.get("channel")
    return channel if channel is not None else comm.keep("channel", lambda: _channel(comm))


def _channel(comm: Communicator) -> SharedChannel:
    channel = SharedChannel(comm, 0.0)
    _configure(channel, communicator.registry.options)
    if len(set(comm.hosts)) == 1 and comm.native and channel.rows_device.type == "cpu":
        try:
            channel.attach_heap(heap_of(comm, channel.timeout_s))
        except HeapError as error:  # raised on every rank, so all ranks use the backend
            text = f"{error}; collectives use the group's backend, which is slower"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
    return channel


WRITE_TIMEOUT_S = 3600.0
"""Time that ranks wait for another one that writes a model."""


def agree_on_written(
    group: ProcessGroup | None, outcome: str | Exception, target: str, otherwise: type[MoeCommError]
) -> None:
    """Raise on every rank of ``group`` if a rank could not write ``target``; see ``agree``. None: this process alone.

    The ranks wait longer for each other than in other collectives, because writing a model can take many minutes.
    """

    def gather(text: str) -> list[str]:
        if group is None:
            return [text]
        return gather_texts(Channel(communicator_of(group), WRITE_TIMEOUT_S), f"writing {target}", text)

    agree(outcome, gather, otherwise, f"could not write {target}: ")


def abort_on_error(label: str, *groups: ProcessGroup | None, in_flight: bool = False) -> AbortOnError:
    """Return a context manager that reports an exception in its block to the other ranks of ``groups``.

    label, in_flight: see ``SharedChannel.abort``.
    """

    def abort(error: Exception) -> None:
        for group in groups:
            if group is not None and group_size(group) > 1:
                with suppress(MoeCommError):  # the group may be unusable
                    channel_of(group).abort(error, label, in_flight=in_flight)

    return AbortOnError(abort)


def configure_collectives(options: CollectiveOptions) -> None:
    """Set the options of this process's collectives. Call it once at the start, with equal options on every rank."""
    communicator.registry.options = options
    for comm in communicator.communicators():
        if (channel := comm.get("channel")) is not None:
            _configure(channel, options)


def _configure(channel: SharedChannel, options: CollectiveOptions) -> None:
    channel.timeout_s, channel.shared_memory, channel.checked = (
        options.timeout_s,
        options.shared_memory,
        options.checked,
    )


def as_group(group: ProcessGroup | DeviceMesh | int | None, axis: str = "") -> ProcessGroup | None:
    """Return a process group.

    Args:
        group: a process group, a DeviceMesh of one dimension or with a dimension named ``axis``, or None.
        axis: name of the dimension of a DeviceMesh with several dimensions.

    Raises:
        ConfigError: it is neither, or the mesh has no such dimension.
    """
    if group is None or isinstance(group, ProcessGroup | int):  # int: not a member; ``rank_and_size`` raises
        return group  # type: ignore[return-value]
    if not hasattr(group, "mesh_dim_names"):
        raise ConfigError(f"expected a process group, a DeviceMesh or None; got {group!r}")
    if group.ndim == 1:
        return group.get_group()
    if axis not in (group.mesh_dim_names or ()):
        raise ConfigError(f"expected a DeviceMesh of one dimension or with a dimension {axis!r}; got {group}")
    return group.get_group(axis)


def group_or_default(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return ``group``, or the default group for None; None without ``torch.distributed``."""
    return dist.group.WORLD if group is None and dist.is_initialized() else group


def group_size(group: ProcessGroup | None) -> int:
    """Return the number of ranks in ``group``; 1 for None."""
    return group.size() if isinstance(group, ProcessGroup) else rank_and_size(group)[1]


def group_rank(group: ProcessGroup | None) -> int:
    """Return the rank of this process in ``group``; 0 for None."""
    return rank_and_size(group)[0]
