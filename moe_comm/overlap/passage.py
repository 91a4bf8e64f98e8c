"""One call of an expert-parallel layer whose rows cross in chunks, while the experts compute what has arrived.

    tokens' side     ──chunk 0──▶──chunk 1──▶──chunk 2──▶ rows_RD        Outward: dispatch, and combine's backward
                     ◀──chunk 0──◀──chunk 1──◀──chunk 2── results_RD     Homeward: combine, and dispatch's backward
    experts' side    [ own rows ][ chunk 0 ][ chunk 1 ][ chunk 2 ]

Every rank starts the same transfers in the same order: all chunks outward, then chunk after chunk homeward as they are
computed. Own rows fill the wait for a chunk. Rows that cross are those that the dispatcher would move at once, in the
same payload, and the sums are taken where it takes them: the same bits, whatever the chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor

from moe_comm.dispatch.all_to_all import AllToAllDispatcher, Routes, to_slots
from moe_comm.dispatch.autograd import dispatch_by
from moe_comm.dispatch.base import Dispatched, Dispatcher, Layout
from moe_comm.dispatch.channel import Coming
from moe_comm.dispatch.handshake import describe
from moe_comm.dispatch.header import Header
from moe_comm.dispatch.payload import bytes_per_row, pack, unpack
from moe_comm.dispatch.sums import weighted_sum
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.overlap.chunked import Overlap
from moe_comm.overlap.cost import Work
from moe_comm.overlap.crossing import Board, Crossing, Piece, travelling_rows
from moe_comm.runtime.memory import take, warm_rows

COST = 4
"""A chunk of experts' rows costs so many times as much as a linear layer's, and has to be that much larger: there is
more to route, and a product for every expert in it. (Measured: at 0.25 MB two chunks lose, at 1 MB they win.)"""


@dataclass(frozen=True, eq=False)
class Passage:
    """Where the rows of one dispatch go, and in how many chunks.

    opening: the handshake of the dispatch. small: one chunk, of less than is worth one: better step after step.

    Attributes:
        layout: as ``Dispatcher.dispatch`` gives it; its rows stand alike.
    """

    dispatcher: AllToAllDispatcher
    layout: Layout
    opening: Header
    chunks: int
    small: bool

    @classmethod
    def open(
        cls,
        dispatcher: AllToAllDispatcher,
        x_TD: Tensor,
        ids_TK: Tensor,
        overlap: Overlap,
        *,
        width: int,
        weights_grad: bool = False,
        label: str = "",
    ) -> Passage:
        """Agree on a dispatch with the other ranks, as ``Dispatcher.dispatch`` does; and on its chunks.

        Args:
            width: columns, beside those that travel, of the product that a transfer hides behind; alike on every rank.
            weights_grad: the backward pass will send gradients of routing weights; compared between ranks.

        Raises:
            ConfigError: the dispatcher's rows cannot cross in chunks, see ``overlaps``.
            InputError, RoutingError, RankMismatch: on every rank, before rows move.
            PeerDied, PeerTimeout: a rank is gone, or did not call in time.
        """
        if not overlaps(dispatcher):
            raise ConfigError(
                f"only the dispatcher all_to_all overlaps, with payloads that carry their own scales; this is "
                f"{dispatcher.name} with {dispatcher.options.payloads}"
            )
        header = dispatcher.dispatch_header(x_TD, ids_TK, label)
        header = replace(header, requires_grad=header.requires_grad + 2 * weights_grad)
        layout = dispatcher.agree(x_TD, ids_TK, header)
        rows_WE = layout.state.rows_WE
        payload = dispatcher.options.payloads.of("dispatch")
        row_bytes = bytes_per_row(layout.hidden, payload, layout.dtype)
        worth = travelling_rows(rows_WE, dispatcher.placement) * row_bytes // COST
        chunks = overlap.chunks_of(worth)
        if isinstance(overlap.chunks, str):
            world, experts = dispatcher.world, dispatcher.num_experts
            mean = int(rows_WE.sum()) // world
            work = Work(
                "dispatch_matmul", "forward", mean, layout.hidden, width, layout.dtype, world, -(-experts // world)
            )
            chunks = overlap.chunks_for(work, dispatcher.channel, x_TD.device)
        return cls(dispatcher, layout, header, chunks, chunks == 1 and worth < overlap.chunk_bytes)

    @cached_property
    def crossing(self) -> Crossing:
        """What is in which chunk."""
        dispatcher = self.dispatcher
        return Crossing.of(self.routes.rows_WE, dispatcher.placement, dispatcher.rank, self.chunks, self.layout.device)

    def dispatch_at_once(self, x_TD: Tensor) -> Dispatched:
        """The dispatch that was agreed on, one step, differentiable."""
        return dispatch_by(
            self.dispatcher, x_TD, lambda x: (self.dispatcher.send(x, self.layout, self.opening), self.layout)
        )

    @property
    def wide(self) -> torch.dtype:
        """What routing weights are multiplied in."""
        return torch.promote_types(self.layout.dtype, torch.float32)

    @property
    def routes(self) -> Routes:
        found: Routes = self.layout.state
        return found

    def header(self, op: str, weights_grad: bool = False) -> Header:
        """Of an operation that follows from the one before without a caller in between: it needs no handshake."""
        return self.dispatcher.header(op, self.layout, weights_grad)

    def begin(self, op: str, weights_grad: bool = False) -> Header:
        """The handshake of an operation, if checked."""
        header = self.header(op, weights_grad)
        self.dispatcher.agree_again(header, self.layout.device)
        return header

    def refuse(self, op: str, fault: MoeCommError) -> NoReturn:
        """Raise ``fault`` in place of ``op``; on every rank if operations are checked."""
        self.dispatcher.agree_again(replace(self.header(op), fault=fault), self.layout.device)
        raise fault

    def start_out(self, values_S: Tensor, doing: str) -> Coming:
        """One number a slot to its expert's rank, [R] there."""
        routes = self.routes
        coming = self.dispatcher.channel.start_all_to_all(values_S, routes.send, routes.receive, doing)
        by_expert = routes.by_expert_R
        return coming if by_expert is None else coming.then(lambda arrived: arrived[by_expert])

    def start_back(self, values_R: Tensor, doing: str) -> Coming:
        """One number a row back to its slot, [T, K] there; 0 where a slot went nowhere."""
        routes, layout = self.routes, self.layout
        leaving = values_R if routes.by_source_R is None else values_R[routes.by_source_R]
        coming = self.dispatcher.channel.start_all_to_all(leaving, routes.receive, routes.send, doing)

        return coming.then(lambda values_S: to_slots(values_S, layout))


