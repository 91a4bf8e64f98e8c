"""Transport of the pipelined executor over collectives: the rows of one dispatch are sent in chunks.

    tokens           ──chunk 0──▶──chunk 1──▶──chunk 2──▶ rows_RD        ChunkedSend: dispatch, combine's backward
                     ◀──chunk 0──◀──chunk 1──◀──chunk 2── results_RD     ChunkedReturn: combine, dispatch's backward
    experts          [ own rows ][ chunk 0 ][ chunk 1 ][ chunk 2 ]

Every rank starts the same transfers in the same order: all chunks to the experts, then each chunk of results once it is
computed. Own rows are computed while the first chunk is in flight. The rows, their wire dtype (the dtype in which they
are sent) and the sums are those of the dispatcher, so the bits do not depend on the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from moe_comm.comm.channel import PendingTensor
from moe_comm.comm.header import describe
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher, Routes, to_slots
from moe_comm.dispatch.checksums import SentChecksums
from moe_comm.dispatch.operation import KINDS, Operation
from moe_comm.dispatch.slots.sums import weighted_sum
from moe_comm.dispatch.types import Dispatched, DispatchHandle
from moe_comm.dispatch.wire_dtype import bytes_per_row, pack, unpack, unpack_scaled
from moe_comm.errors import MoeCommError
from moe_comm.kernels.fp8 import ScaledRows, quantize_rows
from moe_comm.kernels.row_weights import scale_
from moe_comm.overlap.chunk_plan import ChunkPlan, RowRange, RowSegments, max_sent_rows
from moe_comm.overlap.executors.transport import RowDispatch, RowReturn, RowSend, SentGradients
from moe_comm.overlap.options import CHUNKED, Overlap
from moe_comm.overlap.tuning.choose import choose
from moe_comm.overlap.tuning.cost import DIRECTIONS, OperatorWork
from moe_comm.runtime.events import EVENTS, Open
from moe_comm.runtime.groups import group_of
from moe_comm.runtime.memory import take, warm_rows

EXPERT_CHUNK_FACTOR = 4
"""Factor by which a chunk for experts must be larger than a chunk of a linear layer, because it needs routing and one
GEMM for each expert. (Measured: at 0.25 MB two chunks are slower than one, at 1 MB they are faster.)"""


@dataclass(frozen=True, eq=False)
class ChunkedDispatch(RowDispatch):
    """One dispatch over ``all_to_all``. A segment is a chunk.

    operation: the dispatch, whose header the ranks have compared before rows move. small: there is one
        chunk, smaller than ``overlap.chunk_bytes``; serial execution is faster. overlap: the settings. checksums: of
        the sent rows, if they are checked.
    """

    dispatcher: AllToAllDispatcher
    operation: Operation
    small: bool
    overlap: Overlap
    checksums: SentChecksums | None = None

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
        beside: tuple[int, int] = (0, 0),
        weights_grad: bool = False,
        label: str = "",
        scaled: bool = False,
    ) -> ChunkedDispatch:
        """Run the handshake of ``Dispatcher.dispatch`` and choose the number of chunks. Collective.

        Args:
            width: Columns of the GEMM that overlaps the transfer to the experts; the same on every rank.
            width_back: The same for the GEMM before the results return. If given, one number of chunks is chosen for
                both transfers and both directions; None: for the transfer to the experts only.
            beside: Work of the caller while rows, and later results, are in flight (``OperatorWork.beside``); the same
                on every rank.
            weights_grad: Whether the backward pass will send gradients of routing weights; compared between ranks.
            scaled: The experts have fp8 GEMMs.
        """
        operation = dispatcher.dispatch_operation(x_TD, ids_TK, label, scaled=scaled)
        operation.weights_grad = weights_grad
        with dispatcher.report(operation), dispatcher.running(operation):
            handle = dispatcher.prepare_dispatch(x_TD, ids_TK)
        # All ranks compute the number of chunks from the same counts, so they agree without another exchange.
        rows_WE = handle.state.rows_WE
        wire_dtype = dispatcher.options.wire_dtypes.of("dispatch")
        row_bytes = bytes_per_row(handle.hidden, wire_dtype, handle.dtype)
        num_bytes = max_sent_rows(rows_WE, dispatcher.placement) * row_bytes // EXPERT_CHUNK_FACTOR
        chunks = overlap.chunks_of(num_bytes)
        small = chunks == 1 and num_bytes < overlap.chunk_bytes
        checksums = dispatcher.exchange_checksums(x_TD, ids_TK, operation)
        dispatch = cls(dispatcher, handle, chunks, operation, small, overlap, checksums=checksums)
        if isinstance(overlap.chunks, str):
            works = dispatch.works("dispatch_matmul", width)[:1]
            if width_back is not None:
                works = dispatch.works("dispatch_matmul", width, beside[0])
                works += dispatch.works("matmul_combine", width_back, beside[1])
            chunks = choose(works[0] if len(works) == 1 else works, dispatcher.channel, x_TD.device, (CHUNKED,)).chunks
            dispatch = replace(dispatch, chunks=chunks, small=chunks == 1)
        return dispatch

    def works(self, operator: str, width: int, beside: int = 0) -> tuple[OperatorWork, ...]:
        """Return the forward and backward work of ``operator`` with a GEMM of ``width`` columns; equal on all ranks."""
        handle, world = self.handle, self.dispatcher.world
        rows, experts = int(self.routes.rows_WE.sum()) // world, -(-self.dispatcher.num_experts // world)
        return _works(operator, rows, handle.hidden, width, handle.dtype, world, experts, beside)

    def per_direction(self, operator: str, width: int) -> tuple[ChunkedDispatch, ChunkedDispatch]:
        """Return this dispatch with the chunks for ``operator``, forward and backward. With chunks "auto", each
        direction has its own number, and the first call for a shape is collective."""
        if not isinstance(self.overlap.chunks, str):
            return self, self
        channel, device = self.dispatcher.channel, self.handle.device
        forward, backward = (choose(work, channel, device, (CHUNKED,)).chunks for work in self.works(operator, width))
        return self._with_chunks(forward), self._with_chunks(backward)

    def _with_chunks(self, chunks: int) -> ChunkedDispatch:
        if chunks == self.chunks:
            return self
        if chunks not in self._by_chunks:
            self._by_chunks[chunks] = replace(self, chunks=chunks)
        return self._by_chunks[chunks]

    @cached_property
    def _by_chunks(self) -> dict[int, ChunkedDispatch]:
        return {}

    @cached_property
    def chunk_plan(self) -> ChunkPlan:
        dispatcher = self.dispatcher
        return ChunkPlan.of(self.routes.rows_WE, dispatcher.placement, dispatcher.rank, self.chunks, self.handle.device)

    @property
    def segments(self) -> RowSegments:
        return self.chunk_plan.segments

    def send(self, x_TD: Tensor) -> ChunkedSend:
        """Start to send the tokens' rows to their experts."""
        return ChunkedSend(self, x_TD, self.operation)

    def send_gradients(
        self, grad_TD: Tensor, weights_TK: Tensor, weights_grad: bool, unscaled: bool
    ) -> ChunkedGradients:
        return ChunkedGradients(self, grad_TD, weights_TK, weights_grad, unscaled)

    def start_return(self, op: str, grads: tuple[bool, bool], after: RowSend | None) -> ChunkedReturn:
        # A return that follows a send in the same call needs no handshake of its own.
        operation = self.handshake(op, grads[1]) if after is None else self.next_operation(op)
        return ChunkedReturn(self, operation)

    def abort(self, error: Exception, send: RowSend | None = None) -> None:
        self.dispatcher.abort(error, label=self.handle.label, in_flight=True)

    def dispatch_at_once(self, x_TD: Tensor) -> Dispatched:
        """Send all rows in one transfer; differentiable."""

        def send(x_TD: Tensor) -> tuple[Tensor | ScaledRows, DispatchHandle]:
            rows: Tensor | ScaledRows
            with self.dispatcher.running(self.operation):
                if self.receives_scaled(self.operation):
                    rows = self.dispatcher.send_scaled(x_TD, self.handle)
                else:
                    rows = self.dispatcher.send(x_TD, self.handle)
            self.check(rows)
            if self.operation.scaled and isinstance(rows, Tensor):
                rows = quantize_rows(rows)
            return rows, self.handle

        return self.dispatcher.dispatch_by(x_TD, send, self.handle.label)

    def receives_scaled(self, operation: Operation) -> bool:
        """Return whether ``operation`` is a dispatch whose encoded rows are not decoded."""
        return operation.scaled and self.dispatcher.options.wire_dtypes.of(operation.op).format == "fp8"

    def check(self, rows: Tensor | ScaledRows) -> None:
        """Compare received rows with their checksums, if there are any."""
        if self.checksums is not None:
            self.checksums.check(rows.dequantized(self.handle.dtype) if isinstance(rows, ScaledRows) else rows)

    @property
    def routes(self) -> Routes:
        routes: Routes = self.handle.state
        return routes

    @cached_property
    def landing_TK(self) -> Tensor:
        """[T, K] position of each slot's result in the receive buffer: own rows, then each chunk; -1 if dropped."""
        chunk_plan, routes = self.chunk_plan, self.routes
        slots_S = torch.arange(routes.slot_S.shape[0], device=self.handle.device)
        if not len(slots_S):
            return routes.place_TK
        slot_at_S = torch.cat((slots_S[chunk_plan.own_slots], *(chunk.send_S for chunk in chunk_plan.chunks)))
        position_S = torch.empty_like(slots_S).index_copy_(0, slot_at_S, slots_S)
        return torch.where(routes.place_TK < 0, routes.place_TK, position_S[routes.place_TK.clamp(min=0)])

    def next_operation(self, op: str, weights_grad: bool = False, fault: MoeCommError | None = None) -> Operation:
        """Return the next operation ``op``, without a handshake."""
        return self.dispatcher.operation(op, self.handle, weights_grad, fault=fault)

    def handshake(self, op: str, weights_grad: bool = False, fault: MoeCommError | None = None) -> Operation:
        """Run the handshake of an operation, if it is checked."""
        operation = self.next_operation(op, weights_grad, fault)
        with self.dispatcher.running(operation):
            self.dispatcher.check_headers(self.handle.device)
        return operation

    def refuse(self, op: str, fault: MoeCommError) -> NoReturn:
        self.handshake(op, fault=fault)
        raise fault

    def send_slot_values(self, values_S: Tensor, description: str) -> PendingTensor:
        """Start to send one number per slot to its expert's rank, where the result is [R]."""
        routes = self.routes
        pending = self.dispatcher.channel.start_all_to_all(values_S, routes.send, routes.receive, description)
        by_expert = routes.by_expert_R
        return pending if by_expert is None else pending.then(lambda values_R: values_R[by_expert])

    def return_row_values(self, values_R: Tensor, description: str) -> PendingTensor:
        """Start to return one number per row to its slot, where the result is [T, K]; 0 for dropped slots."""
        routes, handle = self.routes, self.handle
        sent_R = values_R if routes.by_source_R is None else values_R[routes.by_source_R]
        pending = self.dispatcher.channel.start_all_to_all(sent_R, routes.receive, routes.send, description)

        return pending.then(lambda values_S: to_slots(values_S, handle))


