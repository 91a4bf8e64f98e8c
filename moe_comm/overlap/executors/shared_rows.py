"""Transport of the pipelined executor between ranks that access each other's memory. Each peer's rows are a segment.

This is for ``shared_memory``, and on GPUs ``peer_to_peer``, which differs in two points: the CPU does not wait for
rows, but queues a kernel that waits; and all results are sent together, after the last row is computed.

Each rank writes its own rows at once into the blocks of their owners, and reads results in place. The pipelined
executor hides the wait for peers: a rank computes complete rows while its peers still write or compute.

    send        every rank writes its rows, and raises a flag              (dispatch, and combine's backward)
                own rows ▸ rank 2's, once complete ▸ rank 1's ...          in the order in which they complete

    return      results for rank 1 ▸ its flag ▸ for rank 2 ▸ its flag ... ▸ own   (combine, dispatch's backward)
                a rank sums its tokens' results in place, once all peers have raised their flags for it

The protocol is in csrc/cpu/pending.h. A group runs one operation at a time, so in a whole layer the return starts when
the rows of all peers are complete. Results that have been computed by then are flagged at once, the others as they are
computed. This costs no time: no rank can take its sum before the last peer has computed its rows, and that peer has
sent its own rows before. The dispatcher's operations use the same protocol, so serial and pipelined ranks can run
together.

The GEMMs compute the same rows, split by source, and the sums are the dispatcher's, so the bits are the same. Peers are
computed in as many groups as there are chunks: fewer groups, larger GEMMs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from moe_comm.dispatch.pending import IncomingRows, OutgoingRows, PendingDispatcher
from moe_comm.dispatch.types import Dispatched, DispatchHandle
from moe_comm.dispatch.wire_dtype import WireDtype, quantized, rounded
from moe_comm.errors import HeapError, MoeCommError
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.overlap.chunk_plan import RowRange, RowSegments, max_sent_rows, ranges_by_source
from moe_comm.overlap.executors.chunked_rows import EXPERT_CHUNK_FACTOR
from moe_comm.overlap.executors.transport import RowDispatch, RowReturn, RowSend, SentGradients
from moe_comm.overlap.options import Overlap
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import communication_span

StartDispatch = Callable[[Tensor, Tensor], IncomingRows]


@dataclass(frozen=True, eq=False)
class SharedDispatch(RowDispatch):
    """One dispatch over ``shared_memory`` or ``peer_to_peer``. Segment r is the rows of rank r.

    chunks: number of groups of peers, at most; 1 if there are too few rows to overlap.
    """

    dispatcher: PendingDispatcher
    sources: tuple[tuple[RowRange, ...], ...]

    in_flight: ClassVar[bool] = False

    @cached_property
    def segments(self) -> RowSegments:
        rank = self.dispatcher.rank
        return RowSegments(self.sources, self.sources[rank], _groups(self.dispatcher.world, rank, self.chunks))

    @classmethod
    def open(
        cls,
        dispatcher: PendingDispatcher,
        x_TD: Tensor,
        ids_TK: Tensor,
        overlap: Overlap,
        *,
        label: str = "",
        start: StartDispatch | None = None,
        scaled: bool = False,
    ) -> tuple[SharedDispatch, SharedSend]:
        """Run the handshake of a dispatch and write this rank's rows. Collective.

        The returned ``SharedSend`` must be closed before the group runs another operation.

        Args:
            start: Starts the dispatch; None: ``dispatcher.start_dispatch``.
            scaled: The experts have fp8 GEMMs.
        """
        operation = dispatcher.dispatch_operation(x_TD, ids_TK, label, scaled=scaled)
        with operation:
            incoming = (start or dispatcher.start_dispatch)(x_TD.detach(), ids_TK)
            dispatcher.record_handle(operation.span, incoming.handle)
        try:
            handle, placement = incoming.handle, dispatcher.placement
            handle.extra = dispatcher.extra_routes(ids_TK, handle)
            rows_WE = dispatcher.rows_by_source(incoming)
            row_bytes = handle.hidden * handle.dtype.itemsize
            chunks = overlap.chunks_of(max_sent_rows(rows_WE, placement) * row_bytes // EXPERT_CHUNK_FACTOR)
            sources = ranges_by_source(rows_WE, placement, dispatcher.rank)

            # As early as possible: if an expert raises on one rank, the exchange must not wait for that rank.
            early = dispatcher.exchange_checksums(x_TD, ids_TK, operation) if dispatcher.collectives_in_flight else None

            def check(send: SharedSend) -> None:
                checksums = early
                if not dispatcher.collectives_in_flight:
                    checksums = dispatcher.exchange_checksums(x_TD, ids_TK, operation)
                if checksums is None:
                    return
                wire_dtype = dispatcher.options.wire_dtypes.of(operation.op)
                if scaled and wire_dtype.format == "fp8":
                    checksums.check(send.quantized(wire_dtype).dequantized(handle.dtype))
                else:
                    checksums.check(send.rows_RD)

            dispatch = cls(dispatcher, handle, chunks, sources)
            return dispatch, SharedSend(dispatch.segments, handle.label, incoming, check)
        except BaseException as error:
            incoming.__exit__(type(error), error, error.__traceback__)
            raise

    def send_gradients(
        self, grad_TD: Tensor, weights_TK: Tensor, weights_grad: bool, unscaled: bool
    ) -> SharedGradients:
        return SharedGradients(self, grad_TD, weights_TK, weights_grad, unscaled)

    def start_return(self, op: str, grads: tuple[bool, bool], after: RowSend | None) -> SharedReturn:
        assert after is None or isinstance(after, SharedSend)
        return SharedReturn(self, op, grads[0], after)

    def per_direction(self, operator: str, width: int) -> tuple[SharedDispatch, SharedDispatch]:
        return self, self

    def dispatch_at_once(self, send: SharedSend, x_TD: Tensor, scaled: bool = False) -> Dispatched:
        """Complete the dispatch in one step; differentiable."""

        def complete(_: Tensor) -> tuple[Tensor | ScaledRows, DispatchHandle]:
            send.close()
            wire_dtype = self.dispatcher.options.wire_dtypes.of("dispatch")
            return send.quantized(wire_dtype) if scaled else send.rows_RD, self.handle

        return self.dispatcher.dispatch_by(x_TD, complete, self.handle.label, counted=False)

    def refuse(self, op: str, fault: MoeCommError) -> NoReturn:
        self.dispatcher.refuse(fault, torch.empty(0, dtype=self.handle.dtype, device="cpu"), label=self.handle.label)

    def abort(self, error: Exception, send: RowSend | None = None) -> None:
        if send is not None:
            # The next operation reports the error to the other ranks; this one must be complete first.
            with suppress(MoeCommError):
                send.close()
        self.dispatcher.abort(error, label=self.handle.label)


def _groups(world: int, rank: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of peers. Each rank starts with the next rank, so that no rank is first, or last, for all."""
    peers = [(rank + i) % world for i in range(1, world)]
    size = max(1, math.ceil(len(peers) / chunks))
    return tuple(tuple(peers[i : i + size]) for i in range(0, len(peers), size))


