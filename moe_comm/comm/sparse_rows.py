"""Transfers of single rows of tensors between ranks, which all ranks know beforehand.

    transfers (source rank, row) ─▶ (destination rank, row)      rank 0    rows 0 1 2   row 1 ─▶ rank 1 and rank 2
                                                                 rank 2    rows 0 1     row 0 ─▶ rank 1

CPU ranks of one host read the rows of their peers in shared memory: a source copies each row once, whatever the number
of its destinations. Other ranks send the rows with one all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_comm.comm.channel import Channel
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.errors import HeapError
from moe_comm.runtime.memory import DTYPE_CODES, block, from_capsule

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
) -> None:
    """Send rows of ``tensors``. Collective; nothing happens if there are no transfers.

    Args:
        transfers: the same on all ranks, between different ranks.
        tensors: [N, ...] local tensors of one dtype and device; only N may differ between ranks.
        receive: called once for each transfer to this rank, in their order, with the row of each tensor, valid during
            the call only.
        what: description of the transfer, for errors.
        memory: the second result of ``new_block``, if the rows of this rank are in the first, in the order of
            ``transfers`` and at multiples of ``BLOCK_ALIGN``. None: elsewhere.
    """
    if not transfers:
        return
    incoming = [transfer for transfer in transfers if transfer.destination == channel.rank]
    shapes = [tensor.shape[1:] for tensor in tensors]

    def deliver(transfer: RowTransfer, row: Tensor) -> None:
        parts = row.split([shape.numel() for shape in shapes])
        receive(transfer, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)])

    if channel.uses_shared_memory(tensors[0]):
        blocks = _blocks(channel, transfers, incoming, tensors, deliver)
        if share_blocks(channel, replace(blocks, memory=memory), what):
            return
    width = sum(shape.numel() for shape in shapes)
    ordered = sorted(
        (transfer for transfer in transfers if transfer.source == channel.rank),
        key=lambda transfer: transfer.destination,
    )
    send, receive_sizes = [0] * channel.world, [0] * channel.world
    for transfer in ordered:
        send[transfer.destination] += width
    for transfer in incoming:
        receive_sizes[transfer.source] += width
    flat = _pack(tensors, [transfer.source_row for transfer in ordered])
    # Not the shared channel: it takes another path on a rank whose sizes happen to be equal.
    received = Channel(channel.comm, channel.timeout_s).all_to_all(flat.view(-1), send, receive_sizes, what)
    by_source = iter(received.view(len(incoming), width))
    rows = {id(transfer): next(by_source) for transfer in sorted(incoming, key=lambda transfer: transfer.source)}
    for transfer in incoming:
        deliver(transfer, rows[id(transfer)])


def _pack(tensors: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Return [len(rows), width], the given rows of all tensors."""
    width = sum(tensor.shape[1:].numel() for tensor in tensors)
    packed = tensors[0].new_empty(len(rows), width)
    for index, row in enumerate(rows):
        _join(tensors, row, packed[index])
    return packed


def _join(tensors: Sequence[Tensor], row: int, out: Tensor) -> None:
    torch.cat([tensor[row].reshape(-1) for tensor in tensors], out=out)


def _blocks(
    channel: SharedChannel,
    transfers: Sequence[RowTransfer],
    incoming: Sequence[RowTransfer],
    tensors: Sequence[Tensor],
    deliver: Callable[[RowTransfer, Tensor], None],
) -> SharedBlocks:
    """Return this rank's part in a transfer through shared memory."""
    dtype, size = tensors[0].dtype, sum(tensor.shape[1:].numel() for tensor in tensors) * tensors[0].element_size()
    step = aligned_bytes(size)
    by_rank: list[dict[int, int]] = [{} for _ in range(channel.world)]  # rows in the block of each rank
    for transfer in transfers:
        rows = by_rank[transfer.source]
        rows.setdefault(transfer.source_row, len(rows))
    own = by_rank[channel.rank]

    def fill(block_: Tensor) -> None:
        for row, index in own.items():
            _join(tensors, row, block_[index * step : index * step + size].view(dtype))

    def use(read: Read) -> None:
        for transfer in incoming:
            deliver(
                transfer, read(transfer.source, by_rank[transfer.source][transfer.source_row] * step, size).view(dtype)
            )

    return SharedBlocks(len(own) * step, len(transfers) * size, fill, use)


BLOCK_ALIGN = 64
"""Alignment in bytes of the memory that ``Read`` returns: a cache line, which is enough for all dtypes."""
Read = Callable[[int, int, int], Tensor]
"""Function of a rank, the first byte in its block (a multiple of ``BLOCK_ALIGN``), and a number of bytes. Returns them
as uint8 [bytes], valid while the rank keeps its block, at least during ``SharedBlocks.use``."""


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
    fill: Callable[[Tensor], None]
    use: Callable[[Read], None]
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

    def offer(heap: Heap) -> Tensor:
        if blocks.memory is not None:
            return blocks.memory
        offered = _allocate(channel, heap, blocks.size)
        blocks.fill(_block_of(channel, offered, blocks.size))
        return offered

    def body(rendezvous: Any) -> bool:
        peers = [rank for rank in range(channel.world) if rank != channel.rank]
        while peers:  # all of them first: if one has no room, nothing is read
            peers.remove(rendezvous.next(peers))

        def read(rank: int, first: int, size: int) -> Tensor:
            words = rendezvous.rows(rank, flags + first, 1, -(-size // word.itemsize), DTYPE_CODES[word])
            return from_capsule(words).view(-1).view(torch.uint8)[:size]

        blocks.use(read)
        return True

    return channel.rendezvous(blocks.transferred, word, what, offer, body) is True
