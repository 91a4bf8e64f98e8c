"""Row buffers of ``peer_to_peer`` in a rank's heap, and the format of rows in them.

    one buffer   rows, encoded [R, X] │ their fp32 scales [R, S] │ links [R]     each aligned to 256 bytes

There are scales if rows are encoded as e4m3. There are links if rows are relayed, that is, sent once to each rank and
copied there: the link of a row names the row that it is a copy of. Ranks compute the sizes of all buffers from the
exchanged counts, so all ranks detect a rank without room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_comm.comm.header import Header, describe
from moe_comm.dispatch.wire_dtype import WireDtype, apply_scales
from moe_comm.errors import HeapError
from moe_comm.gpu.blocks import ALIGN, round_up
from moe_comm.gpu.heap import Heap
from moe_comm.gpu.protocol import BLOCK_SCALES, NOT_RELAYED, ROW_SCALES, SAME, Offer, RelayLinks, address
from moe_comm.gpu.turns import Turns
from moe_comm.runtime.memory import DTYPE_CODES


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
        """The argument ``form`` of ``Turns.move``."""
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

    def allocate(self, heap: Heap, num_rows: int) -> ReceiveBuffer:
        """Allocate a buffer for ``num_rows`` rows.

        Raises:
            HeapError: no room.
        """
        block = heap.block(self.buffer_bytes(num_rows))
        if self.bare:
            return ReceiveBuffer(
                self, block.matrix(0, num_rows, self.hidden, self.dtype), None, None, Offer(block.first)
            )
        rows, scales, _ = self.part_bytes(num_rows)
        scales_offset, links_offset = round_up(rows), round_up(rows) + round_up(scales)
        dtype = self.dtype if self.packing == SAME else torch.uint8
        rows_RX = block.matrix(0, num_rows, self.row_bytes // dtype.itemsize, dtype)
        scale_RS = block.matrix(scales_offset, num_rows, self.scales, torch.float32) if self.packing != SAME else None
        link_R = block.matrix(links_offset, num_rows, 1, torch.int64).view(-1) if self.relay else None
        scales_at = block.first + scales_offset if scale_RS is not None and scale_RS.numel() else 0
        links_at = block.first + links_offset if link_R is not None and len(link_R) else 0
        return ReceiveBuffer(self, rows_RX, scale_RS, link_R, Offer(block.first, 0, scales_at, links_at))


@dataclass(frozen=True, eq=False, slots=True)
class ReceiveBuffer:
    """A buffer for received rows: encoded rows, their scales and links. ``offer`` has their addresses, for peers."""

    form: RowFormat
    rows_RX: Tensor
    scale_RS: Tensor | None
    link_R: Tensor | None
    offer: Offer

    def rows(self, counts: Tensor | None = None) -> Tensor:
        """Return [R, D] decoded rows, after they have been received. counts: see ``apply_scales``."""
        if self.scale_RS is None:
            return self.rows_RX
        form, values_RD = self.form, self.rows_RX[:, : self.form.hidden]
        return apply_scales(values_RD, self.scale_RS, form.wire_dtype, form.dtype, counts)

    def links(self, blocks: int) -> RelayLinks:
        """Return the arguments of ``fan_out`` on ``blocks`` thread blocks."""
        if self.link_R is None:
            return NOT_RELAYED
        rows_at, scales_at, links_at = map(address, (self.rows_RX, self.scale_RS, self.link_R))
        return RelayLinks(rows_at, scales_at, links_at, len(self.link_R), blocks)


def readable(heap: Heap, rows_RD: Tensor | None) -> Tensor | None:
    """Return ``rows_RD`` in memory that peers can read: unchanged, or copied into the heap.

    Raises:
        HeapError: no room for the copy.
    """
    if rows_RD is None or not rows_RD.numel() or (heap.owns(rows_RD) and rows_RD.is_contiguous()):
        return rows_RD
    return heap.rows(rows_RD.shape[0], rows_RD.shape[1], rows_RD.dtype).copy_(rows_RD)


def offset_of(heap: Heap, rows_RD: Tensor | None) -> int:
    """Return the offset of ``rows_RD`` for an ``Offer``; 0 for no rows."""
    return heap.offset(rows_RD) if rows_RD is not None and rows_RD.numel() else 0


def check_room(form: RowFormat, rows_W: Sequence[int], rooms_W: Sequence[int], header: Header) -> None:
    """Raise the same ``HeapError`` on every rank if a rank has no room for the rows that it receives.

    rows_W: number of rows that each rank receives. rooms_W: bytes of the largest free block of each rank's heap.
    """
    if form.buffer_bytes(max(rows_W)) <= min(rooms_W):
        return
    for rank, rows in enumerate(rows_W):
        if (needed := form.buffer_bytes(rows)) > rooms_W[rank]:
            raise HeapError(
                f"rank {rank} has no room in its heap for {rows} rows in {describe(header)}: they need {needed} bytes "
                f"and its largest free block has {rooms_W[rank]}. Increase PeerToPeerOptions.heap_bytes on every rank, "
                "or dispatch fewer tokens at a time"
            )


def move_rows(
    turns: Turns, x_TD: Tensor, ids_TK: Tensor, received: ReceiveBuffer, blocks: int
) -> tuple[Tensor, Tensor]:
    """Queue the kernels that move rows. Return the rows of this rank's experts, and the location of each slot's row."""
    place_TK = torch.empty_like(ids_TK)
    turns.move(x_TD, place_TK, DTYPE_CODES[x_TD.dtype], received.form.words, received.links(blocks))
    return received.rows(), place_TK
