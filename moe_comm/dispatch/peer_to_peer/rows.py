"""Where rows of ``peer_to_peer`` stand in a rank's heap, and how they are packed on the way there.

    one place   rows, as they travel [R, X] │ their fp32 scales [R, S] │ links [R]     each from a multiple of 256 bytes

Scales are there if rows travel as e4m3, links if they are relayed. Both ends know from the exchanged counts how large a
place is, so ranks can tell alike who has no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_comm.comm.header import Header, describe
from moe_comm.dispatch.wire_dtype import WireDtype, scaled
from moe_comm.errors import HeapError
from moe_comm.gpu.blocks import ALIGN, up
from moe_comm.gpu.heap import Heap
from moe_comm.gpu.protocol import BLOCK_SCALES, NOT_RELAYED, ROW_SCALES, SAME, Links, Offer, address
from moe_comm.gpu.turns import Turns
from moe_comm.runtime.memory import DTYPE_CODES


@dataclass(frozen=True)
class Form:
    """What arriving rows of ``hidden`` elements of ``dtype`` look like. relay: with links."""

    hidden: int
    dtype: torch.dtype
    wire_dtype: WireDtype
    relay: bool

    @cached_property
    def packing(self) -> int:
        """How the kernel packs them, if it does; see Format in csrc/cuda/args.h."""
        if self.wire_dtype.format != "fp8" or self.wire_dtype.scales == "group" or not self.hidden:
            return SAME
        return ROW_SCALES if self.wire_dtype.scales == "token" else BLOCK_SCALES

    @cached_property
    def words(self) -> tuple[int, int]:
        """As ``Turns.move`` takes them."""
        return self.packing, int(self.wire_dtype.power_of_two)

    @cached_property
    def rounds(self) -> bool:
        """Whether rows become others by the payload."""
        return self.wire_dtype.narrows(self.dtype)

    @cached_property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize if self.packing == SAME else up(self.hidden, 16)

    @cached_property
    def scales(self) -> int:
        """Of a row."""
        return 0 if self.packing == SAME else self.wire_dtype.num_scales(self.hidden)

    @cached_property
    def bare(self) -> bool:
        """Whether rows stand alone, without scales and links."""
        return self.packing == SAME and not self.relay

    def parts(self, num_rows: int) -> tuple[int, int, int]:
        """Bytes of the rows, their scales and their links."""
        return num_rows * self.row_bytes, 4 * num_rows * self.scales, 8 * num_rows * self.relay

    def place_bytes(self, num_rows: int) -> int:
        """What the heap gives for them."""
        if self.bare:
            return up(num_rows * self.row_bytes) or ALIGN
        return max(ALIGN, sum(map(up, self.parts(num_rows))))

    def allocate(self, heap: Heap, num_rows: int) -> Arriving:
        """A place for ``num_rows`` rows.

        Raises:
            HeapError: no room.
        """
        found = heap.place(self.place_bytes(num_rows))
        if self.bare:
            return Arriving(self, found.matrix(0, num_rows, self.hidden, self.dtype), None, None, Offer(found.first))
        rows, scales, _ = self.parts(num_rows)
        first, second = up(rows), up(rows) + up(scales)
        dtype = self.dtype if self.packing == SAME else torch.uint8
        rows_RX = found.matrix(0, num_rows, self.row_bytes // dtype.itemsize, dtype)
        scale_RS = found.matrix(first, num_rows, self.scales, torch.float32) if self.packing != SAME else None
        link_R = found.matrix(second, num_rows, 1, torch.int64).view(-1) if self.relay else None
        scales_at = found.first + first if scale_RS is not None and scale_RS.numel() else 0
        links_at = found.first + second if link_R is not None and len(link_R) else 0
        return Arriving(self, rows_RX, scale_RS, link_R, Offer(found.first, 0, scales_at, links_at))


@dataclass(frozen=True, eq=False, slots=True)
class Arriving:
    """A place for rows: rows_RX as they travel, scale_RS and link_R where there are any, and what peers are told."""

    form: Form
    rows_RX: Tensor
    scale_RS: Tensor | None
    link_R: Tensor | None
    offer: Offer

    def rows(self) -> Tensor:
        """[R, D] in their dtype, once they are there."""
        if self.scale_RS is None:
            return self.rows_RX
        return scaled(self.rows_RX[:, : self.form.hidden], self.scale_RS, self.form.wire_dtype, self.form.dtype)

    def links(self, blocks: int) -> Links:
        """What ``fan_out`` on ``blocks`` blocks does here."""
        if self.link_R is None:
            return NOT_RELAYED
        rows_at, scales_at, links_at = map(address, (self.rows_RX, self.scale_RS, self.link_R))
        return Links(rows_at, scales_at, links_at, len(self.link_R), blocks)


def readable(heap: Heap, rows_RD: Tensor | None) -> Tensor | None:
    """``rows_RD`` where peers can read them: as they are, or copied.

    Raises:
        HeapError: no room for the copy.
    """
    if rows_RD is None or not rows_RD.numel() or (heap.owns(rows_RD) and rows_RD.is_contiguous()):
        return rows_RD
    return heap.rows(rows_RD.shape[0], rows_RD.shape[1], rows_RD.dtype).copy_(rows_RD)


def place(heap: Heap, rows_RD: Tensor | None) -> int:
    """What an offer says of ``rows_RD``."""
    return heap.offset(rows_RD) if rows_RD is not None and rows_RD.numel() else 0


def check_room(form: Form, rows_W: Sequence[int], rooms_W: Sequence[int], header: Header) -> None:
    """Raise alike on every rank unless all have room for what comes to them.

    Args:
        rows_W: for every rank.
        rooms_W: bytes of the largest free place of every rank's heap.

    Raises:
        HeapError: a rank has not.
    """
    if form.place_bytes(max(rows_W)) <= min(rooms_W):
        return
    for rank, rows in enumerate(rows_W):
        if (needed := form.place_bytes(rows)) > rooms_W[rank]:
            raise HeapError(
                f"rank {rank} has no room in its heap for {rows} rows in {describe(header)}: they need {needed} bytes "
                f"and its largest free place has {rooms_W[rank]}. Raise PeerToPeerOptions.heap_bytes, alike on every "
                "rank, or dispatch fewer tokens at a time"
            )


def move_rows(turns: Turns, x_TD: Tensor, ids_TK: Tensor, arriving: Arriving, blocks: int) -> tuple[Tensor, Tensor]:
    """Queue what moves rows; the rows of this rank's experts, and the place of each slot."""
    place_TK = torch.empty_like(ids_TK)
    turns.move(x_TD, place_TK, DTYPE_CODES[x_TD.dtype], arriving.form.words, arriving.links(blocks))
    return arriving.rows(), place_TK