class SharedSend(RowSend):
    """Sends rows to the experts. The group cannot run another operation before it is closed.

    Attributes:
        complete: Whether the rows of all peers are complete, and the group can run its next operation.
        on_complete: Called when it is complete.
        group_by_group: Return one group of peers at a time, so that results return group by group. If False, all
            complete peers are returned together, for larger GEMMs.

    Args:
        check: Compares the received rows with their checksums, collectively, if there are any.
    """

    def __init__(
        self,
        segments: RowSegments,
        label: str,
        incoming: IncomingRows | None,
        check: Callable[[SharedSend], None] | None = None,
    ) -> None:
        self._label, self._check = label, check
        self._pending_peers = [peer for group in segments.groups for peer in group]
        self._group_size = max(map(len, segments.groups), default=1)
        self._incoming = incoming
        self.complete = False
        self.on_complete: Callable[[], None] | None = None
        self.group_by_group = False
        if incoming is not None:
            self.scaled = incoming.scaled
            if self.scaled is None:
                self.rows_RD = incoming.rows_RD

    def quantized(self, wire_dtype: WireDtype) -> ScaledRows:
        """Return all rows for fp8 GEMMs, after ``close``. wire_dtype: of dispatch."""
        return self.scaled or quantized(self.rows_RD, wire_dtype)

    def poll(self, wait: bool) -> Sequence[int]:
        pending, incoming = self._pending_peers, self._incoming
        ready = pending if self.complete else [peer for peer in pending if _started(incoming).ready(peer)]
        # Return full groups only: fewer, larger GEMMs.
        if len(ready) < min(self._group_size, len(pending)):
            if wait:
                with _wait_span(Kind.DISPATCH, self._label):
                    _started(incoming).next([peer for peer in pending if peer not in ready])
            return ()
        if self.group_by_group:
            ready = ready[: self._group_size]
        self._pending_peers = [peer for peer in pending if peer not in ready]
        if not self._pending_peers and self.on_complete is not None:
            self.close()  # before the rows are computed: on_complete starts the return
        return ready

    def close(self) -> None:
        """Wait until the rows of all peers are complete."""
        if self.complete:
            return
        incoming = _started(self._incoming)
        with _wait_span(Kind.DISPATCH, self._label):
            incoming.__exit__(None, None, None)
        self.complete = True
        if self._check is not None:
            self._check(self)
        if self.on_complete is not None:
            self.on_complete()

    def abort(self, error: BaseException) -> None:
        if not self.complete and self._incoming is not None:
            self.complete = True
            self._incoming.__exit__(type(error), error, error.__traceback__)


