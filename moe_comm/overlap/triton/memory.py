"""Symmetric memory: a block of equal size on every rank that all ranks' kernels write to, and the turns it is used in.

    one rank's block    int64 words                                          bytes, as the operator wants
                        entered [W] │ calls [4, W] │ flags, even turn │ odd │ data, even turn │ data, odd turn

``peers_W`` holds the addresses of all ranks' blocks as seen from this rank; kernels make pointers of them. A *turn* is
one call of an operator; every rank counts its turns alike. Even and odd turns have flags and data of their own:

    entering turn n     each rank tells all: it has done n - 1, and what it is about to do (``entered``, ``calls``)
    writing to a peer   in turn n waits until that peer has entered n - 1, so has done n - 2, the last user of this half

What is there of a turn's flags is older numbers, so nothing is ever reset, and no rank waits for a slower one except
where it would overwrite what that one still reads.

On CPUs blocks are anonymous files that the ranks of a host map (no name in /dev/shm, so nothing to leave behind); on
GPUs torch's symmetric memory. The latter has not run: no machine with several GPUs was at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.header import other_collective
from moe_comm.comm.meeting import channel_of, communicator_of, digest, group_rank, group_size
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.errors import ConfigError, PeerError, PeerTimeout
from moe_comm.gpu.blocks import ALIGN, Blocks, alone, mapped, symmetric, up
from moe_comm.kernels.triton.device import INTERPRETED
from moe_comm.overlap.triton.flags import CALL_SLOTS, FAULT_WORDS
from moe_comm.runtime.host import host_word

SMALLEST = 1 << 14
"""Bytes of data a half has at least."""
LOCAL_TIMEOUT_S = 300.0
NOT_INTERPRETED = (
    "Triton kernels take CPU tensors only in Triton's interpreter; set TRITON_INTERPRET=1 before triton is first "
    "imported, or use another backend of the operator: Overlap(backend='chunked')"
)

TURN_ARGUMENTS = ("rank", "world", "turn", "call", "first_flag", "timeout_ns")
"""Arguments of kernels for whose values (1, multiples of 16) none must be compiled anew."""

Names = Callable[[int], str]
"""What the error says of a turn's flag: its place among the turn's flags -> words."""


@dataclass(frozen=True)
class Turn:
    """One call of an operator, alike on every rank.

    number: what its flags are raised to; from 1 on.
    call: by which ranks compare what they do.
    first_flag: the turn's first flag, as an index into a block's int64 words.
    data: the turn's data, as bytes from the start of a block; a multiple of 256.
    description, names: for errors.
    """

    number: int
    call: int
    first_flag: int
    data: int
    description: str
    names: Names = field(repr=False)


@dataclass(frozen=True)
class _Block:
    """The blocks of all ranks, and how each is divided."""

    blocks: Blocks
    flags: int
    data_bytes: int

    @property
    def own(self) -> Tensor:
        return self.blocks.own


class SymmetricMemory:
    """The blocks of a group's ranks on one kind of device; made by ``memory_of``.

    peers_W: int64 [W] on the device, addresses of the blocks. It changes when the blocks grow, so take it after
        ``turn``.
    fault: int64 [FAULT_WORDS] on the device, where kernels report a wait that ran out of time.
    timeout_ns: of every wait in a kernel.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        if device.type == "cpu" and not INTERPRETED:
            raise ConfigError(NOT_INTERPRETED)
        self.group, self.device = group, device
        self.rank, self.world = group_rank(group), group_size(group)
        self.channel: SharedChannel | None = channel_of(group) if group is not None else None
        self.fault = torch.zeros(FAULT_WORDS, dtype=torch.int64, device=device)
        self.failed: PeerError | None = None
        self.peers_W = torch.zeros(self.world, dtype=torch.int64, device=device)
        self._block: _Block | None = None
        self._number = 0
        self._launched: list[tuple[torch.cuda.Event, Tensor, Turn]] = []

    @property
    def timeout_s(self) -> float:
        """Seconds a kernel waits for a flag: as long as the group's collectives wait for a peer."""
        return self.channel.timeout_s if self.channel is not None else LOCAL_TIMEOUT_S

    @property
    def timeout_ns(self) -> int:
        return int(self.timeout_s * 1e9)

    def turn(self, data_bytes: int, flags: int, description: str, names: Names) -> Turn:
        """Begin a turn with room for ``data_bytes`` and ``flags`` on every rank; both are the same on every rank.

        Collective where blocks must grow for it. The turn's first kernel calls ``enter`` (``device.py``).

        Args:
            description: the operator and its sizes; ranks that differ in it get an error.

        Raises:
            PeerError: an earlier turn failed.
            HeapError: no room, on every rank.
            RankMismatch: ranks differ, on GPUs if collectives are checked; on CPUs ``finish`` says so.
        """
        self.check()
        if self.device.type == "cuda" and self.channel is not None:
            # Before it may grow, which is collective: ranks in different calls would meet there.
            self.channel.compare(description, torch.empty(0, device=self.device))
        if self._block is None or self._block.data_bytes < data_bytes or self._block.flags < flags:
            self._grow(data_bytes, flags, description)
        assert self._block is not None
        self._number += 1
        half = self._number % 2
        header = self._header_words()
        first_flag = header + half * self._block.flags
        data = (header + 2 * self._block.flags) * 8 + half * self._block.data_bytes
        call = digest(description) & 0x7FFFFFFF  # an int32 for every kernel, lest one be compiled for int64 too
        return Turn(self._number, call, first_flag, data, description, names)

    def data(self, turn: Turn, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A view of the own block's data of ``turn``, ``offset`` bytes (a multiple of 256) from its start. Valid until
        the next turn begins."""
        assert self._block is not None
        first = turn.data + offset
        return self._block.own[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def finish(self, turn: Turn) -> None:
        """After the last kernel of ``turn``. On CPUs it raises what went wrong; on GPUs, where kernels may not have
        run yet, a later ``turn`` or ``check`` does.

        Raises:
            PeerTimeout: a rank did not raise its flag in time. RankMismatch: a rank did something else.
        """
        if self.device.type == "cpu":
            self._raise(self.fault, turn)
            self._compare(turn)
            return
        report = torch.empty(FAULT_WORDS, dtype=torch.int64, pin_memory=True)
        report.copy_(self.fault, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._launched.append((event, report, turn))

    def check(self, wait: bool = False) -> None:
        """Raise what went wrong in the turns that are over; wait: for those that are not, too.

        Raises:
            PeerTimeout: a rank did not raise its flag in time.
        """
        while self._launched and (wait or self._launched[0][0].query()):
            event, report, turn = self._launched.pop(0)
            event.synchronize()
            self._raise(report, turn)
        if self.failed is not None:
            raise type(self.failed)(*self.failed.args)

    def close(self) -> None:
        """Give the memory back. Every rank must have done its last turn."""
        self._block = None
        self.failed = self.failed or PeerError("this symmetric memory is closed")

    def _header_words(self) -> int:
        return up((1 + CALL_SLOTS) * self.world * 8) // 8

    def _raise(self, report: Tensor, turn: Turn) -> None:
        failed, flag, rank, wanted, seen = report.tolist()
        if not failed:
            return
        if flag < self.world:
            name = f"flag {flag}, that rank {rank} has entered turn {wanted}"
        else:
            place = flag - turn.first_flag
            name = f"flag {place}, {turn.names(place)}"
        who = f"rank {rank}"
        if self.channel is not None and self.channel.comm.peers is not None:
            who = self.channel.comm.peers.describe(rank)
        self.failed = PeerTimeout(
            f"rank {self.rank} in {turn.description} (turn {turn.number}): waited {self.timeout_s:g} s for {who} to raise "
            f"{name}; it stands at {seen} of {wanted}. That rank is dead, stuck, slow, or took another path through "
            f"the program. This group's Triton operators are unusable now: restart the ranks, or raise timeout_s."
        )
        raise self.failed

    def _compare(self, turn: Turn) -> None:
        """Whether those that are in this turn or the next do the same in it; others have not said, or said more since.

        By then nothing is lost but this turn's result: every rank writes within what all have made room for.
        """
        assert self._block is not None
        words = self._block.own[: self._header_words() * 8].view(torch.int64)
        calls_W = words[self.world :][turn.number % CALL_SLOTS * self.world :][: self.world].tolist()
        entered_W = words[: self.world].tolist()
        odd = [
            rank
            for rank in range(self.world)
            if turn.number <= entered_W[rank] < turn.number + CALL_SLOTS - 1 and calls_W[rank] != turn.call
        ]
        if odd:
            raise other_collective(self.rank, turn.number, turn.description, f"ranks {odd} are in another")

    def _grow(self, data_bytes: int, flags: int, description: str) -> None:
        """New blocks for all. The exchange is a barrier too: nobody is in an earlier turn any more when it is over."""
        self.check(wait=True)
        old = self._block
        data_bytes = max(_power(data_bytes), SMALLEST, old.data_bytes if old else 0)
        flags = max(_power(flags), ALIGN // 8, old.flags if old else 0)
        total = up((self._header_words() + 2 * flags) * 8 + 2 * data_bytes)
        blocks = self._blocks(total, description)
        if self.device.type == "cuda" or self.channel is None:
            blocks.own[: self.world * 8].view(torch.int64).fill_(self._number)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if self.channel is not None:
                own_word = torch.zeros(1, dtype=torch.int64)
                self.channel.all_gather(own_word, f"the start of symmetric memory for {description}")
        self._block = _Block(blocks, flags, data_bytes)
        self.peers_W = torch.tensor(blocks.addresses, dtype=torch.int64, device=self.device)

    def _blocks(self, total: int, description: str) -> Blocks:
        if self.channel is None:
            return alone(total, self.device)
        if self.device.type == "cuda":
            assert self.group is not None
            return symmetric(self.group, self.device, total)
        channel, what = self.channel, f"symmetric memory for {description}"

        def gather(words: list[int]) -> list[list[int]]:
            told: list[list[int]] = channel.all_gather(torch.tensor(words).to(channel.control_device), what).tolist()
            return told

        return mapped(gather, self.rank, host_word(), total, what, self._number.to_bytes(8, "little") * self.world)


_alone = lru_cache(partial(SymmetricMemory, None))


def memory_of(group: ProcessGroup | None, device: torch.device) -> SymmetricMemory:
    """The symmetric memory of ``group`` on ``device``, made on first use (collective then).

    Raises:
        ConfigError: CPU tensors outside Triton's interpreter.
        PeerDied, PeerTimeout: a rank does not take part.
    """
    if group is None:
        return _alone(device)
    return communicator_of(group).keep(("symmetric memory", device), lambda: SymmetricMemory(group, device))


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
