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
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from moe_comm.comm.channel import Coming
from moe_comm.comm.header import Header, describe
from moe_comm.dispatch.all_to_all import AllToAllDispatcher, Routes, to_slots
from moe_comm.dispatch.base import Dispatcher, dispatch_by
from moe_comm.dispatch.checksums import Claim, claim
from moe_comm.dispatch.moved import KINDS, put_layout, rows_moved, sent
from moe_comm.dispatch.payload import bytes_per_row, pack, unpack
from moe_comm.dispatch.sums import weighted_sum
from moe_comm.dispatch.types import Dispatched, Layout
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.overlap.chunked import Overlap
from moe_comm.overlap.cost import DIRECTIONS, Work
from moe_comm.overlap.crossing import Board, Crossing, Piece, travelling_rows
from moe_comm.overlap.store import CHUNKED, TRITON
from moe_comm.overlap.tuning import choose
from moe_comm.runtime.events import EVENTS, Open
from moe_comm.runtime.group_names import group_of
from moe_comm.runtime.memory import take, warm_rows

if TYPE_CHECKING:
    from moe_comm.overlap.triton.launch import TritonPassage

COST = 4
"""A chunk of experts' rows costs so many times as much as a linear layer's, and has to be that much larger: there is
more to route, and a product for every expert in it. (Measured: at 0.25 MB two chunks lose, at 1 MB they win.)"""


