"""What ranks tell each other before rows move, over any backend of torch.distributed.

At construction, once (fixed size, whatever the ranks disagree on):

    word   0        1..3      4             5..           FACTS
           nonce    process   fault kind    facts         text of the fault

A fact that is not a number travels as its checksum. Where checksums differ, all ranks see it, and exchange the values
in words in a second all-gather of fixed size, so that the error can name the fields that differ.

Before every operation (one all-gather; E is the largest number of experts of the group's dispatchers, so that ranks
which call different dispatchers exchange the same number of bytes):

    header.WORDS    tokens    device    bad ids    first bad slot    its id    | rows for each expert [E]

so a single exchange carries the check on every rank and the counts from which all sizes follow.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.dispatch import header as head
from moe_comm.dispatch import peers, plain
from moe_comm.dispatch.base import Dispatcher, peers_routing_error, routing_error
from moe_comm.dispatch.channel import Channel
from moe_comm.dispatch.header import FAULTS, GroupCalls, Header, check, fault_word
from moe_comm.errors import ConfigError, MoeCommError, RankMismatch, mark_known
from moe_comm.topology import ExpertPlacement

FACTS = 14
TEXT_BYTES = 400
VALUES_BYTES = 4096
VALUE_CHARS = 200
"""Longest text of one value, so that those of all fields fit into ``VALUES_BYTES``."""
EXTRA = 5
DEVICES = ("cpu", "cuda", "xpu", "mps", "meta")

Words = npt.NDArray[np.int64]


def digest(*values: object) -> int:
    """A number by which ranks compare settings of any kind."""
    return zlib.crc32(repr(values).encode())


def meet(
    channel: Channel,
    group: ProcessGroup,
    what: str,
    same: Mapping[str, object],
    told: Mapping[str, int] | None = None,
    fault: MoeCommError | None = None,
) -> dict[str, list[int]]:
    """Exchange settings over the group; every rank of it calls this, whatever its own settings are.

    Args:
        channel: learns who its peers are.
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
    words = np.zeros(2 + peers.WORDS + FACTS + TEXT_BYTES // 8, np.int64)
    words[0] = secrets.randbits(62)
    words[1 : 1 + peers.WORDS] = peers.Process.own().words()
    start = 2 + peers.WORDS
    words[start : start + len(facts)] = list(facts.values())
    if fault is not None:
        words[start - 1] = fault_word(fault, ConfigError)
        raw = str(fault).encode()[:TEXT_BYTES]
        words[start + FACTS :].view(np.uint8)[: len(raw)] = np.frombuffer(raw, np.uint8)
    sent = torch.from_numpy(words).to(channel.control_device)
    rows: Words = channel.all_gather(sent, f"building {what}").cpu().numpy()
    processes = [peers.Process(*(int(v) for v in row[1 : 1 + peers.WORDS])) for row in rows]
    channel.peers = peers.Peers(processes, channel.rank, group, f"{int(rows[0, 0]):x}")
    if fault is not None:
        raise fault
    for rank, row in enumerate(rows):
        if row[start - 1]:
            text = row[start + FACTS :].tobytes().rstrip(b"\0").decode(errors="replace")
            raise FAULTS[int(row[start - 1]) - 1](f"rank {rank}: {text}")
    found = {name: [int(v) for v in rows[:, start + i]] for i, name in enumerate(facts)}
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


def settings_of(dispatcher: Dispatcher) -> dict[str, object]:
    """What must be equal on all ranks that build a dispatcher."""
    options, placement = dispatcher.options, dispatcher.placement
    return {
        "backend": dispatcher.name,
        "number of experts": placement.num_experts,
        "experts per rank": placement.experts_per_rank,
        "deterministic": int(options.deterministic),
        "checked": int(options.checked),
        "payloads": options.payloads,
        "checksums": int(options.checksums),
    }


@dataclass(frozen=True)
class Counts:
    """What all ranks are about to send. On the host.

    rows_WE: rows that each rank has for each expert. tokens_W: its tokens. num_dropped: of this rank.
    """

    rows_WE: Words
    tokens_W: tuple[int, ...]
    num_dropped: int


class Handshake:
    """The exchange that starts every operation of one dispatcher."""

    def __init__(self, channel: Channel, placement: ExpertPlacement, calls: GroupCalls) -> None:
        self._channel = channel
        self._num_experts = placement.num_experts
        # Every rank is here once all have met, so all handshakes of the group grow at the same call.
        calls.most_experts = max(calls.most_experts, placement.num_experts)
        self._calls = calls

    def exchange(self, header: Header, ids_TK: Tensor | None, device: torch.device) -> Counts:
        """Tell and learn; raise the same error on every rank if one is bad or two differ.

        Raises:
            InputError, RoutingError, RankMismatch: as ``header.check`` does.
            PeerDied, PeerTimeout: a rank does not answer.
        """
        try:
            return self._exchange(header, ids_TK, device)
        except MoeCommError as error:
            mark_known(error)
            raise

    def _exchange(self, header: Header, ids_TK: Tensor | None, device: torch.device) -> Counts:
        words = torch.from_numpy(np.concatenate((header.pack(), np.zeros(EXTRA + self._calls.most_experts, np.int64))))
        words[head.WORDS + 1] = DEVICES.index(device.type) if device.type in DEVICES else len(DEVICES)
        words = words.to(self._channel.control_device, non_blocking=True)
        counts = None
        if ids_TK is not None and header.fault is None:
            words[head.WORDS] = ids_TK.shape[0]
            counts = plain.count_slots(ids_TK, self._num_experts).to(words.device)
            words[head.WORDS + 2 : head.WORDS + EXTRA] = counts[self._num_experts + 1 :]
            words[head.WORDS + EXTRA : head.WORDS + EXTRA + self._num_experts] = counts[: self._num_experts]
        rows: Words = self._channel.all_gather(words, describe(header)).cpu().numpy()
        check(list(rows[:, : head.WORDS]), self._channel.rank, header)
        extra = rows[:, head.WORDS : head.WORDS + EXTRA]
        if len(set(extra[:, 1].tolist())) > 1:
            given = ", ".join(
                f"rank {rank}: {(*DEVICES, 'another')[int(value)]}" for rank, value in enumerate(extra[:, 1])
            )
            raise RankMismatch(f"ranks disagree on the device of the rows in {describe(header)}: {given}")
        self._check_ids(extra, ids_TK, header)
        rows_WE = rows[:, head.WORDS + EXTRA : head.WORDS + EXTRA + self._num_experts]
        slots = ids_TK.numel() if ids_TK is not None else 0
        dropped = slots - int(rows_WE[self._channel.rank].sum())
        return Counts(rows_WE, tuple(int(v) for v in extra[:, 0]), dropped)

    def _check_ids(self, extra: Words, ids_TK: Tensor | None, header: Header) -> None:
        if not extra[:, 2].any():
            return
        if ids_TK is not None and extra[self._channel.rank, 2]:
            raise routing_error(ids_TK, self._num_experts)
        rank = int(extra[:, 2].nonzero()[0][0])
        bad, slot, value = (int(v) for v in extra[rank, 2:])
        raise peers_routing_error(rank, bad, slot, value, header.top_k, self._num_experts)


def describe(header: Header) -> str:
    """``dispatch (call 3) of layer 'moe.1'``."""
    return f"{header.op} (call {header.seq})" + (f" of layer {header.label!r}" if header.label else "")
