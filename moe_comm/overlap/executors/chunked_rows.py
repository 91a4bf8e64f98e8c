"""Transport of the pipelined executor over collectives: rows of one dispatch are sent in chunks.

    tokens' side     ──chunk 0──▶──chunk 1──▶──chunk 2──▶ rows_RD        ChunkedSend: dispatch, combine's backward
                     ◀──chunk 0──◀──chunk 1──◀──chunk 2── results_RD     ChunkedReturn: combine, dispatch's backward
    experts' side    [ own rows ][ chunk 0 ][ chunk 1 ][ chunk 2 ]

Every rank starts the same transfers in the same order: all chunks to the experts, then chunk after chunk back as they
are computed. Own rows fill the wait for a chunk. The rows are those that the dispatcher would send at once, in the same
wire dtype, and the sums are taken where it takes them: the same bits, whatever the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
from torch import Tensor

from moe_comm.comm.channel import PendingTensor
from moe_comm.comm.header import Header, describe
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher, Routes, to_slots
from moe_comm.dispatch.base import Dispatcher, dispatch_by
from moe_comm.dispatch.checksums import Claim, claim
from moe_comm.dispatch.dispatch_spans import KINDS, put_handle, sent
from moe_comm.dispatch.sums import scale_, weighted_sum
from moe_comm.dispatch.types import Dispatched, DispatchHandle
from moe_comm.dispatch.wire_dtype import bytes_per_row, pack, unpack
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.overlap.chunk_plan import Crossing, Parts, Piece, travelling_rows
from moe_comm.overlap.cost import DIRECTIONS, Work
from moe_comm.overlap.executors.transport import RowDispatch, RowReturn, RowSend, SentGradients
from moe_comm.overlap.options import CHUNKED, TRITON, Overlap
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
class ChunkedDispatch(RowDispatch):
    """Where the rows of one dispatch go, and in how many chunks; one chunk is a part.

    opening: the handshake of the dispatch. small: one chunk, of less than is worth one: better step after step.
    overlap: what was asked for. fused: the same for Triton kernels, if these have moved the rows. claim: checksums of
        the rows, which Triton's kernels do not check.
    """

    dispatcher: AllToAllDispatcher
    opening: Header
    small: bool
    overlap: Overlap
    fused: TritonPassage | None = None
    claim: Claim | None = None

    in_flight: ClassVar[bool] = True

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
    ) -> ChunkedDispatch:
        """Agree on a dispatch with the other ranks, as ``Dispatcher.dispatch`` does; and on its chunks.

        Args:
            width: columns, beside those that travel, of the product that a transfer hides behind; alike on every rank.
            width_back: the same of the product before the way back, if the chunks are to be those of both ways and
                directions; None: of the way to the experts alone.
            weights_grad: the backward pass will send gradients of routing weights; compared between ranks.

        Raises:
            ConfigError: the dispatcher's rows cannot cross in chunks, see ``sends_chunks``.
            InputError, RoutingError, RankMismatch: on every rank, before rows move.
            PeerDied, PeerTimeout: a rank is gone, or did not call in time.
        """
        if not sends_chunks(dispatcher):
            raise ConfigError(
                f"only the dispatcher all_to_all overlaps (and shared_memory, where dispatch_matmul and matmul_combine "
                f"are called by themselves), with payloads that carry their own scales; this is {dispatcher.name} with "
                f"{dispatcher.options.wire_dtypes}"
            )
        header = dispatcher.dispatch_header(x_TD, ids_TK, label)
        header = replace(header, requires_grad=header.requires_grad + 2 * weights_grad)
        handle = dispatcher.agree(x_TD, ids_TK, header)
        rows_WE = handle.state.rows_WE
        wire_dtype = dispatcher.options.wire_dtypes.of("dispatch")
        row_bytes = bytes_per_row(handle.hidden, wire_dtype, handle.dtype)
        worth = travelling_rows(rows_WE, dispatcher.placement) * row_bytes // COST
        chunks = overlap.chunks_of(worth)
        small = chunks == 1 and worth < overlap.chunk_bytes
        # Fused kernels consume rows as they land: nobody could compare them.
        claimed = None if overlap.backend == TRITON else claim(dispatcher, x_TD, ids_TK, header)
        dispatch = cls(dispatcher, handle, chunks, header, small, overlap, claim=claimed)
        if isinstance(overlap.chunks, str) and overlap.backend != TRITON:
            works = dispatch.works("dispatch_matmul", width)[:1]
            if width_back is not None:
                works = (*dispatch.works("dispatch_matmul", width), *dispatch.works("matmul_combine", width_back))
            chunks = choose(works[0] if len(works) == 1 else works, dispatcher.channel, x_TD.device, (CHUNKED,)).chunks
            dispatch = replace(dispatch, chunks=chunks, small=chunks == 1)
        return dispatch

    def works(self, operator: str, width: int) -> tuple[Work, ...]:
        """``operator`` with a product of ``width`` columns, forward and backward; the same on every rank."""
        handle, world = self.handle, self.dispatcher.world
        rows, groups = int(self.routes.rows_WE.sum()) // world, -(-self.dispatcher.num_experts // world)
        return _works(operator, rows, handle.hidden, width, handle.dtype, world, groups)

    def each_way(self, operator: str, width: int) -> tuple[ChunkedDispatch, ChunkedDispatch]:
        """This dispatch in the chunks of ``operator`` forward, and backward: those asked for, or with "auto" what is
        best for each. The first call for a shape is collective then."""
        if not isinstance(self.overlap.chunks, str):
            return self, self
        channel, device = self.dispatcher.channel, self.handle.device
        forward, backward = (choose(work, channel, device, (CHUNKED,)).chunks for work in self.works(operator, width))
        return self._in(forward), self._in(backward)

    def _in(self, chunks: int) -> ChunkedDispatch:
        if chunks == self.chunks:
            return self
        if chunks not in self._others:
            self._others[chunks] = replace(self, chunks=chunks)
        return self._others[chunks]

    @cached_property
    def _others(self) -> dict[int, ChunkedDispatch]:
        """In other numbers of chunks."""
        return {}

    @cached_property
    def crossing(self) -> Crossing:
        """What is in which chunk."""
        dispatcher = self.dispatcher
        return Crossing.of(self.routes.rows_WE, dispatcher.placement, dispatcher.rank, self.chunks, self.handle.device)

    @property
    def parts(self) -> Parts:
        return self.crossing.parts

    def send(self, x_TD: Tensor) -> ChunkedSend:
        """Begin to send the tokens' rows to their experts."""
        return ChunkedSend(self, x_TD, self.opening)

    def send_gradients(self, grad_TD: Tensor, weights_TK: Tensor, weights_grad: bool) -> ChunkedGradients:
        return ChunkedGradients(self, grad_TD, weights_TK, weights_grad)

    def send_back(self, op: str, grads: tuple[bool, bool], after: RowSend | None) -> ChunkedReturn:
        # What follows from the operation before, without a caller in between, needs no handshake.
        header = self.begin(op, grads[1]) if after is None else self.header(op)
        return ChunkedReturn(self, header)

    def abort_on_error(self, send: RowSend | None) -> AbstractContextManager[None]:
        return self.dispatcher.abort_on_error(self.handle.label, in_flight=True)

    def dispatch_at_once(self, x_TD: Tensor) -> Dispatched:
        """The dispatch that was agreed on, one step, differentiable."""

        def send(x_TD: Tensor) -> tuple[Tensor, DispatchHandle]:
            rows_RD = self.dispatcher.send(x_TD, self.handle, self.opening)
            self.check(rows_RD)
            return rows_RD, self.handle

        return dispatch_by(self.dispatcher, x_TD, send, self.handle.label)

    def check(self, rows_RD: Tensor) -> None:
        """Compare rows that have arrived with their checksums, if there are any."""
        if self.claim is not None:
            self.claim.check(rows_RD)

    @property
    def routes(self) -> Routes:
        found: Routes = self.handle.state
        return found

    @cached_property
    def landed_TK(self) -> Tensor:
        """[T, K] place of each slot's result where own ones stand first, then chunk after chunk; -1 where dropped."""
        crossing, routes = self.crossing, self.routes
        slots_S = torch.arange(routes.slot_S.shape[0], device=self.handle.device)
        if not len(slots_S):
            return routes.place_TK
        landed_S = torch.cat((slots_S[crossing.own_slots], *(chunk.leaving_S for chunk in crossing.chunks)))
        at_S = torch.empty_like(slots_S).index_copy_(0, landed_S, slots_S)
        return torch.where(routes.place_TK < 0, routes.place_TK, at_S[routes.place_TK.clamp(min=0)])

    def header(self, op: str, weights_grad: bool = False) -> Header:
        """The next header of ``op``, without a handshake."""
        return self.dispatcher.header(op, self.handle, weights_grad)

    def begin(self, op: str, weights_grad: bool = False) -> Header:
        """The handshake of an operation, if checked."""
        header = self.header(op, weights_grad)
        self.dispatcher.agree_again(header, self.handle.device)
        return header

    def refuse(self, op: str, fault: MoeCommError) -> NoReturn:
        """Raise ``fault`` in place of ``op``; on every rank if operations are checked."""
        self.dispatcher.agree_again(replace(self.header(op), fault=fault), self.handle.device)
        raise fault

    def start_out(self, values_S: Tensor, description: str) -> PendingTensor:
        """One number a slot to its expert's rank, [R] there."""
        routes = self.routes
        pending = self.dispatcher.channel.start_all_to_all(values_S, routes.send, routes.receive, description)
        by_expert = routes.by_expert_R
        return pending if by_expert is None else pending.then(lambda arrived: arrived[by_expert])

    def start_back(self, values_R: Tensor, description: str) -> PendingTensor:
        """One number a row back to its slot, [T, K] there; 0 where a slot went nowhere."""
        routes, handle = self.routes, self.handle
        leaving = values_R if routes.by_source_R is None else values_R[routes.by_source_R]
        pending = self.dispatcher.channel.start_all_to_all(leaving, routes.receive, routes.send, description)

        return pending.then(lambda values_S: to_slots(values_S, handle))