class Outward:
    """Rows of tokens on their way to the experts. ``rows_RD`` fills as chunks ``land``; own rows are there at once."""

    def __init__(self, passage: Passage, rows_TD: Tensor, header: Header, alloc: Callable[[int], Tensor]) -> None:
        self._crossing, layout = passage.crossing, passage.layout
        self._payload = passage.dispatcher.options.payloads.of(header.op)
        self._width, self._dtype = rows_TD.shape[1], rows_TD.dtype
        token_S = passage.routes.slot_S // layout.top_k
        packed_TX = pack(rows_TD, self._payload)
        channel, doing = passage.dispatcher.channel, describe(header)
        self._coming = [
            channel.start_all_to_all(take(packed_TX, token_S[chunk.leaving_S]), chunk.send, chunk.receive, doing)
            for chunk in self._crossing.chunks
        ]
        self.rows_RD = alloc(layout.num_rows)
        self.rows_RD[self._crossing.own_R] = self._unpacked(take(packed_TX, token_S[self._crossing.own_slots]))

    def ready(self, chunk: int) -> bool:
        """Whether ``land`` would not wait."""
        return self._coming[chunk].ready()

    def land(self, chunk: int) -> None:
        """Wait for a chunk and put its rows into ``rows_RD``. Chunks land in order."""
        self.rows_RD[self._crossing.chunks[chunk].arriving_R] = self._unpacked(self._coming[chunk]())

    def _unpacked(self, moved_RX: Tensor) -> Tensor:
        return unpack(moved_RX, self._payload, self._width, self._dtype)


class Homeward:
    """Results of experts on their way back to the tokens."""

    def __init__(self, passage: Passage, rows_RD: Tensor, header: Header) -> None:
        self._passage, self._rows_RD = passage, rows_RD
        self._payload, self._doing = passage.dispatcher.options.payloads.of(header.op), describe(header)
        self._coming: list[Coming] = []

    def start(self, chunk: int) -> None:
        """Send the results of a chunk, which are all computed. Chunks start in order."""
        part = self._passage.crossing.chunks[chunk]
        packed_RX = pack(take(self._rows_RD, part.arriving_R), self._payload)
        channel = self._passage.dispatcher.channel
        self._coming.append(channel.start_all_to_all(packed_RX, part.receive, part.send, self._doing))

    def summed(self, weights_TK: Tensor | None) -> Tensor:
        """[T, D] the sum of each token's results, after all have been started."""
        crossing, routes = self._passage.crossing, self._passage.routes
        rows_RD = self._rows_RD
        rows_SD = warm_rows(routes.slot_S.shape[0], rows_RD.shape[1], rows_RD.dtype, rows_RD.device)
        rows_SD[crossing.own_slots] = self._unpacked(pack(take(rows_RD, crossing.own_R), self._payload))
        for chunk, coming in zip(crossing.chunks, self._coming, strict=True):
            rows_SD[chunk.leaving_S] = self._unpacked(coming())
        return weighted_sum(rows_SD, routes.place_TK, weights_TK)

    def _unpacked(self, moved_SX: Tensor) -> Tensor:
        return unpack(moved_SX, self._payload, self._rows_RD.shape[1], self._rows_RD.dtype)


def follow(
    outward: Outward,
    crossing: Crossing,
    compute: Callable[[Piece], None],
    after: Callable[[int], None],
    spare: Callable[[], bool] = lambda: False,
) -> None:
    """Compute all rows as they arrive: chunk by chunk, own rows in between while none has come.

    Args:
        after: called with each chunk once its rows are computed.
        spare: does a part of other work while there is nothing to compute; False: there is none.
    """
    board = Board(crossing)
    own = board.own()
    for chunk in range(len(crossing.chunks)):
        while not outward.ready(chunk):
            piece = next(own, None)
            if piece is not None:
                compute(piece)
            elif not spare():
                break
        outward.land(chunk)
        for piece in board.arrived(chunk):
            compute(piece)
        after(chunk)
    for piece in own:
        compute(piece)


def lead(crossing: Crossing, compute: Callable[[Piece], None], after: Callable[[int], None]) -> None:
    """Compute all rows, those first that leave first; own rows last, while the others travel."""
    for index, chunk in enumerate(crossing.chunks):
        for piece in chunk.pieces:
            compute(piece)
        after(index)
    for piece in crossing.own:
        compute(piece)


def overlaps(dispatcher: Dispatcher) -> bool:
    """Whether rows can cross in chunks: with ``all_to_all``, each with its own scales. Shared memory, which moves rows
    at once by the cores that compute, has nothing to hide."""
    payloads = dispatcher.options.payloads
    return type(dispatcher) is AllToAllDispatcher and payloads.invariant
