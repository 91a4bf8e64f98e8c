"""Rows between the ranks in one place on every host, for ``hierarchical``: cut into pieces that travel side by side.

    leaving, by host      | host 0: own ........ | host 1 ...................... | host 2 ............. |
    pieces of each far host's block              |   0   |    1    |      2      |   0  |   1   |   2   |
    exchanges             piece 0 of every far block, then piece 1 of every far block, then piece 2; in flight together

A backend that works off one large message one way at a time keeps both ways of a link busy with several. Rows are
packed piece by piece while pieces in front of them are on the wire, and what a piece brings is unpacked and put in its
place while those behind it are. Rows of the own host do not come here: they are moved inside it meanwhile.

Every exchange is a collective of all ranks, most of whose parts are empty: any of them that is gone or late is noticed
by all, and named as they are numbered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from moe_comm.comm.channel import Channel, PendingTensor
from moe_comm.comm.header import Header, describe
from moe_comm.dispatch.hierarchical.relay_routes import OPS, HostMap, WireBytes
from moe_comm.errors import ConfigError
from moe_comm.runtime.memory import warm_rows

T = TypeVar("T")
Spans = list[range]
"""Runs of rows, one of each of several blocks."""


@dataclass(frozen=True)
class Pieces:
    """How rows between hosts are cut. Bits and bytes do not depend on it.

    least_bytes: of the largest block from one rank to another in each piece, if there is more than one. most: pieces.

    Raises:
        ConfigError: numbers below 1.
    """

    least_bytes: int = 256 << 10
    most: int = 8

    def __post_init__(self) -> None:
        if self.least_bytes < 1 or self.most < 1:
            raise ConfigError(
                f"pieces need least_bytes and most of at least 1; got {self.least_bytes} and {self.most}. "
                "Pieces(most=1) sends rows whole"
            )

    def count(self, num_bytes: int) -> int:
        """Pieces where the largest block has ``num_bytes``."""
        return max(1, min(self.most, num_bytes // self.least_bytes))


@dataclass(frozen=True)
class Arriving:
    """Rows on their way: one block from each host, in order of host.

    own: where this host's block belongs. pieces: of the others' blocks, in the order in which they come.
    """

    num_rows: int
    own: range
    pieces: tuple[tuple[Spans, PendingTensor], ...]

    def parts(self) -> Iterator[tuple[range, Tensor]]:
        """Where rows of other hosts belong, and the rows, as they come. To be gone through once, to its end."""
        for spans, pending in self.pieces:
            rows_NX, start = pending(), 0
            for span in spans:
                yield span, rows_NX[start : start + len(span)]
                start += len(span)

    def take(self, change: Callable[[Tensor], Tensor], own_PX: Tensor) -> Tensor:
        """[num_rows, X] what ``change`` makes of each row that comes, and the own block in its place."""
        out_NX = own_PX if len(own_PX) == self.num_rows else self._empty(self.num_rows, own_PX)
        if out_NX is not own_PX:
            out_NX[self.own.start : self.own.stop] = own_PX
        for span, rows_PX in self.parts():
            if len(span):
                out_NX[span.start : span.stop] = change(rows_PX)
        return out_NX

    def pick(self, change: Callable[[Tensor], Tensor], own_0X: Tensor, index_N: Tensor) -> Tensor:
        """[N, X] the rows at ``index_N``, ascending, of ``take`` where the own block is empty."""
        edges = sorted({edge for spans, _ in self.pieces for span in spans for edge in (span.start, span.stop)})
        places = torch.searchsorted(index_N, index_N.new_tensor(edges)).tolist()
        bounds = dict(zip(edges, places, strict=True))
        out_NX = self._empty(index_N.shape[0], own_0X)
        for span, rows_PX in self.parts():
            here = slice(bounds[span.start], bounds[span.stop])
            if here.start < here.stop:
                torch.index_select(change(rows_PX), 0, index_N[here] - span.start, out=out_NX[here])
        return out_NX

    def _empty(self, rows: int, like_PX: Tensor) -> Tensor:
        return warm_rows(rows, like_PX.shape[1], like_PX.dtype, like_PX.device)


class Rail:
    """Exchanges of one rank with those in its place on other hosts.

    Attributes:
        wire_bytes: what this rank has sent to other hosts, by operation.
    """

    def __init__(self, channel: Channel, hosts: HostMap, rank: int, pieces: Pieces) -> None:
        self.wire_bytes = dict.fromkeys(OPS, WireBytes())
        self._channel, self._hosts, self._pieces = channel, hosts, pieces
        self._host = hosts.host(rank)
        self._ranks = hosts.rail(rank)

    def start(
        self, tensor_N: Tensor, send_H: Sequence[int], receive_H: Sequence[int], header: Header, kind: str
    ) -> PendingTensor:
        """Start sending the other hosts' blocks of ``tensor_N``; theirs come, in order of host."""
        return self._start(self.far(tensor_N, send_H), send_H, receive_H, header, kind)

    def start_rows(
        self,
        rows_of: Callable[[Spans], Tensor],
        send_H: Sequence[int],
        receive_H: Sequence[int],
        most_bytes: int,
        header: Header,
    ) -> Arriving:
        """Start sending rows in pieces.

        Args:
            rows_of: gives runs of the rows that leave, one after the other in one dense tensor [N, X].
            send_H, receive_H: rows to and from each host; what stays in the own one is not asked for.
            most_bytes: of the largest block between two ranks, or a bound on it: alike on every rank.
        """
        leaving, pending = blocks(send_H), blocks(receive_H)
        count = self._pieces.count(most_bytes)
        pieces = []
        for piece in range(count):
            send, receive = ([_cut(block, piece, count) for block in every] for every in (leaving, pending))
            send[self._host] = receive[self._host] = range(0)
            rows_NX = rows_of(self.others(send))
            moving = self._start(rows_NX, [len(span) for span in send], [len(span) for span in receive], header, "rows")
            pieces.append((self.others(receive), moving))
        return Arriving(sum(receive_H), pending[self._host], tuple(pieces))

    def _start(
        self, far_N: Tensor, send_H: Sequence[int], receive_H: Sequence[int], header: Header, kind: str
    ) -> PendingTensor:
        """Start sending, and count what goes."""
        sent = far_N.shape[0] * far_N[:1].numel() * far_N.element_size()  # no rows, no bytes
        self.wire_bytes[header.op] += WireBytes(**{kind: sent})
        send, receive = [0] * self._hosts.world, [0] * self._hosts.world
        for host, peer in enumerate(self._ranks):
            if host != self._host:
                send[peer], receive[peer] = send_H[host], receive_H[host]
        pending = self._channel.start_all_to_all(far_N, send, receive, describe(header))
        # NCCL may stall where kernels of two communicators, this and the host's, run side by side in other orders.
        return PendingTensor.here(pending()) if far_N.is_cuda else pending

    def own(self, tensor_N: Tensor, rows_H: Sequence[int]) -> Tensor:
        """The own host's block of ``tensor_N``."""
        span = blocks(rows_H)[self._host]
        return tensor_N[span.start : span.stop]

    def far(self, tensor_N: Tensor, rows_H: Sequence[int]) -> Tensor:
        """The other hosts' blocks of ``tensor_N``, in order of host."""
        return joined(tensor_N, self.others(blocks(rows_H)))

    def only_own(self, rows_H: Sequence[int]) -> tuple[int, ...]:
        """Rows of the own host, and none of others."""
        return tuple(rows if host == self._host else 0 for host, rows in enumerate(rows_H))

    def without_own(self, rows_H: Sequence[int]) -> tuple[int, ...]:
        """Rows of other hosts, and none of the own."""
        return tuple(0 if host == self._host else rows for host, rows in enumerate(rows_H))

    def others(self, every: Sequence[T]) -> list[T]:
        """Without the own host's."""
        return [one for host, one in enumerate(every) if host != self._host]


def joined(tensor_N: Tensor, spans: Spans) -> Tensor:
    """Runs of ``tensor_N``, one after the other; a view where it is one run."""
    parts = [tensor_N[span.start : span.stop] for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat([*parts, tensor_N[:0]])


def blocks(rows_H: Sequence[int]) -> Spans:
    """Where each host's rows stand, one after the other."""
    return [range(start, stop) for start, stop in pairwise([0, *accumulate(rows_H)])]


def _cut(block: range, piece: int, count: int) -> range:
    rows = len(block)
    return range(block.start + rows * piece // count, block.start + rows * (piece + 1) // count)


__all__ = ["Arriving", "Pieces", "Rail", "Spans", "blocks", "joined"]
