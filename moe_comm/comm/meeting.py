"""How the ranks of a process group meet: once for the group, and then for the settings of what is built over it.

One exchange of fixed size, whatever the ranks disagree on:

    word   0             1..           FACTS
           fault kind    facts         text of the fault

A fact that is not a number travels as its checksum. Where checksums differ, all ranks see it, and exchange the values
in words in a second all-gather of fixed size, so that the error can name the fields that differ.
"""

from __future__ import annotations

import secrets
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import ProcessGroup

from moe_comm.comm import communicator
from moe_comm.comm.channel import Channel
from moe_comm.comm.communicator import CollectiveOptions, Communicator
from moe_comm.comm.header import FAULTS, fault_word
from moe_comm.comm.peers import Peers, Process
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.comm.shared_heap import SharedHeap, SharedOptions
from moe_comm.errors import ConfigError, HeapError, MoeCommError, RankMismatch
from moe_comm.runtime.group_place import place_in
from moe_comm.runtime.memory import native_is_built

FACTS = 14
TEXT_BYTES = 400
VALUES_BYTES = 4096
VALUE_CHARS = 200
"""Longest text of one value, so that those of all fields fit into ``VALUES_BYTES``."""

Words = npt.NDArray[np.int64]


def communicator_of(group: ProcessGroup, timeout_s: float | None = None) -> Communicator:
    """The communicator of ``group``. The first call for a group is collective.

    Args:
        timeout_s: of the first call's exchange; None: that of the collectives.

    Raises:
        ConfigError: this process is not in ``group``, or the group was destroyed.
        RankMismatch: ranks set different ``CollectiveOptions``; on every rank.
        PeerDied, PeerTimeout: a rank does not take part.
    """
    comm = communicator.known(group)
    if comm is None:
        place_in(group)
        comm = communicator.unmet(group)
        _meet(comm, timeout_s)
        comm = communicator.register(comm)
    elif comm.peers is None and not comm.closed:  # of a part of another group
        _meet(comm, timeout_s)
    return comm


def _meet(comm: Communicator, timeout_s: float | None) -> None:
    """Learn who the others are."""
    options, own = communicator.collective_options(), Process.own()
    same = {"checked": int(options.checked), "shared_memory": int(options.shared_memory)}
    told = {
        "host": own.host,
        "pid": own.pid,
        "started": own.started,
        "native core": int(native_is_built()),
        "name": secrets.randbits(62),
    }
    channel = Channel(comm, options.timeout_s if timeout_s is None else timeout_s)
    found = compare(channel, "the collectives of a group", same, told)
    processes = [Process(*words) for words in zip(found["host"], found["pid"], found["started"], strict=True)]
    comm.hosts, comm.native = tuple(found["host"]), all(found["native core"])
    comm.peers = Peers(processes, comm.rank, comm.store, f"{found['name'][0]:x}")


def heap_of(comm: Communicator, timeout_s: float, options: SharedOptions | None = None) -> SharedHeap:
    """The shared memory of ``comm``. The first call is collective, and its ``options`` count.

    Raises:
        ConfigError: the ranks are not on one host. HeapError: shared memory is full or not accessible.
    """

    def make() -> SharedHeap:
        heap = SharedHeap(Channel(comm, timeout_s), options)
        comm.use(heap.communicator)
        return heap

    return comm.keep("heap", make)


def channel_of(group: ProcessGroup) -> SharedChannel:
    """The channel over which the collectives of ``group`` run, with the process's ``CollectiveOptions``. The first call
    for a group is collective. Raises as ``communicator_of``."""
    comm = communicator_of(group)
    found: SharedChannel | None = comm.kept("channel")
    return found if found is not None else comm.keep("channel", lambda: _channel(comm))


def _channel(comm: Communicator) -> SharedChannel:
    channel = SharedChannel(comm, 0.0)
    _configure(channel, communicator.collective_options())
    if len(set(comm.hosts)) == 1 and comm.native and channel.rows_device.type == "cpu":
        try:
            channel.share(heap_of(comm, channel.timeout_s))
        except HeapError as error:  # on every rank, if on one
            text = f"{error}; collectives go over the group's backend, which is slower"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
    return channel