class ChunkedSend(RowSend):
    """Rows of tokens on their way to the experts, in chunks, which complete in order."""

    def __init__(self, dispatch: ChunkedDispatch, rows_TD: Tensor, header: Header) -> None:
        self._crossing, handle = dispatch.crossing, dispatch.handle
        self._payload = dispatch.dispatcher.options.wire_dtypes.of(header.op)
        self._width, self._dtype = rows_TD.shape[1], rows_TD.dtype
        token_S = dispatch.routes.slot_S // handle.top_k
        packed_TX = pack(rows_TD, self._payload)
        channel, description = dispatch.dispatcher.channel, describe(header)
        self._dispatch, self._op, self._next = dispatch, header.op, 0
        with _span(dispatch, header) as span:
            self._pending = [
                channel.start_all_to_all(
                    take(packed_TX, token_S[chunk.leaving_S]), chunk.send, chunk.receive, description
                )
                for chunk in self._crossing.chunks
            ]
            if header.op == "dispatch":
                put_handle(span, dispatch.dispatcher, handle)
        self.rows_RD = warm_rows(handle.num_rows, self._width, self._dtype, rows_TD.device)
        self.rows_RD[self._crossing.own_R] = self._unpacked(take(packed_TX, token_S[self._crossing.own_slots]))

    def take(self, wait: bool) -> Sequence[int]:
        chunk = self._next
        if not wait and not self._pending[chunk].ready():
            return ()
        self._next += 1
        self.land(chunk)
        return (chunk,)

    def land(self, chunk: int) -> None:
        """Wait for a chunk and put its rows into ``rows_RD``."""
        with EVENTS.span(KINDS[self._op], self._op, layer=self._dispatch.handle.label):
            self.rows_RD[self._crossing.chunks[chunk].arriving_R] = self._unpacked(self._pending[chunk]())

    def close(self) -> None:
        if self._op == "dispatch":
            self._dispatch.check(self.rows_RD)

    def _unpacked(self, moved_RX: Tensor) -> Tensor:
        return unpack(moved_RX, self._payload, self._width, self._dtype)


