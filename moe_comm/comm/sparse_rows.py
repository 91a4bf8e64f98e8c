"""Transfers of single rows of tensors between ranks, which all ranks know beforehand.

    transfers (source rank, row) ─▶ (destination rank, row)      rank 0    rows 0 1 2   row 1 ─▶ rank 1 and rank 2
                                                                 rank 2    rows 0 1     row 0 ─▶ rank 1

CPU ranks of one host read the rows of their peers in shared memory: a source copies each row once, whatever the number
of its destinations. Other ranks send the rows with one all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_comm.comm.channel import Channel
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.errors import HeapError
from moe_comm.runtime.memory import DTYPE_CODES, block, from_capsule, warm_rows

if TYPE_CHECKING:
    from moe_comm._C import Heap

FLAG_BYTES = 64
"""Size of the flag of each rank at the start of a block of the native core's ``Rendezvous``."""


@dataclass(frozen=True)
class RowTransfer:
    """A row that is sent: ranks, and its index in the tensors of the source and of the destination."""

    source: int
    source_row: int
    destination: int
    destination_row: int

    def reversed(self) -> RowTransfer:
        """Return the transfer in the other direction."""
        return RowTransfer(self.destination, self.destination_row, self.source, self.source_row)


Receive = Callable[[RowTransfer, Sequence[Tensor]], None]


def into(tensors: Sequence[Tensor]) -> Receive:
    """Return a function that copies each row to its destination row of ``tensors``."""

    def receive(one: RowTransfer, rows: Sequence[Tensor]) -> None:
        for tensor, row in zip(tensors, rows, strict=True):
            tensor[one.destination_row].copy_(row)

    return receive


@torch.no_grad()
def transfer_rows(
    channel: SharedChannel,
    transfers: Sequence[RowTransfer],
    tensors: Sequence[Tensor],
    receive: Receive,
    what: str,
    memory: Tensor | None = None,
) -> int:
    """Send rows of ``tensors``. Collective; nothing happens if there are no transfers.

    Args and result: see ``start_rows``.
    """
    sent, finish = start_rows(channel, transfers, tensors, receive, what, memory)
    finish()
    return sent


@torch.no_grad()
def start_rows(
    channel: SharedChannel,
    transfers: Sequence[RowTransfer],
    tensors: Sequence[Tensor],
    receive: Receive,
    what: str,
    memory: Tensor | None = None,
) -> tuple[int, Callable[[], None]]:
    """Start to send rows of ``tensors``. Collective; nothing happens if there are no transfers.

    Args:
        transfers: the same on all ranks, between different ranks.
        tensors: [N, ...] local tensors of one dtype and device; only N may differ between ranks.
        receive: called once for each transfer to this rank, in their order, with the row of each tensor, valid during
            the call only.
        what: description of the transfer, for errors.
        memory: the second result of ``new_block``, if the rows of this rank are in the first, in the order of
            ``transfers`` and at multiples of ``BLOCK_ALIGN``. None: elsewhere.

    Returns:
        Bytes of the rows that this rank sends, and a function that waits for the rows and calls ``receive``. It is
        collective, called once. Rows that are sent have been read by now; those that peers read in shared memory are
        read in the function.
    """
    if not transfers:
        return 0, lambda: None
    counts, dtype = [tensor.shape[1:].numel() for tensor in tensors], tensors[0].dtype
    size, rank = sum(counts) * dtype.itemsize, channel.rank
    sent = sum(one.source == rank for one in transfers) * size

    def blocks(once: bool) -> tuple[list[list[int]], Pack, Use]:
        """Return the sizes of blocks and the functions of ``start_blocks``. once: a block has each row once. Otherwise
        it has one for each transfer, by destination."""
        starts, own = dict[object, int](), dict[int, int]()
        sizes = [[0] * channel.world for _ in range(channel.world)]

        def key(one: RowTransfer) -> object:
            return (one.source, one.source_row) if once else one

        for one in transfers if once else sorted(transfers, key=lambda one: one.destination):
            if key(one) not in starts:
                start = starts[key(one)] = sum(sizes[one.source])
                sizes[one.source][one.destination] += aligned_bytes(size)
                if one.source == rank:
                    own[start] = one.source_row

        def pack(block_: Tensor) -> None:
            for start, row in own.items():
                out = block_[start : start + size].view(dtype)
                torch.cat([tensor[row].reshape(-1) for tensor in tensors], out=out)

        def use(read: Read) -> None:
            for one in transfers:
                if one.destination == rank:
                    parts = read(one.source, starts[key(one)], size).view(dtype).split(counts)
                    receive(one, [part.view(of.shape[1:]) for part, of in zip(parts, tensors, strict=True)])

        return sizes, pack, use

    if not channel.uses_shared_memory(tensors[0]):
        return sent, start_blocks(channel, tensors[0].device, blocks(once=False), what)

    @torch.no_grad()
    def share() -> None:
        sizes, pack, use = blocks(once=True)
        shared = SharedBlocks(sum(sizes[rank]), len(transfers) * size, pack, use, memory)
        if not share_blocks(channel, shared, what):
            start_blocks(channel, tensors[0].device, blocks(once=False), what)()

    return sent, share


