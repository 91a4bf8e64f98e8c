"""Transport of the pipelined executor between CPU ranks that share memory: the rows of each peer are one part.

Each rank writes its own rows at once into the blocks of their owners, and reads results where they are. What the
pipelined executor hides is the waiting: a rank computes the rows that are complete while its peers still write or
compute.

    to the experts    every rank writes its rows, and raises a flag          (dispatch, and combine's backward)
                      own rows ▸ rank 2's, once complete ▸ rank 1's ...      in the order in which they complete

    back              results for rank 1 ▸ its flag ▸ for rank 2 ▸ its flag ... ▸ own   (combine, dispatch's backward)
                      a rank sums its tokens' results in place, once all peers have raised its flag

The protocol is in csrc/cpu/underway.h. A group runs one operation at a time. In a whole layer the way back therefore
begins when the rows of all peers are complete: results that have been computed by then are flagged at once, the others
as they are computed. Nothing is lost by that: no rank can take its sum before the last peer has computed its rows, and
that peer has sent its own before. The dispatcher's own operations go through both halves at once, so a rank that runs
one step after the other works together with one that does not.

Products are of the same rows with the same weights, cut by source, and sums are the dispatcher's: the same bits. Peers
are taken in as many groups as there are chunks: fewer, larger products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor

from moe_comm.dispatch.backends.native import ArrivingRows, LeavingRows
from moe_comm.dispatch.backends.shared_memory import SharedMemoryDispatcher
from moe_comm.dispatch.base import dispatch_by
from moe_comm.dispatch.checksums import claim
from moe_comm.dispatch.dispatch_spans import put_handle, rows_moved
from moe_comm.dispatch.types import Dispatched, DispatchHandle
from moe_comm.dispatch.wire_dtype import rounded
from moe_comm.errors import ConfigError, HeapError, MoeCommError
from moe_comm.overlap.chunk_plan import Parts, Piece, pieces_by_source, travelling_rows
from moe_comm.overlap.executors.chunked_rows import COST
from moe_comm.overlap.executors.transport import RowDispatch, RowReturn, RowSend, SentGradients
from moe_comm.overlap.options import Overlap
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import moving


@dataclass(frozen=True, eq=False)
class SharedDispatch(RowDispatch):
    """Where the rows of one dispatch are. A part is the rows of one rank, by rank.

    chunks: 1: too few rows to be worth it, one step after the other; else groups of peers, if there are as many.
    """

    dispatcher: SharedMemoryDispatcher
    sources: tuple[tuple[Piece, ...], ...]

    in_flight: ClassVar[bool] = False

    @cached_property
    def parts(self) -> Parts:
        rank = self.dispatcher.rank
        return Parts(self.sources, self.sources[rank], _groups(self.dispatcher.world, rank, self.chunks))

    @classmethod
    def open(
        cls, dispatcher: SharedMemoryDispatcher, x_TD: Tensor, ids_TK: Tensor, overlap: Overlap, *, label: str = ""
    ) -> tuple[SharedDispatch, SharedSend]:
        """Agree on a dispatch with the other ranks, and write this rank's rows. The second result must be closed before
        the group does anything else.

        Raises:
            ConfigError: fp8 with scales per group of rows, which belong to no single row.
            InputError, RoutingError, RankMismatch, HeapError: on every rank, before rows move.
            PeerDied, PeerTimeout: a rank failed, or did not call in time.
        """
        if not can_pipeline(dispatcher):
            wire_dtypes = dispatcher.options.wire_dtypes
            raise ConfigError(f"only rows that carry their own scales are sent in chunks; this is {wire_dtypes}")
        header = dispatcher.dispatch_header(x_TD, ids_TK, label)
        with rows_moved(dispatcher, "dispatch", label) as span:
            arriving = dispatcher.start_dispatch(x_TD.detach(), ids_TK, header)
            put_handle(span, dispatcher, arriving.handle)
        try:
            handle, placement = arriving.handle, dispatcher.placement
            rows_WE = np.frombuffer(handle.state.counts, np.int64).reshape(dispatcher.world, -1)
            row_bytes = handle.hidden * handle.dtype.itemsize
            chunks = overlap.chunks_of(travelling_rows(rows_WE, placement) * row_bytes // COST)
            sources = pieces_by_source(rows_WE, placement, dispatcher.rank)

            def check(rows_RD: Tensor) -> None:
                if (claimed := claim(dispatcher, x_TD, ids_TK, header)) is not None:
                    claimed.check(rows_RD)

            dispatch = cls(dispatcher, handle, chunks, sources)
            return dispatch, SharedSend(dispatch.parts, handle.label, arriving, check)
        except BaseException as error:
            arriving.__exit__(type(error), error, error.__traceback__)
            raise

    def send_gradients(self, grad_TD: Tensor, weights_TK: Tensor, weights_grad: bool) -> SharedGradients:
        return SharedGradients(self, grad_TD, weights_TK)

    def send_back(self, op: str, grads: tuple[bool, bool], after: RowSend | None) -> SharedReturn:
        assert after is None or isinstance(after, SharedSend)
        return SharedReturn(self, op, grads[0], after)

    def each_way(self, operator: str, width: int) -> tuple[SharedDispatch, SharedDispatch]:
        return self, self

    def dispatch_at_once(self, send: SharedSend, x_TD: Tensor) -> Dispatched:
        """The rest of the dispatch in one step, differentiable."""

        def arrived(_: Tensor) -> tuple[Tensor, DispatchHandle]:
            send.close()
            return send.rows_RD, self.handle

        return dispatch_by(self.dispatcher, x_TD, arrived, self.handle.label, counted=False)

    def refuse(self, op: str, fault: MoeCommError) -> NoReturn:
        self.dispatcher.refuse(fault, torch.empty(0, dtype=self.handle.dtype), label=self.handle.label)

    @contextmanager
    def abort_on_error(self, send: RowSend | None) -> Iterator[None]:
        with self.dispatcher.abort_on_error(self.handle.label):
            try:
                yield
            except BaseException:
                if send is not None:
                    # The ranks meet in the next operation, which reports the error: this one must be over.
                    with suppress(MoeCommError):
                        send.close()
                raise


def _groups(world: int, rank: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """The peers. Every rank begins behind itself, so that no rank is first, or last, for all."""
    peers = [(rank + i) % world for i in range(1, world)]
    size = max(1, math.ceil(len(peers) / chunks))
    return tuple(tuple(peers[i : i + size]) for i in range(0, len(peers), size))


class SharedSend(RowSend):
    """Rows on their way to the experts. No other operation of the group may begin before it is closed.

    Attributes:
        complete: whether the rows of all peers are complete, and the group is free for its next operation.
        on_complete: called once it is complete.
        in_turn: take one group of peers at a time, so that results return group by group; else all that are complete,
            for larger products.

    Args:
        check: compares the rows with their checksums, collectively, if there are any.
    """

    def __init__(
        self, parts: Parts, label: str, arriving: ArrivingRows | None, check: Callable[[Tensor], None] | None = None
    ) -> None:
        self._label, self._check = label, check
        self._left = [peer for group in parts.groups for peer in group]
        self._size = max(map(len, parts.groups), default=1)
        self._arriving = arriving
        self.complete = False
        self.on_complete: Callable[[], None] | None = None
        self.in_turn = False
        if arriving is not None:
            self.rows_RD = arriving.rows_RD

    def take(self, wait: bool) -> Sequence[int]:
        left, arriving = self._left, self._arriving
        ready = left if self.complete else [peer for peer in left if _open(arriving).ready(peer)]
        if len(ready) < min(self._size, len(left)):
            if wait:
                with _waiting(Kind.DISPATCH, self._label):
                    _open(arriving).next([peer for peer in left if peer not in ready])
            return ()
        if self.in_turn:
            ready = ready[: self._size]
        self._left = [peer for peer in left if peer not in ready]
        if not self._left and self.on_complete is not None:
            self.close()
        return ready

    def close(self) -> None:
        """Wait until the rows of all peers are complete."""
        if self.complete:
            return
        arriving = _open(self._arriving)
        with _waiting(Kind.DISPATCH, self._label):
            arriving.__exit__(None, None, None)
        self.complete = True
        if self._check is not None:
            self._check(self.rows_RD)
        if self.on_complete is not None:
            self.on_complete()

    def abandon(self, error: BaseException) -> None:
        if not self.complete and self._arriving is not None:
            self.complete = True
            self._arriving.__exit__(type(error), error, error.__traceback__)


class SharedGradients(SharedSend, SentGradients):
    """Gradients of tokens, times their routing weights. They leave when it is opened: nothing else of the group may run
    in between. The gradient of the routing weights is computed on the tokens' ranks, which read the results."""

    def __init__(self, dispatch: SharedDispatch, grad_TD: Tensor, weights_TK: Tensor) -> None:
        super().__init__(dispatch.parts, dispatch.handle.label, None)
        self._dispatch, self._grad_TD, self._weights_TK = dispatch, grad_TD, weights_TK
        self._grad_TK: Tensor | None = None

    def open(self, results_RD: Tensor | None) -> None:
        dispatcher, handle = self._dispatch.dispatcher, self._dispatch.handle
        header = dispatcher.header("combine backward", handle, results_RD is not None)
        with rows_moved(dispatcher, header.op, handle.label, handle):
            self._arriving, self._grad_TK = dispatcher.start_spread(
                self._grad_TD, results_RD, self._weights_TK, handle, header
            )
        self.rows_RD = self._arriving.rows_RD

    def start_weights(self) -> Callable[[], Tensor | None]:
        return lambda: self._grad_TK


