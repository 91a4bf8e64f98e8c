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


@torch.no_grad()
def transfer_rows(
    channel: SharedChannel, transfers: Sequence[RowTransfer], tensors: Sequence[Tensor], receive: Receive, what: str
) -> None:
    """Send rows of ``tensors``. Collective; nothing happens if there are no transfers.

    Args:
        transfers: the same on all ranks, between different ranks.
        tensors: [N, ...] local tensors of one dtype and device; only N may differ between ranks.
        receive: called once for each transfer to this rank, in their order, with the row of each tensor, valid during
            the call only.
        what: description of the transfer, for errors.

    Raises:
        RankMismatch, PeerDied, PeerTimeout: a rank failed, or made another call.
    """
    if not transfers:
        return
    here = [one for one in transfers if one.destination == channel.rank]
    shapes = [tensor.shape[1:] for tensor in tensors]

    def deliver(one: RowTransfer, row: Tensor) -> None:
        parts = row.split([shape.numel() for shape in shapes])
        receive(one, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)])

    if channel.can_sum_in_memory(tensors[0]) and _through_memory(channel, transfers, here, tensors, deliver, what):
        return
    width = sum(shape.numel() for shape in shapes)
    ordered = sorted((one for one in transfers if one.source == channel.rank), key=lambda one: one.destination)
    send, receive_sizes = [0] * channel.world, [0] * channel.world
    for one in ordered:
        send[one.destination] += width
    for one in here:
        receive_sizes[one.source] += width
    flat = _pack(tensors, [one.source_row for one in ordered])
    # Not the shared channel: it takes another path on a rank whose sizes happen to be equal.
    received = Channel(channel.comm, channel.timeout_s).all_to_all(flat.view(-1), send, receive_sizes, what)
    by_source = iter(received.view(len(here), width))
    rows = {id(one): next(by_source) for one in sorted(here, key=lambda one: one.source)}
    for one in here:
        deliver(one, rows[id(one)])


def _pack(tensors: Sequence[Tensor], rows: Sequence[int], out: Tensor | None = None) -> Tensor:
    """Return [len(rows), width], the given rows of all tensors."""
    width = sum(tensor.shape[1:].numel() for tensor in tensors)
    packed = tensors[0].new_empty(len(rows), width) if out is None else out
    for place, row in enumerate(rows):
        torch.cat([tensor[row].reshape(-1) for tensor in tensors], out=packed[place])
    return packed


def _through_memory(
    channel: SharedChannel,
    transfers: Sequence[RowTransfer],
    here: Sequence[RowTransfer],
    tensors: Sequence[Tensor],
    deliver: Callable[[RowTransfer, Tensor], None],
    what: str,
) -> bool:
    """Transfer through shared memory. Return False on every rank if a rank has no room."""
    dtype, width = tensors[0].dtype, sum(tensor.shape[1:].numel() for tensor in tensors)
    flags = channel.world * FLAG_BYTES // dtype.itemsize
    by_rank: list[dict[int, int]] = [{} for _ in range(channel.world)]  # rows in the block of each rank
    for one in transfers:
        rows = by_rank[one.source]
        rows.setdefault(one.source_row, len(rows))

    def offer(heap: Heap) -> Tensor:
        rows = list(by_rank[channel.rank])
        offered = block(heap, 1, flags + len(rows) * width, dtype).view(-1)
        _pack(tensors, rows, offered[flags:].view(len(rows), width))
        return offered

    def body(rendezvous: Any) -> bool:
        peers = [rank for rank in range(channel.world) if rank != channel.rank]
        while peers:  # all of them first: if one has no room, no row is received
            peers.remove(rendezvous.next(peers))
        for one in here:
            first = (flags + by_rank[one.source][one.source_row] * width) * dtype.itemsize
            row = from_capsule(rendezvous.rows(one.source, first, 1, width, DTYPE_CODES[dtype]))
            deliver(one, row[0])
        return True

    total = len(transfers) * width * dtype.itemsize
    return channel.rendezvous(total, dtype, what, offer, body) is True