def start_blocks(
    channel: SharedChannel, device: torch.device, blocks: tuple[Sequence[Sequence[int]], Pack, Use], what: str
) -> Callable[[], None]:
    """Start to send blocks of bytes with one all-to-all. Collective.

    Args:
        device: device of the blocks.
        blocks: [source][destination], bytes of the block of each source, which has the parts for all destinations in
            order; a function that writes this rank's block; one that reads its parts of all blocks.
        what: description of the transfer, for errors.

    Returns:
        A function that waits for the blocks and reads this rank's parts. Called once.
    """
    sizes, pack, use = blocks
    rank = channel.rank
    receive = [of_source[rank] for of_source in sizes]
    block = warm_rows(1, sum(sizes[rank]), torch.uint8, device).view(-1)
    pack(block)
    # Not the shared channel: it takes another path on a rank whose sizes happen to be equal.
    pending = Channel(channel.comm, channel.timeout_s).start_all_to_all(block, sizes[rank], receive, what)
    # Start of each source's block among the received bytes, which have only this rank's part of the block.
    starts = [sum(receive[:source]) - sum(of_source[:rank]) for source, of_source in enumerate(sizes)]

    @torch.no_grad()
    def finish() -> None:
        received = pending()
        use(lambda source, first, size: received[starts[source] + first :][:size])

    return finish


BLOCK_ALIGN = 64
"""Alignment in bytes of the memory that ``Read`` returns: a cache line, which is enough for all dtypes."""
Read = Callable[[int, int, int], Tensor]
"""Function of a rank, the first byte in its block (a multiple of ``BLOCK_ALIGN``), and a number of bytes. Returns them
as uint8 [bytes], valid while the rank keeps its block, at least during ``SharedBlocks.use``."""
Pack = Callable[[Tensor], None]
Use = Callable[[Read], None]


def aligned_bytes(size: int) -> int:
    """Return ``size`` rounded up to a multiple of ``BLOCK_ALIGN``."""
    return -(-size // BLOCK_ALIGN) * BLOCK_ALIGN


@dataclass(frozen=True)
class SharedBlocks:
    """One rank's part in ``share_blocks``.

    Attributes:
        size: bytes of this rank's block.
        transferred: bytes that all ranks read; compared between ranks.
        fill: writes this rank's block, uint8 [size].
        use: called once, when the blocks of all ranks are filled. Peers read this rank's block until it returns on all
            ranks.
        memory: the second result of ``new_block``; its first one is filled already. None: allocate a block.
    """

    size: int
    transferred: int
    fill: Pack
    use: Use
    memory: Tensor | None = None


def new_block(channel: SharedChannel, size: int) -> tuple[Tensor, Tensor] | None:
    """Return a block of uint8 [size] for ``SharedBlocks``, and the memory that contains it; None without room."""
    try:
        memory = _allocate(channel, channel.heap, size)
    except HeapError:
        return None
    return _block_of(channel, memory, size), memory


def _allocate(channel: SharedChannel, heap: Heap, size: int) -> Tensor:
    word = torch.float32
    return block(heap, 1, (channel.world * FLAG_BYTES + aligned_bytes(size)) // word.itemsize, word).view(-1)


def _block_of(channel: SharedChannel, memory: Tensor, size: int) -> Tensor:
    flags = channel.world * FLAG_BYTES
    return memory.view(torch.uint8)[flags : flags + size]


def share_blocks(channel: SharedChannel, blocks: SharedBlocks, what: str) -> bool:
    """Let each rank read a block of each other rank in shared memory. Collective.

    Requires ``channel.uses_shared_memory`` of CPU tensors.

    Returns:
        False on every rank if a rank has no room; ``use`` was not called then.
    """
    flags = channel.world * FLAG_BYTES
    word = torch.float32

    memory = blocks.memory

    def offer(heap: Heap) -> Tensor:
        nonlocal memory
        if memory is None:
            memory = _allocate(channel, heap, blocks.size)
            blocks.fill(_block_of(channel, memory, blocks.size))
        return memory

    def body(rendezvous: Any) -> bool:
        peers = [rank for rank in range(channel.world) if rank != channel.rank]
        while peers:  # all of them first: if one has no room, nothing is read
            peers.remove(rendezvous.next(peers))

        def read(rank: int, first: int, size: int) -> Tensor:
            if rank == channel.rank:  # valid for as long as the function is kept
                assert memory is not None
                return memory.view(torch.uint8)[flags + first :][:size]
            words = rendezvous.rows(rank, flags + first, 1, -(-size // word.itemsize), DTYPE_CODES[word])
            return from_capsule(words).view(-1).view(torch.uint8)[:size]

        blocks.use(read)
        return True

    return channel.rendezvous(blocks.transferred, word, what, offer, body) is True