@dataclass(frozen=True, eq=False)
class Passage:
    """Where the rows of one dispatch go, and in how many chunks.

    opening: the handshake of the dispatch. small: one chunk, of less than is worth one: better step after step.
    overlap: what was asked for. fused: the same for Triton kernels, if these have moved the rows. claim: checksums of
        the rows, which Triton's kernels do not check.

    Attributes:
        layout: as ``Dispatcher.dispatch`` gives it; its rows stand alike.
    """

    dispatcher: AllToAllDispatcher
    layout: Layout
    opening: Header
    chunks: int
    small: bool
    overlap: Overlap
    fused: TritonPassage | None = None
    claim: Claim | None = None

    @classmethod
    def open(
        cls,
        dispatcher: AllToAllDispatcher,
        x_TD: Tensor,
        ids_TK: Tensor,
        overlap: Overlap,
        *,
        width: int,
        width_back: int | None = None,
        weights_grad: bool = False,
        label: str = "",
    ) -> Passage:
        """Agree on a dispatch with the other ranks, as ``Dispatcher.dispatch`` does; and on its chunks.

        Args:
            width: columns, beside those that travel, of the product that a transfer hides behind; alike on every rank.
            width_back: the same of the product before the way back, if the chunks are to be those of both ways and
                directions; None: of the way to the experts alone.
            weights_grad: the backward pass will send gradients of routing weights; compared between ranks.

        Raises:
            ConfigError: the dispatcher's rows cannot cross in chunks, see ``overlaps``.
            InputError, RoutingError, RankMismatch: on every rank, before rows move.
            PeerDied, PeerTimeout: a rank is gone, or did not call in time.
        """
        if not overlaps(dispatcher):
            raise ConfigError(
                f"only the dispatcher all_to_all overlaps (and shared_memory, where dispatch_matmul and matmul_combine "
                f"are called by themselves), with payloads that carry their own scales; this is {dispatcher.name} with "
                f"{dispatcher.options.payloads}"
            )
        header = dispatcher.dispatch_header(x_TD, ids_TK, label)
        header = replace(header, requires_grad=header.requires_grad + 2 * weights_grad)
        layout = dispatcher.agree(x_TD, ids_TK, header)
        rows_WE = layout.state.rows_WE
        payload = dispatcher.options.payloads.of("dispatch")
        row_bytes = bytes_per_row(layout.hidden, payload, layout.dtype)
        worth = travelling_rows(rows_WE, dispatcher.placement) * row_bytes // COST
        chunks = overlap.chunks_of(worth)
        small = chunks == 1 and worth < overlap.chunk_bytes
        # Fused kernels consume rows as they land: nobody could compare them.
        claimed = None if overlap.backend == TRITON else claim(dispatcher, x_TD, ids_TK, header)
        passage = cls(dispatcher, layout, header, chunks, small, overlap, claim=claimed)
        if isinstance(overlap.chunks, str) and overlap.backend != TRITON:
            works = passage.works("dispatch_matmul", width)[:1]
            if width_back is not None:
                works = (*passage.works("dispatch_matmul", width), *passage.works("matmul_combine", width_back))
            chunks = choose(works[0] if len(works) == 1 else works, dispatcher.channel, x_TD.device, (CHUNKED,)).chunks
            passage = replace(passage, chunks=chunks, small=chunks == 1 and worth < overlap.chunk_bytes)
        return passage

    def works(self, operator: str, width: int) -> tuple[Work, ...]:
        """``operator`` beside a product of ``width`` columns, forward and backward; alike on every rank."""
        layout, world = self.layout, self.dispatcher.world
        mean, groups = int(self.routes.rows_WE.sum()) // world, -(-self.dispatcher.num_experts // world)
        return tuple(
            Work(operator, direction, mean, layout.hidden, width, layout.dtype, world, groups)
            for direction in DIRECTIONS
        )

    def each_way(self, operator: str, width: int) -> tuple[Passage, Passage]:
        """This passage in the chunks of ``operator`` forward, and backward: those asked for, or with "auto" what is
        best for each. The first call for a shape is collective then."""
        if not isinstance(self.overlap.chunks, str):
            return self, self
        channel, device = self.dispatcher.channel, self.layout.device
        forward, backward = (choose(work, channel, device, (CHUNKED,)).chunks for work in self.works(operator, width))
        return self._in(forward), self._in(backward)

    def _in(self, chunks: int) -> Passage:
        if chunks == self.chunks:
            return self
        if chunks not in self._others:
            self._others[chunks] = replace(self, chunks=chunks)
        return self._others[chunks]

    @cached_property
    def _others(self) -> dict[int, Passage]:
        """In other numbers of chunks."""
        return {}

    @cached_property
    def crossing(self) -> Crossing:
        """What is in which chunk."""
        dispatcher = self.dispatcher
        return Crossing.of(self.routes.rows_WE, dispatcher.placement, dispatcher.rank, self.chunks, self.layout.device)

    def dispatch_at_once(self, x_TD: Tensor) -> Dispatched:
        """The dispatch that was agreed on, one step, differentiable."""

        def send(x_TD: Tensor) -> tuple[Tensor, Layout]:
            rows_RD = self.dispatcher.send(x_TD, self.layout, self.opening)
            self.check(rows_RD)
            return rows_RD, self.layout

        return dispatch_by(self.dispatcher, x_TD, send, self.layout.label)

    def check(self, rows_RD: Tensor) -> None:
        """Compare rows that have arrived with their checksums, if there are any."""
        if self.claim is not None:
            self.claim.check(rows_RD)

    def sum_at_once(self, rows_RD: Tensor, weights_TK: Tensor | None, header: Header) -> Tensor:
        """[T, D] the sum of each token's results, in one step; without autograd."""
        with rows_moved(self.dispatcher, header.op, self.layout.label, self.layout):
            return self.dispatcher._sum(rows_RD, weights_TK, self.layout, header)

    def spread_at_once(
        self, grad_TD: Tensor, results_RD: Tensor | None, weights_TK: Tensor, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        """[R, D] the gradients of the results, and with ``results_RD`` [T, K] of the weights, in one step."""
        with rows_moved(self.dispatcher, header.op, self.layout.label, self.layout):
            return self.dispatcher._spread(grad_TD, results_RD, weights_TK, self.layout, header)

    @property
    def wide(self) -> torch.dtype:
        """What routing weights are multiplied in."""
        return torch.promote_types(self.layout.dtype, torch.float32)

    @property
    def routes(self) -> Routes:
        found: Routes = self.layout.state
        return found

    @cached_property
    def landed_TK(self) -> Tensor:
        """[T, K] place of each slot's result where own ones stand first, then chunk after chunk; -1 where dropped."""
        crossing, routes = self.crossing, self.routes
        slots_S = torch.arange(routes.slot_S.shape[0], device=self.layout.device)
        if not len(slots_S):
            return routes.place_TK
        landed_S = torch.cat((slots_S[crossing.own_slots], *(chunk.leaving_S for chunk in crossing.chunks)))
        at_S = torch.empty_like(slots_S).index_copy_(0, landed_S, slots_S)
        return torch.where(routes.place_TK < 0, routes.place_TK, at_S[routes.place_TK.clamp(min=0)])

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
        self._op, self._label = header.op, layout.label
        with _span(passage, header) as span:
            self._coming = [
                channel.start_all_to_all(take(packed_TX, token_S[chunk.leaving_S]), chunk.send, chunk.receive, doing)
                for chunk in self._crossing.chunks
            ]
            if header.op == "dispatch":
                put_layout(span, passage.dispatcher, layout)
        self.rows_RD = alloc(layout.num_rows)
        self.rows_RD[self._crossing.own_R] = self._unpacked(take(packed_TX, token_S[self._crossing.own_slots]))

    def ready(self, chunk: int) -> bool:
        """Whether ``land`` would not wait."""
        return self._coming[chunk].ready()

    def land(self, chunk: int) -> None:
        """Wait for a chunk and put its rows into ``rows_RD``. Chunks land in order."""
        with EVENTS.span(KINDS[self._op], self._op, layer=self._label):
            self.rows_RD[self._crossing.chunks[chunk].arriving_R] = self._unpacked(self._coming[chunk]())

    def _unpacked(self, moved_RX: Tensor) -> Tensor:
        return unpack(moved_RX, self._payload, self._width, self._dtype)


class Homeward:
    """Results of experts on their way back to the tokens."""

    def __init__(self, passage: Passage, rows_RD: Tensor, header: Header) -> None:
        self._passage, self._rows_RD = passage, rows_RD
        self._payload, self._doing = passage.dispatcher.options.payloads.of(header.op), describe(header)
        self._header = header
        self._coming: list[Coming] = []
        self._landing_SD: Tensor | None = None
        if not self._payload.narrows(rows_RD.dtype):  # it needs no room but that from which it is summed
            slots = passage.routes.slot_S.shape[0]
            self._landing_SD = warm_rows(slots, rows_RD.shape[1], rows_RD.dtype, rows_RD.device)
            self._landed = passage.crossing.own_R.shape[0]

    def start(self, chunk: int) -> None:
        """Send the results of a chunk, which are all computed. Chunks start in order."""
        part = self._passage.crossing.chunks[chunk]
        packed_RX = pack(take(self._rows_RD, part.arriving_R), self._payload)
        channel = self._passage.dispatcher.channel
        if self._landing_SD is None:
            coming = channel.start_all_to_all(packed_RX, part.receive, part.send, self._doing)
        else:
            first, self._landed = self._landed, self._landed + sum(part.send)
            out = self._landing_SD[first : self._landed]
            coming = channel.start_all_to_all(packed_RX, part.receive, part.send, self._doing, out)
        self._coming.append(coming)

    def summed(self, weights_TK: Tensor | None) -> Tensor:
        """[T, D] the sum of each token's results, after all have been started."""
        with _span(self._passage, self._header):
            return self._summed(weights_TK)

    def _summed(self, weights_TK: Tensor | None) -> Tensor:
        crossing, routes = self._passage.crossing, self._passage.routes
        rows_RD = self._rows_RD
        if self._landing_SD is not None:
            torch.index_select(rows_RD, 0, crossing.own_R, out=self._landing_SD[: crossing.own_R.shape[0]])
            for coming in self._coming:
                coming()
            return weighted_sum(self._landing_SD, self._passage.landed_TK, weights_TK)
        rows_SD = warm_rows(routes.slot_S.shape[0], rows_RD.shape[1], rows_RD.dtype, rows_RD.device)
        rows_SD[crossing.own_slots] = self._unpacked(pack(take(rows_RD, crossing.own_R), self._payload))
        for chunk, coming in zip(crossing.chunks, self._coming, strict=True):
            rows_SD[chunk.leaving_S] = self._unpacked(coming())
        return weighted_sum(rows_SD, routes.place_TK, weights_TK)

    def _unpacked(self, moved_SX: Tensor) -> Tensor:
        return unpack(moved_SX, self._payload, self._rows_RD.shape[1], self._rows_RD.dtype)


def _span(passage: Passage, header: Header) -> Open:
    layout, dispatcher = passage.layout, passage.dispatcher
    nbytes, group = sent(dispatcher, header.op, layout), group_of(dispatcher.group)
    return EVENTS.span(KINDS[header.op], header.op, layer=layout.label, group=group, nbytes=nbytes)


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