def configure_collectives(options: CollectiveOptions) -> None:
    """Set the options of this process's collectives, once at the start and alike on every rank."""
    communicator.set_collective_options(options)
    for comm in communicator.communicators():
        if (channel := comm.kept("channel")) is not None:
            _configure(channel, options)


def _configure(channel: SharedChannel, options: CollectiveOptions) -> None:
    channel.timeout_s, channel.sharing, channel.checked = options.timeout_s, options.shared_memory, options.checked


def group_size(group: ProcessGroup | None) -> int:
    """Ranks in ``group``; 1 for None."""
    return group.size() if isinstance(group, ProcessGroup) else place_in(group)[1]


def group_rank(group: ProcessGroup | None) -> int:
    """This rank's place in ``group``; 0 for None."""
    return place_in(group)[0]


def digest(*values: object) -> int:
    """A number by which ranks compare settings of any kind."""
    return zlib.crc32(repr(values).encode())


def compare(
    channel: Channel,
    what: str,
    same: Mapping[str, object],
    told: Mapping[str, int] | None = None,
    fault: MoeCommError | None = None,
) -> dict[str, list[int]]:
    """Exchange settings over the group; every rank of it calls this, whatever its own settings are.

    Args:
        what: what is being built, for messages.
        same: settings that must be equal on all ranks, of any type; at most ``FACTS`` with ``told``. The error names
            the fields of a dataclass that differ.
        told: facts that may differ.
        fault: an error in this rank's own settings; raised here and, with its text, on every rank.

    Returns:
        Each of ``same`` and ``told``, by rank.

    Raises:
        RankMismatch: a setting differs. ConfigError or the fault's own class: some rank's settings are bad.
    """
    numbers = {name: value if isinstance(value, int) else digest(value) for name, value in same.items()}
    facts = {**numbers, **(told or {})}
    if len(facts) > FACTS:
        raise ConfigError(f"{what}: at most {FACTS} facts fit the exchange; got {len(facts)}")
    words = np.zeros(1 + FACTS + TEXT_BYTES // 8, np.int64)
    words[1 : 1 + len(facts)] = list(facts.values())
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
    found = {name: [int(v) for v in rows[:, 1 + i]] for i, name in enumerate(facts)}
    if differing := [name for name in same if len(set(found[name])) > 1]:
        raise _mismatch(channel, what, {name: same[name] for name in differing})
    return found


def _mismatch(channel: Channel, what: str, own: Mapping[str, object]) -> RankMismatch:
    """The error that names the fields of ``own`` that differ, and their values by rank. Collective."""
    lines = [f"{field}\t{text[:VALUE_CHARS]}" for name, value in own.items() for field, text in _in_words(name, value)]
    raw = "\n".join(lines).encode()[:VALUES_BYTES]
    sent = torch.zeros(VALUES_BYTES, dtype=torch.uint8)
    sent[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    rows = channel.all_gather(sent.to(channel.control_device), f"comparing {what}").cpu().numpy()
    texts = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
    by_rank = [dict(line.partition("\t")[::2] for line in text.split("\n")) for text in texts]
    named = dict.fromkeys(field for values in by_rank for field in values)
    given = {field: [values.get(field, "not given") for values in by_rank] for field in named}
    listed = "; ".join(
        f"{field}: " + ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        for field, values in given.items()
        if len(set(values)) > 1
    )
    names = ", ".join(own)
    return RankMismatch(
        f"ranks disagree on {names} when building {what}: "
        f"{listed.removeprefix(f'{names}: ') or 'their values are too long to show'}. "
        "Every rank of a group must build it alike."
    )


def _in_words(name: str, value: object) -> list[tuple[str, str]]:
    """``value`` under ``name``; the fields of a dataclass and the entries of a mapping each under their own."""
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if not isinstance(value, Mapping):
        return [(name, " ".join(repr(value).split()))]
    return [
        (key if key == inner else f"{key}.{inner}", text)
        for key, item in value.items()
        for inner, text in _in_words(str(key), item)
    ]
