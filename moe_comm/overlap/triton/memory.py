"""Symmetric memory: a block of equal size on each rank that the kernels of all ranks write to.

    one rank's block    int64 words                                          bytes, for the operator
                        entered [W] │ calls [4, W] │ flags, even turn │ odd │ data, even turn │ data, odd turn

``peers_W`` holds the addresses of all ranks' blocks as seen from this rank. A *turn* is one call of an operator, as in
csrc/cuda. All ranks number them in the same way. Even and odd turns have separate flags and data:

    entering turn n     a rank notifies all: it has completed turn n - 1, and which operation it runs next
                        (``entered``, ``calls``)
    writing to a peer   in turn n waits until that peer has entered n - 1, and so completed n - 2, the last turn that
                        used the same half

A flag holds the number of the last turn that raised it. A wait ends when the flag is at least its turn's number, so
flags are never reset. A rank waits for a slower one only before it would overwrite memory that the slower one still
reads.

On CPUs blocks are anonymous files that the ranks of a host map; they have no name in /dev/shm and cannot be leaked. On
GPUs they are torch's symmetric memory, which is untested on machines with several GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.agree import digest
from moe_comm.comm.group_setup import channel_of, communicator_of, group_rank, group_size
from moe_comm.comm.header import other_collective
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.comm.shared_heap import mapped_blocks
from moe_comm.errors import ConfigError, PeerError, PeerTimeout
from moe_comm.gpu.blocks import ALIGN, Blocks, round_up, single_block, symmetric_blocks
from moe_comm.gpu.order import stream_order
from moe_comm.gpu.protocol import RowFlags
from moe_comm.kernels.triton.device import INTERPRETED
from moe_comm.overlap.triton.flags import CALL_SLOTS, FAULT_WORDS

MIN_DATA_BYTES = 1 << 14
"""Minimum size of the data of one half."""
LOCAL_TIMEOUT_S = 300.0
"""Timeout without a process group, in seconds."""
NOT_INTERPRETED = (
    "Triton kernels support CPU tensors only in Triton's interpreter; set TRITON_INTERPRET=1 before triton is first "
    "imported, or use another backend of the operator: Overlap(backend='chunked')"
)

TURN_ARGUMENTS = ("rank", "world", "turn", "call", "first_flag", "timeout_ns")
"""Kernel arguments whose values (1, multiples of 16) must not cause a recompilation."""

Names = Callable[[int], str]
"""Maps the index of a flag within a turn to its description in error messages."""


@dataclass(frozen=True)
class KernelTurn:
    """One call of an operator; the same on every rank.

    number: the value that its flags are raised to; starts at 1.
    call: digest of the operation, which ranks compare.
    first_flag: the turn's first flag, as an index into a block's int64 words.
    data: offset of the turn's data in a block, in bytes; a multiple of 256.
    description, names: for error messages.
    """

    number: int
    call: int
    first_flag: int
    data: int
    description: str
    names: Names = field(repr=False)


class SymmetricMemory:
    """The blocks of a group's ranks on one kind of device; created by ``memory_of``.

    Attributes:
        peers_W: int64 [W] on the device, addresses of the blocks. It changes when the blocks grow, so read it after
            the method ``turn`` has started the call.
        fault: int64 [FAULT_WORDS] on the device, where kernels report a wait that timed out.
        timeout_ns: timeout of each wait in a kernel.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        if device.type == "cpu" and not INTERPRETED:
            raise ConfigError(NOT_INTERPRETED)
        self.group, self.device = group, device
        self.rank, self.world = group_rank(group), group_size(group)
        self.channel: SharedChannel | None = channel_of(group) if group is not None else None
        # State and Report of csrc/cuda/args.h, which begin with a turn and a fault, and an abort word, which is zero.
        self._words = torch.zeros(2 + FAULT_WORDS + 1, dtype=torch.int64, device=device)
        self.fault = self._words[2:-1]
        self.failed: PeerError | None = None
        self.peers_W = torch.zeros(self.world, dtype=torch.int64, device=device)
        self._blocks: Blocks | None = None
        self._flags = self._data_bytes = 0  # of one half
        self._order = stream_order(self.channel.comm.keep if self.channel is not None else None, device)
        self._number = 0
        self._launched: list[tuple[torch.cuda.Event, Tensor, KernelTurn]] = []
        self._side: torch.cuda.Stream | None = None

    @property
    def timeout_s(self) -> float:
        """Timeout of a kernel's wait for a flag, in seconds: the timeout of the group's collectives."""
        return self.channel.timeout_s if self.channel is not None else LOCAL_TIMEOUT_S

    @property
    def timeout_ns(self) -> int:
        return int(self.timeout_s * 1e9)

    def turn(self, data_bytes: int, flags: int, names: Names, description: str) -> KernelTurn:
        """Start a turn with ``data_bytes`` and ``flags`` on each rank; the same on every rank.

        Collective if blocks must grow. The turn's first kernel calls ``enter`` (``flags.py``).

        Args:
            data_bytes: Size of the data.
            flags: Number of flags.
            names: Descriptions of the flags.
            description: Operator and sizes. Ranks whose descriptions differ raise an error.

        Raises:
            PeerError: an earlier turn failed.
            HeapError: a rank cannot allocate the memory; raised on every rank.
            RankMismatch: ranks make different calls. On GPUs if collectives are checked; on CPUs ``finish`` raises it.
        """
        self.check()
        self._order.enter()
        if self.device.type == "cuda" and self.channel is not None:
            # Compare before the blocks may grow, which is collective.
            self.channel.compare(description, torch.empty(0, device=self.device, dtype=torch.float32))
        if self._blocks is None or self._data_bytes < data_bytes or self._flags < flags:
            self._grow(data_bytes, flags, description)
        self._number += 1
        half = self._number % 2
        header = self._header_words()
        first_flag = header + half * self._flags
        data = (header + 2 * self._flags) * 8 + half * self._data_bytes
        call = digest(description) & 0x7FFFFFFF  # fits int32, so that kernels are not compiled for int64 too
        return KernelTurn(self._number, call, first_flag, data, description, names)

    def data(self, turn: KernelTurn, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Return a view of this rank's data of ``turn``, ``offset`` bytes (a multiple of 256) from its start. It is
        valid until the next turn starts."""
        assert self._blocks is not None
        first = turn.data + offset
        return self._blocks.own[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def row_flags(self, turn: KernelTurn) -> RowFlags:
        """Return where kernels in CUDA C++ find the flags of ``turn``, and where they report a missing one."""
        state, abort, first = self._words[1:], self._words[-1:], turn.first_flag
        return RowFlags(self.peers_W, state, state, abort, self.rank, self.world, first, turn.number, self.timeout_ns)

    def fork(self) -> AbstractContextManager[Any]:
        """Return a context whose kernels run on a side stream, after what the current one has been given so far, and
        beside what it is given later. ``join`` ends it. On CPUs kernels run one after the other."""
        if self.device.type != "cuda":
            return nullcontext()
        if self._side is None:
            self._side = torch.cuda.Stream(self.device, priority=-1)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._side)

    def join(self) -> None:
        """Let the current stream wait for the side stream."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)

    def finish(self, turn: KernelTurn) -> None:
        """Finish ``turn`` after its last kernel. On CPUs, raise its errors. On GPUs, kernels may not have run yet, so a
        later ``turn`` or ``check`` raises them.

        Raises:
            PeerTimeout: a rank did not raise its flag in time.
            RankMismatch: a rank ran another operation.
        """
        if self.device.type == "cpu":
            self._raise(self.fault, turn)
            self._compare(turn)
            return
        report = torch.empty(FAULT_WORDS, dtype=torch.int64, pin_memory=True, device="cpu")
        report.copy_(self.fault, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))  # the device need not be the current one
        self._launched.append((event, report, turn))

    def check(self, wait: bool = False) -> None:
        """Raise the errors of completed turns. wait: wait for all turns first.

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
        """Release the memory. All ranks must have completed their last turn."""
        self._blocks = None
        self.failed = self.failed or PeerError("this symmetric memory is closed")

    def _header_words(self) -> int:
        return round_up((1 + CALL_SLOTS) * self.world * 8) // 8

    def _raise(self, report: Tensor, turn: KernelTurn) -> None:
        failed, rank, flag, expected, value = report.tolist()
        if not failed:
            return
        if flag < self.world:
            name = f"flag {flag} (rank {rank} has entered turn {expected})"
        else:
            index = flag - turn.first_flag
            name = f"flag {index} ({turn.names(index)})"
        peer = f"rank {rank}"
        if self.channel is not None and self.channel.comm.peers is not None:
            peer = self.channel.comm.peers.describe(rank)
        self.failed = PeerTimeout(
            f"rank {self.rank} in {turn.description} (turn {turn.number}): waited {self.timeout_s:g} s for {peer} to "
            f"raise {name}; its value is {value}, expected {expected}. That rank has exited, hangs, is slow, or makes "
            f"other calls. This group's Triton operators are unusable now: restart the ranks, or increase timeout_s."
        )
        raise self.failed

    def _compare(self, turn: KernelTurn) -> None:
        """Raise RankMismatch if a rank that is in this turn or a later one runs another operation in it.

        Only this turn's result is lost then, because all ranks write within the agreed sizes.
        """
        assert self._blocks is not None
        words = self._blocks.own[: self._header_words() * 8].view(torch.int64)
        calls_W = words[self.world :][turn.number % CALL_SLOTS * self.world :][: self.world].tolist()
        entered_W = words[: self.world].tolist()
        others = [
            rank
            for rank in range(self.world)
            if turn.number <= entered_W[rank] < turn.number + CALL_SLOTS - 1 and calls_W[rank] != turn.call
        ]
        if others:
            raise other_collective(self.rank, turn.number, turn.description, f"ranks {others} are in another")

    def _grow(self, data_bytes: int, flags: int, description: str) -> None:
        """Allocate larger blocks on all ranks. The exchange is also a barrier: all ranks have completed earlier
        turns."""
        self.check(wait=True)
        data_bytes = max(_power_of_two(data_bytes), MIN_DATA_BYTES, self._data_bytes)
        flags = max(_power_of_two(flags), ALIGN // 8, self._flags)
        total = round_up((self._header_words() + 2 * flags) * 8 + 2 * data_bytes)
        blocks = self._allocated(total, description)
        if self.device.type == "cuda" or self.world == 1:
            blocks.own[: self.world * 8].view(torch.int64).fill_(self._number)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if self.channel is not None:
                own_word = torch.zeros(1, dtype=torch.int64, device="cpu")
                self.channel.all_gather(own_word, f"the start of symmetric memory for {description}")
        self._blocks, self._flags, self._data_bytes = blocks, flags, data_bytes
        self.peers_W = torch.tensor(blocks.addresses, dtype=torch.int64, device=self.device)

    def _allocated(self, total: int, description: str) -> Blocks:
        if self.channel is None or self.world == 1:
            return single_block(total, self.device)
        if self.device.type == "cuda":
            assert self.group is not None
            return symmetric_blocks(self.group, self.device, total)
        numbers = self._number.to_bytes(8, "little") * self.world
        return mapped_blocks(self.channel, total, f"symmetric memory for {description}", numbers)


_alone = lru_cache(partial(SymmetricMemory, None))


def memory_of(group: ProcessGroup | None, device: torch.device) -> SymmetricMemory:
    """Return the symmetric memory of ``group`` on ``device``. The first call creates it and is collective.

    Raises:
        ConfigError: CPU tensors outside Triton's interpreter.
        PeerDied, PeerTimeout: a rank failed or did not call in time.
    """
    if group is None:
        return _alone(device)
    return communicator_of(group).keep(("symmetric memory", device), lambda: SymmetricMemory(group, device))


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