class ChunkedSend(RowSend):
    """Sends the rows of tokens to the experts in chunks, which complete in order."""

    def __init__(self, dispatch: ChunkedDispatch, rows_TD: Tensor, operation: Operation) -> None:
        self._plan, handle = dispatch.chunk_plan, dispatch.handle
        self._wire_dtype = dispatch.dispatcher.options.wire_dtypes.of(operation.op)
        self._width, self._dtype = rows_TD.shape[1], rows_TD.dtype
        token_S = dispatch.routes.slot_S // handle.top_k
        packed_TX = pack(rows_TD, self._wire_dtype)
        channel, description = dispatch.dispatcher.channel, describe(operation)
        self._dispatch, self._op, self._next = dispatch, operation.op, 0
        with _span(dispatch, operation) as span:
            self._pending = [
                channel.start_all_to_all(
                    take(packed_TX, token_S[chunk.send_S]), chunk.send_counts, chunk.receive_counts, description
                )
                for chunk in self._plan.chunks
            ]
            if operation.op == "dispatch":
                dispatch.dispatcher.record_handle(span, handle)
        if dispatch.receives_scaled(operation):
            self._received_RX = warm_rows(handle.num_rows, packed_TX.shape[1], packed_TX.dtype, rows_TD.device)
            self.scaled = unpack_scaled(self._received_RX, self._wire_dtype, self._width)
        else:
            self._received_RX = self.rows_RD = warm_rows(handle.num_rows, self._width, self._dtype, rows_TD.device)
        self._store(self._plan.own_R, take(packed_TX, token_S[self._plan.own_slots]))

    def poll(self, wait: bool) -> Sequence[int]:
        chunk = self._next
        if not wait and not self._pending[chunk].ready():
            return ()
        self._next += 1
        self.receive_chunk(chunk)
        return (chunk,)

    def receive_chunk(self, chunk: int) -> None:
        """Wait for a chunk and copy its rows into ``rows_RD`` or ``scaled``."""
        with EVENTS.span(KINDS[self._op], self._op, layer=self._dispatch.handle.label):
            self._store(self._plan.chunks[chunk].receive_R, self._pending[chunk]())

    def close(self) -> None:
        if self._op == "dispatch":
            self._dispatch.check(self.scaled or self.rows_RD)

    def _store(self, at_N: Tensor, packed_NX: Tensor) -> None:
        if self.scaled is None:
            packed_NX = unpack(packed_NX, self._wire_dtype, self._width, self._dtype)
        self._received_RX[at_N] = packed_NX


