"""Transfers between ranks with the same local rank on all hosts (a rail), in chunks that are in flight together.

    rows sent, by host    | host 0: own ........ | host 1 ...................... | host 2 ............. |
    chunks of far blocks                         |   0   |    1    |      2      |   0  |   1   |   2   |
    exchanges             chunk 0 of every far block, then chunk 1 of every far block, then chunk 2

A backend may process a large message in one direction at a time. Several messages keep both directions of a link busy.
Rows of a chunk are packed while earlier chunks are in flight, and unpacked while later chunks are in flight. Rows of
the own host are moved inside it meanwhile.

Every exchange is a collective of all ranks, with no rows between most of them. All ranks therefore detect a rank that
died or is late, and errors have the rank numbers of the whole group.

Over NCCL, rows are packed and received in memory that is registered with NCCL, if torch and NCCL support it
(``comm/registered.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from moe_comm.comm.channel import Channel, PendingTensor
from moe_comm.comm.header import EXTRA, EXTRA_BACKWARD, describe
from moe_comm.comm.registered import registered_memory
from moe_comm.dispatch.hierarchical.relay_routes import HostMap
from moe_comm.dispatch.operation import Operation
from moe_comm.runtime.memory import warm_rows

T = TypeVar("T")
OPS = ("dispatch", "combine", "combine backward", "dispatch backward", EXTRA, EXTRA_BACKWARD)
RowRanges = list[range]
"""One row range of each of several blocks."""


@dataclass(frozen=True)
class WireBytes:
    """Bytes sent to other hosts, without the handshake.

    rows: rows in their wire dtype, and group scales. weights: routing weights and their gradients. ids: expert ids.
    """

    rows: int = 0
    weights: int = 0
    ids: int = 0

    def __add__(self, other: WireBytes) -> WireBytes:
        return WireBytes(self.rows + other.rows, self.weights + other.weights, self.ids + other.ids)

    @property
    def total(self) -> int:
        return self.rows + self.weights + self.ids


@dataclass(frozen=True)
class PendingBlocks:
    """Rows in flight: one block from each host, in order of host.

    own: row range of this host's block. chunks: of the other blocks, in order of arrival.
    """

    num_rows: int
    own: range
    chunks: tuple[tuple[RowRanges, PendingTensor], ...]

    def completed(self) -> Iterator[tuple[range, Tensor]]:
        """Yield row ranges of other hosts' blocks and their rows, as they arrive. Iterate once, to the end."""
        for ranges, pending in self.chunks:
            rows_NX, start = pending(), 0
            for rows in ranges:
                yield rows, rows_NX[start : start + len(rows)]
                start += len(rows)

    def take(self, decode: Callable[[Tensor], Tensor], own_PX: Tensor) -> Tensor:
        """Return [num_rows, X]: this host's block, and the received rows after ``decode``."""
        out_NX = own_PX if len(own_PX) == self.num_rows else self._empty(self.num_rows, own_PX)
        if out_NX is not own_PX:
            out_NX[self.own.start : self.own.stop] = own_PX
        for rows, rows_PX in self.completed():
            if len(rows):
                out_NX[rows.start : rows.stop] = decode(rows_PX)
        return out_NX

    def pick(self, decode: Callable[[Tensor], Tensor], own_0X: Tensor, index_N: Tensor) -> Tensor:
        """Return [N, X], rows ``index_N`` (ascending) of the result of ``take``, without a block of this host."""
        edges = sorted({edge for ranges, _ in self.chunks for rows in ranges for edge in (rows.start, rows.stop)})
        places = torch.searchsorted(index_N, index_N.new_tensor(edges)).tolist()
        bounds = dict(zip(edges, places, strict=True))
        out_NX = self._empty(index_N.shape[0], own_0X)
        for rows, rows_PX in self.completed():
            out_rows = slice(bounds[rows.start], bounds[rows.stop])
            if out_rows.start < out_rows.stop:
                torch.index_select(decode(rows_PX), 0, index_N[out_rows] - rows.start, out=out_NX[out_rows])
        return out_NX

    def _empty(self, rows: int, like_PX: Tensor) -> Tensor:
        return warm_rows(rows, like_PX.shape[1], like_PX.dtype, like_PX.device)