class ChunkedGradients(ChunkedSend, SentGradients):
    """Gradients of tokens on their way to the experts, where they are multiplied by the routing weights."""

    def __init__(self, dispatch: ChunkedDispatch, grad_TD: Tensor, weights_TK: Tensor, weights_grad: bool) -> None:
        header = dispatch.begin("combine backward", weights_grad)
        self._description = f"{describe(header)}, routing weights"
        self._scales = dispatch.start_out(weights_TK.reshape(-1)[dispatch.routes.slot_S], self._description)
        self._weights_R: Tensor | None = None
        self._results_RD: Tensor | None = None
        self._dots_R: Tensor | None = None
        super().__init__(dispatch, grad_TD, header)

    def open(self, results_RD: Tensor | None) -> None:
        self._results_RD = results_RD

    def prepare(self, piece: Piece) -> None:
        """Multiply completed rows by their weights, in place."""
        results = None if self._results_RD is None else self._results_RD[piece.rows]
        dots = scale_(self.rows_RD[piece.rows], self._weights_at(piece.rows), results)
        if dots is not None:
            if self._dots_R is None:
                self._dots_R = dots.new_empty(self.rows_RD.shape[0])
            self._dots_R[piece.rows] = dots

    def _weights_at(self, rows: slice) -> Tensor:
        if self._weights_R is None:
            self._weights_R = self._scales()
        return self._weights_R[rows]

    def start_weights(self) -> Callable[[], Tensor | None]:
        self._weights_at(slice(0))  # taken in any case, as every rank does
        if self._results_RD is None:
            return lambda: None
        wide = self._dispatch.wide
        dots_R = self._results_RD.new_empty(0, dtype=wide) if self._dots_R is None else self._dots_R
        return self._dispatch.start_back(dots_R, self._description)