class SharedReturn(RowReturn):
    """Results of experts that peers read in place, from a block of this rank's heap."""

    def __init__(self, dispatch: SharedDispatch, op: str, requires_grad: bool, after: SharedSend | None) -> None:
        dispatcher, handle = dispatch.dispatcher, dispatch.handle
        self._dispatch, self._op, self._requires_grad = dispatch, op, requires_grad
        self._payload = dispatcher.options.wire_dtypes.of(op)
        self._leaving: LeavingRows | None = None
        self._early: list[int] = []
        self._y_TD: Tensor | None = None
        self._fault: MoeCommError | None = None
        self.rows_RD = self._offered_RD = torch.empty(0, handle.hidden, dtype=handle.dtype)
        try:
            self.rows_RD = self._offered_RD = self._block()
            if self._payload.narrows(handle.dtype):
                self._offered_RD = self._block()
        except HeapError as error:  # all ranks raise it, when they meet in this operation
            self._fault = error.with_traceback(None)
        if self._fault is not None and after is not None:
            after.close()
        if after is not None:
            after.in_turn = True
        if after is None or after.complete:
            self._open()
        else:
            after.on_complete = self._open

    def computed(self, part: int) -> None:
        self._round(part)
        if self._leaving is None:
            self._early.append(part)
        else:
            self._leaving.raise_flag(part)

    def close(self, weights_TK: Tensor | None, spare: Callable[[], bool]) -> None:
        leaving = self._leaving
        assert leaving is not None
        self._round(self._dispatch.dispatcher.rank)
        while not leaving.ready() and spare():
            pass
        with _waiting(Kind.COMBINE, self._dispatch.handle.label):
            self._y_TD = leaving.sum(weights_TK)
        while spare():  # peers may still be reading this rank's rows
            pass
        with _waiting(Kind.COMBINE, self._dispatch.handle.label):
            leaving.__exit__(None, None, None)

    def result(self, weights_TK: Tensor | None) -> Tensor:
        assert self._y_TD is not None
        return self._y_TD

    def abandon(self, error: BaseException) -> None:
        if self._leaving is not None:
            self._leaving.__exit__(type(error), error, error.__traceback__)

    def _open(self) -> None:
        dispatcher, handle = self._dispatch.dispatcher, self._dispatch.handle
        header = replace(dispatcher.header(self._op, handle, self._requires_grad), fault=self._fault)
        with rows_moved(dispatcher, self._op, handle.label, handle):
            self._leaving = dispatcher.start_sum(self._offered_RD, handle, header)
        for part in self._early:
            self._leaving.raise_flag(part)

    def _round(self, part: int) -> None:
        """Offer the rows of ``part`` as the wire dtype rounds them."""
        if self._offered_RD is not self.rows_RD:
            for piece in self._dispatch.parts.pieces[part]:
                self._offered_RD[piece.rows] = rounded(self.rows_RD[piece.rows], self._payload)

    def _block(self) -> Tensor:
        handle = self._dispatch.handle
        return self._dispatch.dispatcher.empty_rows(handle.num_rows, handle.hidden, handle.dtype, handle.device)


def _open(arriving: ArrivingRows | None) -> ArrivingRows:
    assert arriving is not None
    return arriving


def _waiting(kind: Kind, label: str) -> moving:
    return moving(kind, "rows of others" if kind is Kind.DISPATCH else "results of others", layer=label)


def can_pipeline(dispatcher: SharedMemoryDispatcher) -> bool:
    """Whether the rows of this dispatcher carry their own scales."""
    return dispatcher.options.wire_dtypes.invariant