class ChunkedGradients(ChunkedSend, SentGradients):
    """Sends the gradients of tokens to the experts, where they are multiplied by the routing weights."""

    def __init__(
        self, dispatch: ChunkedDispatch, grad_TD: Tensor, weights_TK: Tensor, weights_grad: bool, unscaled: bool
    ) -> None:
        operation = dispatch.handshake("combine backward", weights_grad)
        self._description = f"{describe(operation)}, routing weights"
        self._scales = dispatch.send_slot_values(weights_TK.reshape(-1)[dispatch.routes.slot_S], self._description)
        self._weights_R: Tensor | None = None
        if unscaled:
            self.weights_R = weights_TK.new_empty(dispatch.handle.num_rows)
        self._results_RD: Tensor | None = None
        self._dots_R: Tensor | None = None
        super().__init__(dispatch, grad_TD, operation)

    def start(self, results_RD: Tensor | None) -> None:
        self._results_RD = results_RD

    def prepare(self, row_range: RowRange) -> None:
        """Multiply received rows by their routing weights, in place, or store these for the experts."""
        if self.weights_R is not None:
            self.weights_R[row_range.rows] = self._weights_at(row_range.rows)
            return
        results = None if self._results_RD is None else self._results_RD[row_range.rows]
        dots = scale_(self.rows_RD[row_range.rows], self._weights_at(row_range.rows), results)
        if dots is not None:
            if self._dots_R is None:
                self._dots_R = dots.new_empty(self.rows_RD.shape[0])
            self._dots_R[row_range.rows] = dots

    def _weights_at(self, rows: slice) -> Tensor:
        if self._weights_R is None:
            self._weights_R = self._scales()
        return self._weights_R[rows]

    def start_weight_gradient(self, dots_R: Tensor | None) -> Callable[[], Tensor | None]:
        self._weights_at(slice(0))  # every rank waits for this transfer, also without rows
        if dots_R is not None:
            return self._dispatch.return_row_values(dots_R, self._description)
        if self._results_RD is None:
            return lambda: None
        sum_dtype = self._dispatch.sum_dtype
        dots_R = self._results_RD.new_empty(0, dtype=sum_dtype) if self._dots_R is None else self._dots_R
        return self._dispatch.return_row_values(dots_R, self._description)


