"""Where rows of ``peer_to_peer`` stand in a rank's heap, and how they are packed on the way there.

    one place   rows, as they travel [R, X] │ their fp32 scales [R, S] │ links [R]     each from a multiple of 256 bytes

Scales are there if rows travel as e4m3, links if they are relayed. Both ends know from the exchanged counts how large a
place is, so ranks can tell alike who has no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moe_comm.dispatch.handshake import describe
from moe_comm.dispatch.header import Header
from moe_comm.dispatch.payload import Payload, scaled
from moe_comm.errors import HeapError
from moe_comm.gpu.blocks import ALIGN, up
from moe_comm.gpu.heap import Heap
from moe_comm.gpu.turns import BLOCK_SCALES, NOWHERE, ROW_SCALES, SAME, Met, Offer, Slots, Turns, address
from moe_comm.runtime.shared import DTYPE_CODES


@dataclass(frozen=True)
class Form:
    """What arriving rows of ``hidden`` elements of ``dtype`` look like. relay: with links."""

    hidden: int
    dtype: torch.dtype
    payload: Payload
    relay: bool

    @property
    def packing(self) -> int:
        """How the kernel packs them, if it does; see Format in csrc/cuda/args.h."""
        if self.payload.format != "fp8" or self.payload.scales == "group" or not self.hidden:
            return SAME
        return ROW_SCALES if self.payload.scales == "token" else BLOCK_SCALES

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize if self.packing == SAME else up(self.hidden, 16)

    @property
    def scales(self) -> int:
        """Of a row."""
        return 0 if self.packing == SAME else self.payload.num_scales(self.hidden)

    def parts(self, num_rows: int) -> tuple[int, int, int]:
        """Bytes of the rows, their scales and their links."""
        return num_rows * self.row_bytes, 4 * num_rows * self.scales, 8 * num_rows * self.relay

    def place_bytes(self, num_rows: int) -> int:
        """What the heap gives for them."""
        return max(ALIGN, sum(map(up, self.parts(num_rows))))

    def allocate(self, heap: Heap, num_rows: int) -> Arriving:
        """A place for ``num_rows`` rows.

        Raises:
            HeapError: no room.
        """
        rows, scales, links = self.parts(num_rows)
        whole = heap.allocate(self.place_bytes(num_rows))
        offset, first, second = heap.offset(whole), up(rows), up(rows) + up(scales)
        rows_RX = whole[:rows].view(self.dtype if self.packing == SAME else torch.uint8)
        scale_RS = whole[first : first + scales].view(torch.float32).view(num_rows, self.scales)
        link_R = whole[second : second + links].view(torch.int64)
        return Arriving(
            self,
            rows_RX.view(num_rows, self.row_bytes // rows_RX.element_size()),
            None if self.packing == SAME else scale_RS,
            link_R if self.relay else None,
            Offer(offset, 0, offset + first if scales else 0, offset + second if links else 0),
        )


@dataclass(frozen=True, eq=False)
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
        return scaled(self.rows_RX[:, : self.form.hidden], self.scale_RS, self.form.payload, self.form.dtype)


def readable(heap: Heap, rows_RD: Tensor | None) -> Tensor | None:
    """``rows_RD`` where peers can read them: as they are, or copied.

    Raises:
        HeapError: no room for the copy.
    """
    if rows_RD is None or not rows_RD.numel() or (heap.owns(rows_RD) and rows_RD.is_contiguous()):
        return rows_RD
    return heap.rows(rows_RD.shape[0], rows_RD.shape[1], rows_RD.dtype).copy_(rows_RD)


def place(heap: Heap, rows_RD: Tensor | None, problem: HeapError | None) -> int:
    """What an offer says of ``rows_RD``."""
    if problem is not None:
        return NOWHERE
    return heap.offset(rows_RD) if rows_RD is not None and rows_RD.numel() else 0


def check_room(
    form: Form, rows_E: Sequence[int], offsets: Sequence[int], rooms_W: Sequence[int], header: Header
) -> None:
    """Raise alike on every rank unless all have room for what comes to them.

    Args:
        rows_E: of all ranks, for every expert.
        rooms_W: bytes of the largest free place of every rank's heap.

    Raises:
        HeapError: a rank has not.
    """
    for rank, (lo, hi) in enumerate(pairwise(offsets)):
        rows = sum(rows_E[lo:hi])
        if (needed := form.place_bytes(rows)) > rooms_W[rank]:
            raise HeapError(
                f"rank {rank} has no room in its heap for {rows} rows in {describe(header)}: they need {needed} bytes "
                f"and its largest free place has {rooms_W[rank]}. Raise PeerToPeerOptions.heap_bytes, alike on every "
                "rank, or dispatch fewer tokens at a time"
            )


def move_rows(
    turns: Turns, x_TD: Tensor, slots: Slots, met: Met, arriving: Arriving, blocks: int, timeout_ns: int
) -> tuple[Tensor, Tensor]:
    """Queue what moves rows; the rows of this rank's experts, and the place of each slot."""
    form = arriving.form
    place_TK = torch.empty(slots.ids_TK.shape, dtype=torch.int64, device=x_TD.device)
    rows = {"hidden": x_TD.shape[1], "dtype": DTYPE_CODES[x_TD.dtype]}
    turns.launch(
        "push",
        slots.chunks,
        timeout_ns,
        **slots.words,
        **rows,
        x_at=address(x_TD),
        stride=x_TD.stride(0) * x_TD.element_size(),
        offers_at=address(met.offers_W5),
        all_counts_at=address(met.counts_WE),
        place_at=address(place_TK),
        left_at=address(turns.left_E),
        format=form.packing,
        power_of_two=int(form.payload.power_of_two),
        relay=int(form.relay),
    )
    turns.launch("arrive", 1, timeout_ns, all_counts_at=address(met.counts_WE))
    if arriving.link_R is not None and len(arriving.link_R):
        turns.launch(
            "fan_out",
            min(blocks, len(arriving.link_R)),
            timeout_ns,
            **rows,
            rows_at=address(arriving.rows_RX),
            scales_at=address(arriving.scale_RS),
            links_at=address(arriving.link_R),
            rows=len(arriving.link_R),
            summary_at=address(met.summary),
            format=form.packing,
        )
    return arriving.rows(), place_TK