class ChunkedReturn(RowReturn):
    """Results of experts on their way back to the tokens, in chunks. Chunks start in order."""

    def __init__(self, dispatch: ChunkedDispatch, header: Header) -> None:
        handle = dispatch.handle
        self._dispatch, self._header = dispatch, header
        self._payload, self._description = dispatch.dispatcher.options.wire_dtypes.of(header.op), describe(header)
        self._pending: list[PendingTensor] = []
        self._landing_SD: Tensor | None = None
        self.rows_RD = warm_rows(handle.num_rows, handle.hidden, handle.dtype, handle.device)
        if not self._payload.narrows(handle.dtype):  # it needs no room but that from which it is summed
            slots = dispatch.routes.slot_S.shape[0]
            self._landing_SD = warm_rows(slots, handle.hidden, handle.dtype, handle.device)
            self._landed = dispatch.crossing.own_R.shape[0]

    def computed(self, part: int) -> None:
        chunk = self._dispatch.crossing.chunks[part]
        packed_RX = pack(take(self.rows_RD, chunk.arriving_R), self._payload)
        channel = self._dispatch.dispatcher.channel
        if self._landing_SD is None:
            pending = channel.start_all_to_all(packed_RX, chunk.receive, chunk.send, self._description)
        else:
            first, self._landed = self._landed, self._landed + sum(chunk.send)
            out = self._landing_SD[first : self._landed]
            pending = channel.start_all_to_all(packed_RX, chunk.receive, chunk.send, self._description, out)
        self._pending.append(pending)

    def result(self, weights_TK: Tensor | None) -> Tensor:
        with _span(self._dispatch, self._header):
            return self._summed(weights_TK)

    def _summed(self, weights_TK: Tensor | None) -> Tensor:
        crossing, routes = self._dispatch.crossing, self._dispatch.routes
        rows_RD = self.rows_RD
        if self._landing_SD is not None:
            torch.index_select(rows_RD, 0, crossing.own_R, out=self._landing_SD[: crossing.own_R.shape[0]])
            for pending in self._pending:
                pending()
            return weighted_sum(self._landing_SD, self._dispatch.landed_TK, weights_TK)
        rows_SD = warm_rows(routes.slot_S.shape[0], rows_RD.shape[1], rows_RD.dtype, rows_RD.device)
        rows_SD[crossing.own_slots] = self._unpacked(pack(take(rows_RD, crossing.own_R), self._payload))
        for chunk, pending in zip(crossing.chunks, self._pending, strict=True):
            rows_SD[chunk.leaving_S] = self._unpacked(pending())
        return weighted_sum(rows_SD, routes.place_TK, weights_TK)

    def _unpacked(self, moved_SX: Tensor) -> Tensor:
        return unpack(moved_SX, self._payload, self.rows_RD.shape[1], self.rows_RD.dtype)


@lru_cache(maxsize=1024)
def _works(
    operator: str, rows: int, hidden: int, width: int, dtype: torch.dtype, world: int, groups: int
) -> tuple[Work, ...]:
    return tuple(Work(operator, direction, rows, hidden, width, dtype, world, groups) for direction in DIRECTIONS)


def _span(dispatch: ChunkedDispatch, header: Header) -> Open:
    handle, dispatcher = dispatch.handle, dispatch.dispatcher
    nbytes, group = sent(dispatcher, header.op, handle), group_of(dispatcher.group)
    return EVENTS.span(KINDS[header.op], header.op, layer=handle.label, group=group, nbytes=nbytes)


def sends_chunks(dispatcher: Dispatcher) -> bool:
    """Whether rows can be sent in chunks: with ``all_to_all``, each row with its own scales."""
    return type(dispatcher) is AllToAllDispatcher and dispatcher.options.wire_dtypes.invariant