class ChunkedReturn(RowReturn):
    """Returns the results of the experts to the tokens in chunks, which start in order."""

    def __init__(self, dispatch: ChunkedDispatch, operation: Operation) -> None:
        handle = dispatch.handle
        self._dispatch, self._operation = dispatch, operation
        self._wire_dtype, self._description = (
            dispatch.dispatcher.options.wire_dtypes.of(operation.op),
            describe(operation),
        )
        self._pending: list[PendingTensor] = []
        self._received_SD: Tensor | None = None
        self.rows_RD = warm_rows(handle.num_rows, handle.hidden, handle.dtype, handle.device)
        if not self._wire_dtype.narrows(handle.dtype):  # received rows can be summed without unpacking
            slots = dispatch.routes.slot_S.shape[0]
            self._received_SD = warm_rows(slots, handle.hidden, handle.dtype, handle.device)
            self._num_received = dispatch.chunk_plan.own_R.shape[0]

    def mark_computed(self, segment: int) -> None:
        chunk = self._dispatch.chunk_plan.chunks[segment]
        packed_RX = pack(take(self.rows_RD, chunk.receive_R), self._wire_dtype)
        channel = self._dispatch.dispatcher.channel
        if self._received_SD is None:
            pending = channel.start_all_to_all(packed_RX, chunk.receive_counts, chunk.send_counts, self._description)
        else:
            first, self._num_received = self._num_received, self._num_received + sum(chunk.send_counts)
            out = self._received_SD[first : self._num_received]
            pending = channel.start_all_to_all(
                packed_RX, chunk.receive_counts, chunk.send_counts, self._description, out
            )
        self._pending.append(pending)

    def result(self, weights_TK: Tensor | None) -> Tensor:
        with _span(self._dispatch, self._operation):
            return self._summed(weights_TK)

    def _summed(self, weights_TK: Tensor | None) -> Tensor:
        chunk_plan, routes = self._dispatch.chunk_plan, self._dispatch.routes
        rows_RD = self.rows_RD
        if self._received_SD is not None:
            # Sum the results where they were received, without a copy into slot order.
            torch.index_select(rows_RD, 0, chunk_plan.own_R, out=self._received_SD[: chunk_plan.own_R.shape[0]])
            for pending in self._pending:
                pending()
            return weighted_sum(self._received_SD, self._dispatch.landing_TK, weights_TK)
        rows_SD = warm_rows(routes.slot_S.shape[0], rows_RD.shape[1], rows_RD.dtype, rows_RD.device)
        rows_SD[chunk_plan.own_slots] = self._unpacked(pack(take(rows_RD, chunk_plan.own_R), self._wire_dtype))
        for chunk, pending in zip(chunk_plan.chunks, self._pending, strict=True):
            rows_SD[chunk.send_S] = self._unpacked(pending())
        return weighted_sum(rows_SD, routes.place_TK, weights_TK)

    def _unpacked(self, packed_SX: Tensor) -> Tensor:
        return unpack(packed_SX, self._wire_dtype, self.rows_RD.shape[1], self.rows_RD.dtype)


@lru_cache(maxsize=1024)
def _works(
    operator: str, rows: int, hidden: int, width: int, dtype: torch.dtype, world: int, experts: int, beside: int
) -> tuple[OperatorWork, ...]:
    return tuple(
        OperatorWork(operator, direction, rows, hidden, width, dtype, world, experts, beside)
        for direction in DIRECTIONS
    )


def _span(dispatch: ChunkedDispatch, operation: Operation) -> Open:
    handle, dispatcher = dispatch.handle, dispatch.dispatcher
    nbytes, group = dispatcher.sent_bytes(operation.op, handle), group_of(dispatcher.group)
    return EVENTS.span(KINDS[operation.op], operation.op, layer=handle.label, group=group, nbytes=nbytes)
