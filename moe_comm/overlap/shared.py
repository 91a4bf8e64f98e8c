"""GEMMs of ranks on one host that read each other's rows in place. No rows are sent, so there are no chunks.

One pass of an operator is one ``Rendezvous`` (csrc/cpu/rendezvous.h), a collective that overlaps with computation. Each
rank offers a block of its heap, the memory that it shares with its peers:

    block       [one flag for each rank | own rows, to be gathered | results for rank 0 | for rank 1 | ...]

    gather      own rows     rank 2's rows            rank 1's rows          the GEMM reads a peer's rows directly from
                                                                             its heap, as soon as the peer has offered
    scatter     results for rank 1    for rank 2   ...   own   [ sum ]       the flag of a rank is raised with its
                                                                             results; the rank sums all peers' in place

The bits are those of ``chunked``: the same GEMMs of whole rows, and sums in rank order in fp32, rounded once.
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
from moe_comm.overlap.chunked import GatheredRows, OperatorPlan
from moe_comm.overlap.options import SHARED
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import communication_span
from moe_comm.runtime.memory import DTYPE_CODES, address, block
from moe_comm.runtime.native_core import native

if TYPE_CHECKING:
    from moe_comm._C import Heap, Rendezvous

T = TypeVar("T")
LINE = 64
"""Alignment of rows in bytes: one cache line."""


@dataclass(frozen=True)
class SharedTransfers:
    """The transfers of one pass of an operator; the same on every rank.

    rows: S, the rows of each rank. like: a tensor of their dtype and device. gathered_SD: this rank's rows to be
    gathered, or None. sum_columns: N of the [W, S, N] results that are summed over the ranks, or None.
    """

    rows: int
    like: Tensor
    gathered_SD: Tensor | None = None
    sum_columns: int | None = None


@dataclass(frozen=True)
class _BlockLayout:
    """Offsets in each rank's block, in bytes. widths: columns of the rows and of the results; 0 if there are none."""

    world: int
    rows: int
    widths: tuple[int, int]
    dtype: torch.dtype

    @cached_property
    def rows_offset(self) -> int:
        return self.world * int(native().Rendezvous.flag_bytes())

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """Bytes of the rows, and of the results for one rank."""
        rows, results = (_round_up(self.rows * width * self.dtype.itemsize) for width in self.widths)
        return rows, results

    def results_offset(self, rank: int) -> int:
        """Return the offset of the results for ``rank``; for rank W, the size of the block."""
        rows, results = self._sizes
        return self.rows_offset + rows + rank * results

    def view(self, block_X: Tensor, offset: int, width: int) -> Tensor:
        """Return rows [S, width] of this rank's own block."""
        first = offset // self.dtype.itemsize
        return block_X[first : first + self.rows * width].view(self.rows, width)


class SharedTransport:
    """Transfers of one pass in place, with the methods of ``OperatorPlan``. Valid only within ``run_in_place``."""

    def __init__(self, plan: OperatorPlan, layout: _BlockLayout, block_X: Tensor, rendezvous: Rendezvous) -> None:
        self._plan, self._layout, self._block, self._rendezvous = plan, layout, block_X, rendezvous

    def start_gather(self, x_SD: Tensor) -> Iterator[GatheredRows]:
        """Yield all rows of each rank: this rank's, then the peers' as they are offered, in ring order among those.

        A peer's rows are views of its memory. They are valid until the next item is requested.
        """
        rank, *peers = self._plan.ring.arrivals
        layout = self._layout
        # The offered copy is dense and aligned like the peers' rows, so the GEMM gives the same bits.
        offered_SD = layout.view(self._block, layout.rows_offset, layout.widths[0])
        yield GatheredRows(slice(rank, rank + 1), 0, x_SD.shape[0], offered_SD[None])
        while peers:
            with communication_span(Kind.COLLECTIVE, "rows of others"):
                peer = self._rendezvous.next(peers)
            peers.remove(peer)
            yield GatheredRows(slice(peer, peer + 1), 0, x_SD.shape[0], self._rows_of(peer)[None])
        if not layout.widths[1]:
            self._rendezvous.publish_done()  # peers need not wait for the next work of this rank

    def scattered_mm(self, x_WSK: Tensor, b_KN: Tensor) -> Callable[[], Tensor]:
        """Compute x @ b for all ranks. The returned call sums this rank's rows, [S, N]."""
        plan, layout = self._plan, self._layout
        columns = b_KN.shape[1]
        for peer in plan.ring.scatters:
            part_SN = layout.view(self._block, layout.results_offset(peer), columns)
            row_invariant_mm(x_WSK[peer], b_KN, out=part_SN)
            self._rendezvous.raise_flag(peer)

        def finish() -> Tensor:
            y_SN = x_WSK.new_empty(layout.rows, columns)
            offset = layout.results_offset(plan.ring.rank)
            with communication_span(Kind.COLLECTIVE, "products of others"):
                self._rendezvous.add(offset, y_SN.numel(), DTYPE_CODES[layout.dtype], address(y_SN, layout.dtype))
            return y_SN

        return finish

    def _rows_of(self, peer: int) -> Tensor:
        layout = self._layout
        rows, width = layout.rows, layout.widths[0]
        if not rows * width:
            return torch.empty(rows, width, dtype=layout.dtype, device="cpu")
        dtype_code = DTYPE_CODES[layout.dtype]
        return torch.from_dlpack(self._rendezvous.rows(peer, layout.rows_offset, rows, width, dtype_code))


def reads_in_place(plan: OperatorPlan, like: Tensor) -> bool:
    """Return whether a pass with tensors like ``like`` uses ``run_in_place``: CPU ranks of one host, not one chunk.

    Zero rows have no chunks and do use it, because it checks that all ranks make the same call.
    """
    return plan.choice.backend == SHARED and not plan.is_serial and plan.channel.can_sum_in_memory(like)


def run_in_place(plan: OperatorPlan, transfers: SharedTransfers, body: Callable[[SharedTransport], T]) -> T | None:
    """Return ``body(transport)``. If a rank's shared memory is full, warn and return None, on every rank."""
    x_SD, like = transfers.gathered_SD, transfers.like
    widths = (0 if x_SD is None else x_SD.shape[1], transfers.sum_columns or 0)
    layout = _BlockLayout(plan.ring.world, transfers.rows, widths, like.dtype)
    num_bytes = layout.results_offset(layout.world)
    offered: list[Tensor] = []

    def offer(heap: Heap) -> Tensor:
        block_X = block(heap, 1, num_bytes // like.dtype.itemsize, like.dtype).view(-1)
        if x_SD is not None:
            layout.view(block_X, layout.rows_offset, widths[0]).copy_(x_SD)
        offered.append(block_X)
        return block_X

    return plan.channel.rendezvous(
        num_bytes,
        like.dtype,
        plan.description,
        offer,
        lambda rendezvous: body(SharedTransport(plan, layout, offered[0], rendezvous)),
    )


def _round_up(num_bytes: int) -> int:
    return math.ceil(num_bytes / LINE) * LINE
