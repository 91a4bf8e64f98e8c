"""Setup of communicators and channels of a process group, and comparison of settings between its ranks.

Ranks exchange a vector of fixed size, whatever they disagree on:

    word   0             1..           FACTS
           fault kind    facts         text of the fault

A fault is an error in a rank's settings, which all ranks raise. A fact that is not an integer is sent as a checksum. If
checksums differ, all ranks exchange the values as text in a second all-gather of fixed size, so that the error can name
the fields that differ.
"""

from __future__ import annotations

import secrets
import warnings
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_comm.comm import communicator
from moe_comm.comm.channel import AbortOnError, Channel
from moe_comm.comm.communicator import CollectiveOptions, Communicator
from moe_comm.comm.header import FAULTS, fault_word
from moe_comm.comm.peers import Peers, Process
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.comm.shared_heap import SharedHeap, SharedOptions
from moe_comm.errors import ConfigError, HeapError, MoeCommError, RankMismatch
from moe_comm.runtime.group_rank import rank_and_size
from moe_comm.runtime.memory import native_is_built

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FACTS = 14
"""Maximum number of facts."""
TEXT_BYTES = 400
"""Maximum length of the text of a fault."""
VALUES_BYTES = 4096
VALUE_CHARS = 200
"""Maximum length of a value's text, so that all fields fit into ``VALUES_BYTES``."""

Words = npt.NDArray[np.int64]


def communicator_of(group: ProcessGroup, timeout_s: float | None = None) -> Communicator:
    """Return the communicator of ``group``. The first call for a group is collective.

    Args:
        group: a process group that contains this process.
        timeout_s: timeout of the exchange in the first call; default: ``CollectiveOptions.timeout_s``.

    Raises:
        ConfigError: this process is not in ``group``, or the group was destroyed.
        RankMismatch: ranks set different ``CollectiveOptions``; on every rank.
        PeerDied, PeerTimeout: a rank died, or did not call in time.
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


def heap_of(comm: Communicator, timeout_s: float, options: SharedOptions | None = None) -> SharedHeap:
    """Return the shared memory of ``comm``. The first call is collective, and only its ``options`` are used.

    Raises:
        ConfigError: the ranks are not on one host.
        HeapError: shared memory is full or not accessible.
    """

    def make() -> SharedHeap:
        heap = SharedHeap(Channel(comm, timeout_s), options)
        comm.use(heap.communicator)
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


def abort_on_error(label: str, *groups: ProcessGroup | None, in_flight: bool = False) -> AbortOnError:
    """Return a context manager that reports an exception in its block to the other ranks of ``groups``.

    label, in_flight: see ``SharedChannel.abort``.
    """

    def abort(error: Exception) -> None:
        for group in groups:
            if group is not None and group_size(group) > 1:
                with suppress(MoeCommError):  # of a group that is unusable
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
        ConfigError: a DeviceMesh of several dimensions, none of them named ``axis``.
    """
    if group is None or isinstance(group, ProcessGroup | int):  # int: not a member; ``rank_and_size`` raises
        return group  # type: ignore[return-value]
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


def digest(*values: object) -> int:
    """Return a checksum for comparing values of any type between ranks."""
    return zlib.crc32(repr(values).encode())


def compare(
    channel: Channel,
    what: str,
    same: Mapping[str, object],
    facts: Mapping[str, int] | None = None,
    fault: MoeCommError | None = None,
) -> dict[str, list[int]]:
    """Exchange and compare settings. Every rank of the group must call this, whatever its settings are.

    Args:
        channel: a channel of the group.
        what: the object being built, for messages.
        same: settings of any type that must be equal on all ranks. With ``facts`` at most ``FACTS``. The error names
            the fields of a dataclass that differ.
        facts: integers that may differ.
        fault: an error in this rank's settings. It is raised here, and with its text on every other rank.

    Returns:
        The values of ``same`` (integers or checksums) and ``facts``, by name and rank.

    Raises:
        RankMismatch: a setting differs.
        ConfigError, or the class of the fault: the settings of a rank are invalid.
    """
    numbers = {name: value if isinstance(value, int) else digest(value) for name, value in same.items()}
    numbers |= facts or {}
    if len(numbers) > FACTS:
        raise ConfigError(f"{what}: at most {FACTS} facts fit the exchange; got {len(numbers)}")
    words = np.zeros(1 + FACTS + TEXT_BYTES // 8, np.int64)
    words[1 : 1 + len(numbers)] = list(numbers.values())
    if fault is not None:
        words[0] = fault_word(fault, ConfigError)
        raw = str(fault).encode()[:TEXT_BYTES]
        words[1 + FACTS :].view(np.uint8)[: len(raw)] = np.frombuffer(raw, np.uint8)
    sent = torch.from_numpy(words).to(channel.control_device)
    rows: Words = channel.all_gather(sent, f"building {what}").cpu().numpy()
    if fault is not None:
        raise fault
    for rank, row in enumerate(rows):
        if row[0]:
            text = row[1 + FACTS :].tobytes().rstrip(b"\0").decode(errors="replace")
            raise FAULTS[int(row[0]) - 1](f"rank {rank}: {text}")
    by_rank = {name: [int(v) for v in rows[:, 1 + i]] for i, name in enumerate(numbers)}
    if differing := [name for name in same if len(set(by_rank[name])) > 1]:
        raise _mismatch(channel, what, {name: same[name] for name in differing})
    return by_rank


def _mismatch(channel: Channel, what: str, own: Mapping[str, object]) -> RankMismatch:
    """Return the error with the fields of ``own`` that differ and their values by rank. Collective."""
    lines = [f"{field}\t{text[:VALUE_CHARS]}" for name, value in own.items() for field, text in _as_text(name, value)]
    raw = "\n".join(lines).encode()[:VALUES_BYTES]
    sent = torch.zeros(VALUES_BYTES, dtype=torch.uint8, device="cpu")
    sent[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    rows = channel.all_gather(sent.to(channel.control_device), f"comparing {what}").cpu().numpy()
    texts = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
    by_rank = [dict(line.partition("\t")[::2] for line in text.split("\n")) for text in texts]
    field_names = dict.fromkeys(field for values in by_rank for field in values)
    values_of = {field: [values.get(field, "not given") for values in by_rank] for field in field_names}
    differences = "; ".join(
        f"{field}: " + ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        for field, values in values_of.items()
        if len(set(values)) > 1
    )
    names = ", ".join(own)
    return RankMismatch(
        f"ranks disagree on {names} when building {what}: "
        f"{differences.removeprefix(f'{names}: ') or 'their values are too long to show'}. "
        "All ranks of a group must use the same settings."
    )


def _as_text(name: str, value: object) -> list[tuple[str, str]]:
    """Return names and texts of ``value``, or of the fields of a dataclass and the entries of a mapping."""
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if not isinstance(value, Mapping):
        return [(name, " ".join(repr(value).split()))]
    return [
        (key if key == inner else f"{key}.{inner}", text)
        for key, item in value.items()
        for inner, text in _as_text(str(key), item)
    ]