class Rail:
    """Exchanges with the ranks of the same local rank on other hosts.

    wire_bytes: sent bytes by operation.
    min_chunk_bytes: minimum size of the largest block between two ranks in each chunk, if there are several chunks.
    """

    min_chunk_bytes = 256 << 10
    max_chunks = 8

    def __init__(self, channel: Channel, hosts: HostMap, rank: int) -> None:
        self.wire_bytes = dict.fromkeys(OPS, WireBytes())
        self._channel, self._hosts = channel, hosts
        self._host = hosts.host(rank)
        self._ranks = hosts.rail(rank)
        self._has_exchanged = False
        """Whether rows of the group's main device were exchanged, which creates the communicator of NCCL."""

    def start(
        self, tensor_N: Tensor, send_H: Sequence[int], receive_H: Sequence[int], operation: Operation, kind: str
    ) -> PendingTensor:
        """Start exchanging the other hosts' blocks of ``tensor_N``. The result has their blocks, in order of host."""
        return self._start(self.far(tensor_N, send_H), send_H, receive_H, operation, kind)

    def start_rows(
        self,
        rows_of: Callable[[RowRanges], Tensor],
        send_H: Sequence[int],
        receive_H: Sequence[int],
        most_bytes: int,
        operation: Operation,
    ) -> PendingBlocks:
        """Start exchanging rows in chunks.

        Args:
            rows_of: returns row ranges of the rows to send as one dense tensor [N, X]. It is not called for the own
                host.
            send_H, receive_H: rows to and from each host.
            most_bytes: size of the largest block between two ranks, or an upper bound; equal on all ranks.
        """
        sent, received = blocks(send_H), blocks(receive_H)
        count = max(1, min(self.max_chunks, most_bytes // self.min_chunk_bytes))
        chunks = []
        for chunk in range(count):
            send, receive = ([_cut(block, chunk, count) for block in host_blocks] for host_blocks in (sent, received))
            send[self._host] = receive[self._host] = range(0)
            with self._registered():
                rows_NX = rows_of(self.others(send))
            pending = self._start(
                rows_NX, [len(rows) for rows in send], [len(rows) for rows in receive], operation, "rows"
            )
            chunks.append((self.others(receive), pending))
        return PendingBlocks(sum(receive_H), received[self._host], tuple(chunks))

    def _start(
        self, far_N: Tensor, send_H: Sequence[int], receive_H: Sequence[int], operation: Operation, kind: str
    ) -> PendingTensor:
        """Start an exchange and count its bytes."""
        sent = far_N.shape[0] * far_N[:1].numel() * far_N.element_size()  # far_N may have no rows
        self.wire_bytes[operation.op] += WireBytes(**{kind: sent})
        send, receive = [0] * self._hosts.world, [0] * self._hosts.world
        for host, peer in enumerate(self._ranks):
            if host != self._host:
                send[peer], receive[peer] = send_H[host], receive_H[host]
        out = None
        if kind == "rows":
            with self._registered() as registered:
                out = far_N.new_empty(sum(receive), *far_N.shape[1:]) if registered else None
        pending = self._channel.start_all_to_all(far_N, send, receive, describe(operation), out)
        self._has_exchanged |= self._channel.transfer_device(far_N.device).type == self._channel.rows_device.type
        # Wait now on GPUs: NCCL may deadlock if ranks run the kernels of two communicators (this one and the host's) in
        # different orders.
        return PendingTensor.completed(pending()) if far_N.is_cuda else pending

    @contextmanager
    def _registered(self) -> Iterator[bool]:
        """Context manager: new CUDA tensors are registered with NCCL, if possible; yields whether they are."""
        memory = registered_memory(self._channel.comm) if self._has_exchanged else None
        with nullcontext() if memory is None else memory.allocating():
            yield memory is not None

    def own(self, tensor_N: Tensor, rows_H: Sequence[int]) -> Tensor:
        """Return this host's block of ``tensor_N``."""
        rows = blocks(rows_H)[self._host]
        return tensor_N[rows.start : rows.stop]

    def far(self, tensor_N: Tensor, rows_H: Sequence[int]) -> Tensor:
        """Return the other hosts' blocks of ``tensor_N``, in order of host."""
        return gather_ranges(tensor_N, self.others(blocks(rows_H)))

    def only_own(self, rows_H: Sequence[int]) -> tuple[int, ...]:
        """Return ``rows_H`` with zeros for other hosts."""
        return tuple(rows if host == self._host else 0 for host, rows in enumerate(rows_H))

    def without_own(self, rows_H: Sequence[int]) -> tuple[int, ...]:
        """Return ``rows_H`` with zero for this host."""
        return tuple(0 if host == self._host else rows for host, rows in enumerate(rows_H))

    def others(self, items: Sequence[T]) -> list[T]:
        """Return the items of all other hosts."""
        return [item for host, item in enumerate(items) if host != self._host]


def gather_ranges(tensor_N: Tensor, ranges: RowRanges) -> Tensor:
    """Concatenate row ranges of ``tensor_N``. A single range gives a view."""
    tensors = [tensor_N[rows.start : rows.stop] for rows in ranges]
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors, tensor_N[:0]])


def blocks(rows_H: Sequence[int]) -> RowRanges:
    """Return the row range of each host's block."""
    return [range(start, stop) for start, stop in pairwise([0, *accumulate(rows_H)])]


def _cut(block: range, chunk: int, count: int) -> range:
    rows = len(block)
    return range(block.start + rows * chunk // count, block.start + rows * (chunk + 1) // count)