class SharedGradients(SharedSend, SentGradients):
    """Sends the gradients of tokens, times their routing weights.

    All rows are written in ``start``; the group runs no other operation in between. The gradient of the routing weights
    is computed on the tokens' ranks, which read the results, or by the experts.
    """

    def __init__(
        self, dispatch: SharedDispatch, grad_TD: Tensor, weights_TK: Tensor, weights_grad: bool, unscaled: bool
    ) -> None:
        super().__init__(dispatch.segments, dispatch.handle.label, None)
        self._dispatch, self._grad_TD, self._weights_TK = dispatch, grad_TD, weights_TK
        self._weights_grad, self._unscaled = weights_grad, unscaled
        self._grad_TK: Tensor | None = None

    def start(self, results_RD: Tensor | None) -> None:
        dispatcher, handle = self._dispatch.dispatcher, self._dispatch.handle
        if self._unscaled:
            self._incoming, self.weights_R = dispatcher.start_gradients(
                self._grad_TD, self._weights_TK, self._weights_grad, handle
            )
        else:
            with dispatcher.operation("combine backward", handle, results_RD is not None):
                self._incoming, self._grad_TK = dispatcher.start_spread(
                    self._grad_TD, results_RD, self._weights_TK, handle
                )
        self.rows_RD = self._incoming.rows_RD

    def start_weight_gradient(self, dots_R: Tensor | None) -> Callable[[], Tensor | None]:
        if dots_R is not None:
            dispatch = self._dispatch
            _, self._grad_TK = dispatch.dispatcher.return_gradients(None, dots_R, dispatch.handle)
        return lambda: self._grad_TK


class SharedReturn(RowReturn):
    """Returns the results of the experts: peers read them in place, from a block of this rank's shared memory."""

    def __init__(self, dispatch: SharedDispatch, op: str, requires_grad: bool, after: SharedSend | None) -> None:
        dispatcher, handle = dispatch.dispatcher, dispatch.handle
        self._dispatch, self._op, self._requires_grad = dispatch, op, requires_grad
        self._wire_dtype = dispatcher.options.wire_dtypes.of(op)
        self._outgoing: OutgoingRows | None = None
        self._computed_early: list[int] = []  # segments computed before this operation could start
        self._y_TD: Tensor | None = None
        self._fault: MoeCommError | None = None
        self.rows_RD = self._offered_RD = torch.empty(0, handle.hidden, dtype=handle.dtype, device="cpu")
        try:
            self.rows_RD = self._offered_RD = self._block()
            if self._wire_dtype.narrows(handle.dtype):
                self._offered_RD = self._block()
        except HeapError as error:  # raised on all ranks in the handshake of this operation
            self._fault = error.with_traceback(None)
        if self._fault is not None and after is not None:
            after.close()  # the handshake that reports the error needs the group
        if after is not None:
            after.group_by_group = True
        if after is None or after.complete:
            self._open()
        else:
            after.on_complete = self._open

    def mark_computed(self, segment: int) -> None:
        self._round_to_wire(segment)
        if self._outgoing is None:
            self._computed_early.append(segment)
        else:
            self._outgoing.raise_flag(segment)

    def close(self, weights_TK: Tensor | None, other_work: Callable[[], bool]) -> None:
        outgoing = self._outgoing
        assert outgoing is not None
        self._round_to_wire(self._dispatch.dispatcher.rank)
        while not outgoing.ready() and other_work():
            pass
        with _wait_span(Kind.COMBINE, self._dispatch.handle.label):
            self._y_TD = outgoing.sum(weights_TK)
        while other_work():  # peers may still be reading this rank's rows
            pass
        with _wait_span(Kind.COMBINE, self._dispatch.handle.label):
            outgoing.__exit__(None, None, None)

    def result(self, weights_TK: Tensor | None) -> Tensor:
        assert self._y_TD is not None
        return self._y_TD

    def abort(self, error: BaseException) -> None:
        if self._outgoing is not None:
            self._outgoing.__exit__(type(error), error, error.__traceback__)

    def _open(self) -> None:
        dispatcher, handle = self._dispatch.dispatcher, self._dispatch.handle
        with dispatcher.operation(self._op, handle, self._requires_grad, fault=self._fault):
            self._outgoing = dispatcher.start_sum(self._offered_RD, handle)
        for segment in self._computed_early:
            self._outgoing.raise_flag(segment)

    def _round_to_wire(self, segment: int) -> None:
        """Round the rows of ``segment`` to the wire dtype and copy them to the offered block."""
        if self._offered_RD is not self.rows_RD:
            for row_range in self._dispatch.segments.ranges[segment]:
                self._offered_RD[row_range.rows] = rounded(self.rows_RD[row_range.rows], self._wire_dtype)

    def _block(self) -> Tensor:
        handle = self._dispatch.handle
        return self._dispatch.dispatcher.empty_rows(handle.num_rows, handle.hidden, handle.dtype, handle.device)


def _started(incoming: IncomingRows | None) -> IncomingRows:
    assert incoming is not None
    return incoming


def _wait_span(kind: Kind, label: str) -> communication_span:
    return communication_span(kind, "rows of others" if kind is Kind.DISPATCH else "results of others", layer=label)
