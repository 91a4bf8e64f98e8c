"""GEMMs between ranks of one host that read each other's rows where they stand: nothing is sent, so nothing is cut.

A pass of an operator is one operation of the group (csrc/cpu/rendezvous.h). Each rank offers one block of its heap, and
computes while the others come:

    offer   [a flag for each rank | own rows, that all gather | products for rank 0 | for rank 1 | ...]

    gathers     own rows     rank 2's rows            rank 1's rows          whoever has offered first: the product of
                                                                             its rows is made straight from its heap
    scatters    products for rank 1   for rank 2   ...   own   [ sum ]       the flag of each rises with its product; a
                                                                             rank adds what all have for it, in place

Bits are those of ``chunked``: the same products of whole rows, and sums in order of rank, in fp32, rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.overlap.chunked import Arrival, Lines
from moe_comm.overlap.options import SHARED
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import moving
from moe_comm.runtime.memory import DTYPE_CODES, block, native

if TYPE_CHECKING:
    from moe_comm._C import Heap, Rendezvous

T = TypeVar("T")
LINE = 64
"""Bytes at whose multiples rows begin: BLAS gives other bits elsewhere (``row_invariant_mm``)."""


@dataclass(frozen=True)
class Traffic:
    """What travels in one pass of an operator, alike on every rank.

    rows: S, of each rank. like: a tensor of their dtype and device. gathered_SD: this rank's rows, which all gather, or
    None. sum_columns: N of the [W, S, N] products that are summed over the ranks, or None.
    """

    rows: int
    like: Tensor
    gathered_SD: Tensor | None = None
    sum_columns: int | None = None


@dataclass(frozen=True)
class _Layout:
    """Where things stand in every rank's block, in bytes. widths: columns of rows and of products, 0 without."""

    world: int
    rows: int
    widths: tuple[int, int]
    dtype: torch.dtype

    @cached_property
    def rows_at(self) -> int:
        return self.world * int(native().Rendezvous.flag_bytes())

    def products_at(self, rank: int) -> int:
        """Of the products for ``rank``; of rank W, the end of the block."""
        gathered, products = self._sizes
        return self.rows_at + gathered + rank * products

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """Of the rows, and of the products for one rank."""
        gathered, products = (_up(self.rows * width * self.dtype.itemsize) for width in self.widths)
        return gathered, products

    def view(self, block_X: Tensor, at: int, width: int) -> Tensor:
        """[S, width] of this rank's own block."""
        first = at // self.dtype.itemsize
        return block_X[first : first + self.rows * width].view(self.rows, width)


class SharedWay:
    """How one pass gathers and scatters in place. Only within the ``body`` of ``in_place``."""

    def __init__(self, lines: Lines, handle: _Layout, block_X: Tensor, rendezvous: Rendezvous) -> None:
        self._lines, self._layout, self._block, self._rendezvous = lines, handle, block_X, rendezvous

    def start_gather(self, x_SD: Tensor) -> Iterator[Arrival]:
        """The rows of ``Traffic.gathered_SD`` of every rank, whole ones: this rank's, then whose are there first, else
        round the ring. A peer's rows stand in its memory, and are valid until the next are asked for."""
        own, *left = self._lines.ring.arrivals
        handle = self._layout
        offered_SD = handle.view(self._block, handle.rows_at, handle.widths[0])  # dense and aligned, as the peers' are
        yield Arrival(slice(own, own + 1), 0, x_SD.shape[0], offered_SD[None])
        while left:
            with moving(Kind.COLLECTIVE, "rows of others"):
                peer = self._rendezvous.next(left)
            left.remove(peer)
            yield Arrival(slice(peer, peer + 1), 0, x_SD.shape[0], self._rows_of(peer)[None])
        if not handle.widths[1]:
            self._rendezvous.leave()  # peers need not wait for what this rank does next

    def scattered_mm(self, x_WSK: Tensor, b_KN: Tensor) -> Callable[[], Tensor]:
        """As ``chunked.scattered_mm``: computes all products; the call returned adds up the ranks', [S, N]."""
        lines, handle = self._lines, self._layout
        columns = b_KN.shape[1]
        for peer in lines.ring.scatters:
            part_SN = handle.view(self._block, handle.products_at(peer), columns)
            row_invariant_mm(x_WSK[peer], b_KN, out=part_SN)
            self._rendezvous.raise_flag(peer)

        def finish() -> Tensor:
            y_SN = x_WSK.new_empty(handle.rows, columns)
            at = handle.products_at(lines.ring.rank)
            with moving(Kind.COLLECTIVE, "products of others"):
                self._rendezvous.add(at, y_SN.numel(), DTYPE_CODES[handle.dtype], y_SN.data_ptr())
            return y_SN

        return finish

    def _rows_of(self, peer: int) -> Tensor:
        handle = self._layout
        rows, width = handle.rows, handle.widths[0]
        if not rows * width:
            return torch.empty(rows, width, dtype=handle.dtype)
        found = self._rendezvous.rows(peer, handle.rows_at, rows, width, DTYPE_CODES[handle.dtype])
        return torch.from_dlpack(found)


def reads_in_place(lines: Lines, like: Tensor) -> bool:
    """Whether a pass whose tensors are like ``like`` goes through ``in_place``: ranks of one host, and not all at once.

    One chunk is one step after the other. None, of zero rows, is for ``in_place``, which compares what ranks do.
    """
    return lines.choice.backend == SHARED and len(lines.spans) != 1 and lines.channel.adds(like)


def in_place(lines: Lines, traffic: Traffic, body: Callable[[SharedWay], T]) -> T | None:
    """What ``body`` makes of a pass; None, after a warning, if a rank's shared memory is full, on every rank then.

    Raises:
        RankMismatch: ranks are in different calls; on every rank. PeerDied, PeerTimeout: a rank is gone or stuck.
        PeerError: a rank failed in the middle.
    """
    x_SD, like = traffic.gathered_SD, traffic.like
    widths = (0 if x_SD is None else x_SD.shape[1], traffic.sum_columns or 0)
    handle = _Layout(lines.ring.world, traffic.rows, widths, like.dtype)
    num_bytes = handle.products_at(handle.world)
    offered: list[Tensor] = []

    def offer(heap: Heap) -> Tensor:
        block_X = block(heap, 1, num_bytes // like.dtype.itemsize, like.dtype).view(-1)
        if x_SD is not None:
            handle.view(block_X, handle.rows_at, widths[0]).copy_(x_SD)
        offered.append(block_X)
        return block_X

    return lines.channel.meet(
        num_bytes,
        like.dtype,
        lines.description,
        offer,
        lambda meeting: body(SharedWay(lines, handle, offered[0], meeting)),
    )


def _up(num_bytes: int) -> int:
    return math.ceil(num_bytes / LINE) * LINE
