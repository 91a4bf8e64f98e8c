"""Row buffers of ``peer_to_peer`` in a rank's heap, and the format of rows in them.

    one buffer   rows, encoded [R, X] │ their fp32 scales [R, S] │ links [R]     each aligned to 256 bytes

There are scales if rows are encoded as e4m3. There are links if rows are relayed, that is, sent once to each rank and
copied there: the link of a row names the row that it is a copy of.

A dispatch offers the largest free range of the heap to the peers (``Reservation``), and keeps the part that the rows
need. Ranks compute the sizes of all buffers from the exchanged counts, so all ranks detect a rank without room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_comm.comm.header import Header, describe
from moe_comm.dispatch.wire_dtype import WireDtype, apply_scales, as_scaled
from moe_comm.errors import HeapError
from moe_comm.gpu.blocks import ALIGN, round_up
from moe_comm.gpu.heap import Heap, HeapBlock
from moe_comm.gpu.protocol import BLOCK_SCALES, NOT_RELAYED, ROW_SCALES, SAME, UNLIMITED, Offer, RelayLinks
from moe_comm.kernels.fp8 import ScaledRows


@dataclass(frozen=True)
class RowFormat:
    """Format of received rows of ``hidden`` elements of ``dtype``. relay: whether buffers have links."""

    hidden: int
    dtype: torch.dtype
    wire_dtype: WireDtype
    relay: bool

    @cached_property
    def packing(self) -> int:
        """How the kernel encodes rows; see Format in csrc/cuda/args.h. SAME if it does not."""
        if self.wire_dtype.format != "fp8" or self.wire_dtype.scales == "group" or not self.hidden:
            return SAME
        return ROW_SCALES if self.wire_dtype.scales == "token" else BLOCK_SCALES

    @cached_property
    def words(self) -> tuple[int, int]:
        """Encoding of the rows, and whether scales are powers of two; see ``Sending``."""
        return self.packing, int(self.wire_dtype.power_of_two)

    @cached_property
    def rounds(self) -> bool:
        """Whether the wire dtype changes rows."""
        return self.wire_dtype.narrows(self.dtype)

    @cached_property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize if self.packing == SAME else round_up(self.hidden, 16)

    @cached_property
    def scales(self) -> int:
        """Number of scales per row."""
        return 0 if self.packing == SAME else self.wire_dtype.num_scales(self.hidden)

    @cached_property
    def bare(self) -> bool:
        """Whether there are neither scales nor links."""
        return self.packing == SAME and not self.relay

    def part_bytes(self, num_rows: int) -> tuple[int, int, int]:
        """Return the bytes of rows, scales and links."""
        return num_rows * self.row_bytes, 4 * num_rows * self.scales, 8 * num_rows * self.relay

    def buffer_bytes(self, num_rows: int) -> int:
        """Return the size of a buffer in the heap."""
        if self.bare:
            return round_up(num_rows * self.row_bytes) or ALIGN
        return max(ALIGN, sum(map(round_up, self.part_bytes(num_rows))))

    def capacity(self, num_bytes: int) -> int:
        """Return how many rows fit into a buffer of ``num_bytes``; UNLIMITED if they take no memory."""
        if not (row_bytes := sum(self.part_bytes(1))):
            return UNLIMITED
        rows = num_bytes // row_bytes
        while rows and self.buffer_bytes(rows) > num_bytes:
            rows -= 1
        return rows

    def offer(self, first: int, num_rows: int) -> Offer:
        """Return the addresses of the parts of a buffer for ``num_rows`` rows at byte ``first`` of the block."""
        rows, scales, _ = map(round_up, self.part_bytes(num_rows))
        return Offer(first, 0, first + rows if self.scales else 0, first + rows + scales if self.relay else 0)

    def allocate(self, heap: Heap, num_rows: int) -> ReceiveBuffer:
        """Allocate a buffer for ``num_rows`` rows."""
        block = heap.block(self.buffer_bytes(num_rows))
        offer = self.offer(block.first, num_rows)
        parts = ((block, max(0, at - block.first)) for at in (offer.rows, offer.scales, offer.links))
        return ReceiveBuffer(self, offer, *self._tensors(num_rows, *parts))

    def _tensors(self, num_rows: int, *parts: tuple[HeapBlock, int]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return rows, scales and links in ``parts``: for each, a block and the offset in it."""
        dtype = self.dtype if self.packing == SAME else torch.uint8
        (of_rows, rows_at), (of_scales, scales_at), (of_links, links_at) = parts
        rows_RX = of_rows.matrix(rows_at, num_rows, self.row_bytes // dtype.itemsize, dtype)
        scale_RS = of_scales.matrix(scales_at, num_rows, self.scales, torch.float32) if self.packing != SAME else None
        link_R = of_links.matrix(links_at, num_rows, 1, torch.int64).view(-1) if self.relay else None
        return rows_RX, scale_RS, link_R


@dataclass(frozen=True, eq=False, slots=True)
class ReceiveBuffer:
    """A buffer for received rows: encoded rows, their scales and links. ``offer`` has their addresses, for peers."""

    row_format: RowFormat
    offer: Offer
    rows_RX: Tensor
    scale_RS: Tensor | None
    link_R: Tensor | None

    def rows(self, counts: Tensor | None = None) -> Tensor:
        """Return [R, D] decoded rows, after they have been received. counts: see ``apply_scales``."""
        if self.scale_RS is None:
            return self.rows_RX
        row_format, values_RD = self.row_format, self.rows_RX[:, : self.row_format.hidden]
        return apply_scales(values_RD, self.scale_RS, row_format.wire_dtype, row_format.dtype, counts)

    def scaled(self) -> ScaledRows:
        """Return the encoded rows, after they have been received. The buffer must have scales."""
        assert self.scale_RS is not None
        return as_scaled(self.rows_RX[:, : self.row_format.hidden], self.scale_RS)


class Reservation:
    """The largest free range of a heap, offered to peers before this rank knows how many rows it will receive.

    Call ``keep`` or ``free``.
    """

    def __init__(self, row_format: RowFormat, heap: Heap) -> None:
        self._row_format, self._heap, self._block = row_format, heap, heap.reserve()
        first, self.num_bytes = (0, 0) if self._block is None else (self._block.first, self._block.size)
        if row_format.bare and row_format.row_bytes:
            self.capacity = self.num_bytes // row_format.row_bytes
            self.offer = Offer(first, room=self.capacity)
        else:
            self.capacity = row_format.capacity(self.num_bytes)
            self.offer = row_format.offer(first, self.capacity)._replace(room=self.capacity)

    def free(self) -> None:
        """Free the range, unless rows were kept in it."""
        if self._block is not None:
            self._heap.keep(self._block)
            self._block = None

    def keep(self, num_rows: int) -> Tensor:
        """Return ``num_rows`` received rows, [R, D] and decoded, and free the rest."""
        block, row_format = self._block, self._row_format
        if not row_format.bare:
            return self._keep(num_rows).rows()
        assert block is not None
        self._block = None
        self._heap.shrink(block, num_rows * row_format.row_bytes)
        return block.matrix(0, num_rows, row_format.hidden, row_format.dtype)

    def keep_scaled(self, num_rows: int) -> ScaledRows:
        """Return ``num_rows`` received rows as they were encoded, and free the rest. The format must have scales."""
        return self._keep(num_rows).scaled()

    def _keep(self, num_rows: int) -> ReceiveBuffer:
        block, row_format = self._block, self._row_format
        assert block is not None
        self._block = None
        offer, sizes = self.offer, row_format.part_bytes(num_rows)
        offsets = (max(0, at - block.first) for at in (offer.rows, offer.scales, offer.links))
        ranges = [(offset, size) for offset, size in zip(offsets, sizes, strict=True) if size]
        kept = iter(self._heap.keep(block, *ranges))
        parts = ((next(kept) if size else block, 0) for size in sizes)
        return ReceiveBuffer(row_format, offer, *row_format._tensors(num_rows, *parts))


def relay_links(row_format: RowFormat, heap: Heap, offer: Offer, num_rows: int, blocks: int) -> RelayLinks:
    """Return the arguments of ``fan_out`` on ``blocks`` thread blocks, for at most ``num_rows`` rows at ``offer``."""
    if not row_format.relay:
        return NOT_RELAYED
    rows_at, scales_at, links_at = map(heap.address, (offer.rows, offer.scales, offer.links))
    return RelayLinks(rows_at, scales_at, links_at, num_rows, blocks)


def readable(heap: Heap, rows_RD: Tensor) -> tuple[Tensor, int]:
    """Return ``rows_RD`` in memory that peers can read, and its offset for an ``Offer``; 0 for no rows.

    The rows are unchanged, or copied into the heap.
    """
    if not rows_RD.numel():
        return rows_RD, 0
    if not (heap.owns(rows_RD) and rows_RD.is_contiguous()):
        rows_RD = heap.rows(rows_RD.shape[0], rows_RD.shape[1], rows_RD.dtype).copy_(rows_RD)
    return rows_RD, heap.offset(rows_RD)


def offset_of(heap: Heap, rows_RD: Tensor) -> int:
    """Return the offset of ``rows_RD``, which the heap owns, for an ``Offer``; 0 for no rows."""
    return heap.offset(rows_RD) if rows_RD.numel() else 0


def check_free_bytes(row_format: RowFormat, rows_W: Sequence[int], free_W: Sequence[int], operation: Header) -> None:
    """Raise the same ``HeapError`` on every rank if a rank has no room for the rows that it receives.

    rows_W: number of rows that each rank receives. free_W: bytes of the largest free block of each rank's heap.
    """
    most, free = max(rows_W), min(free_W)
    if (row_format.bare and 0 < most * row_format.row_bytes <= free) or row_format.buffer_bytes(most) <= free:
        return
    for rank, rows in enumerate(rows_W):
        if (needed := row_format.buffer_bytes(rows)) > free_W[rank]:
            raise HeapError(
                f"rank {rank} has no room in its heap for {rows} rows in {describe(operation)}: they need {needed} "
                f"bytes and its largest free block has {free_W[rank]}. Increase PeerToPeerOptions.heap_bytes on every "
                "rank, or dispatch fewer tokens at a time"
            )
