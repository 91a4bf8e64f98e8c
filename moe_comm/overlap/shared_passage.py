"""How the rows of ``dispatch_matmul`` and ``matmul_combine`` move between CPU ranks that share memory.

Rows are not sent in chunks: each rank writes its own at once where they belong, and reads results where they stand.
What overlaps is the waiting: a rank computes with what is there while its peers still write, or compute.

    outward     every rank pushes its rows, and says so when all stand      (dispatch, and combine's backward)
                own rows ▸ rank 2's, once they stand ▸ rank 1's ...          whoever is done first

    homeward    results for rank 1 ▸ its flag ▸ for rank 2 ▸ its flag ... ▸ own rows    (combine, dispatch's backward)
                a rank sums its tokens' results in place, once all peers have raised its flag

The protocol is in csrc/cpu/underway.h; the dispatcher's own operations go through both its halves at once, so a rank
that computes one step after the other gets on with one that does not. Products are of the same rows with the same
weights, cut by source, and sums are the dispatcher's: the same bits. Peers are taken in as many groups as there are
chunks: fewer, larger products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn, Self

import numpy as np
import torch
from torch import Tensor

from moe_comm.dispatch.base import dispatch_by
from moe_comm.dispatch.moved import put_layout, rows_moved
from moe_comm.dispatch.native import ArrivingRows
from moe_comm.dispatch.payload import rounded
from moe_comm.dispatch.shared_memory import SharedMemoryDispatcher
from moe_comm.dispatch.types import Dispatched, Layout
from moe_comm.errors import ConfigError, HeapError, MoeCommError
from moe_comm.overlap.chunked import Overlap
from moe_comm.overlap.crossing import Piece, merged, pieces_by_source, travelling_rows
from moe_comm.overlap.passage import COST
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import moving


@dataclass(frozen=True, eq=False)
class SharedPassage:
    """Where the rows of one dispatch are, as ``Passage`` is for rows that travel in chunks.

    chunks: 1: too few rows to be worth it, one step after the other; else groups of peers, if there are as many.
    sources: the rows of each rank, among those of this rank's experts.
    """

    dispatcher: SharedMemoryDispatcher
    layout: Layout
    chunks: int
    sources: tuple[tuple[Piece, ...], ...]

    @classmethod
    def open(
        cls, dispatcher: SharedMemoryDispatcher, x_TD: Tensor, ids_TK: Tensor, overlap: Overlap, *, label: str = ""
    ) -> tuple[SharedPassage, SharedOutward]:
        """Agree on a dispatch with the other ranks, and push this rank's rows. What comes second is to be used at once.

        Raises:
            ConfigError: fp8 with scales per group of rows, which belong to no single row.
            InputError, RoutingError, RankMismatch, HeapError: on every rank, before rows move.
            PeerDied, PeerTimeout: a rank is gone, or did not call in time.
        """
        payloads = dispatcher.options.payloads
        if not payloads.invariant:
            raise ConfigError(f"only payloads that carry their own scales overlap; this is {payloads}")
        header = dispatcher.dispatch_header(x_TD, ids_TK, label)
        with rows_moved(dispatcher, "dispatch", label) as span:
            arriving = dispatcher.start_dispatch(x_TD.detach(), ids_TK, header)
            put_layout(span, dispatcher, arriving.layout)
        try:
            layout, placement = arriving.layout, dispatcher.placement
            rows_WE = np.frombuffer(layout.state.counts, np.int64).reshape(dispatcher.world, -1)
            row_bytes = layout.hidden * layout.dtype.itemsize
            chunks = overlap.chunks_of(travelling_rows(rows_WE, placement) * row_bytes // COST)
            passage = cls(dispatcher, layout, chunks, pieces_by_source(rows_WE, placement, dispatcher.rank))
            return passage, SharedOutward(passage, arriving)
        except BaseException as error:
            arriving.__exit__(type(error), error, error.__traceback__)
            raise

    @property
    def wide(self) -> torch.dtype:
        """What routing weights are multiplied in."""
        return torch.promote_types(self.layout.dtype, torch.float32)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The peers. Every rank begins behind itself, so that no rank is first, or last, for all."""
        world, rank = self.dispatcher.world, self.dispatcher.rank
        peers = [(rank + i) % world for i in range(1, world)]
        size = math.ceil(len(peers) / self.chunks)
        return tuple(tuple(peers[i : i + size]) for i in range(0, len(peers), max(1, size)))

    @property
    def own(self) -> tuple[Piece, ...]:
        """This rank's own rows."""
        return self.sources[self.dispatcher.rank]

    def runs(self, ranks: Iterable[int], own: Iterable[Piece] = ()) -> tuple[Piece, ...]:
        """The rows of ``ranks``, and ``own``, in runs as long as can be."""
        pieces = [*own, *(piece for rank in ranks for piece in self.sources[rank])]
        return merged(sorted(pieces, key=lambda piece: piece.first))

    def refuse(self, op: str, fault: MoeCommError) -> NoReturn:
        """Raise ``fault`` in place of ``op``, on every rank."""
        self.dispatcher.refuse(fault, torch.empty(0, dtype=self.layout.dtype), label=self.layout.label)


class SharedOutward:
    """Rows on their way to the experts; ``rows_RD`` fills. Every rank enters and leaves it (``with``), or ``whole``."""

    def __init__(self, passage: SharedPassage, arriving: ArrivingRows) -> None:
        self._passage, self._arriving = passage, arriving
        self.rows_RD = arriving.rows_RD

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._waiting():
            self._arriving.__exit__(*error)  # type: ignore[arg-type]

    @classmethod
    def gradients(
        cls, passage: SharedPassage, grad_TD: Tensor, weights_TK: Tensor, results_RD: Tensor | None
    ) -> tuple[SharedOutward, Tensor | None]:
        """Those of tokens, times their weights, as combine's backward sends them; and that of the weights, [T, K].

        Args:
            results_RD: what was combined, for the gradient of the weights; None: it is not wanted.
        """
        dispatcher, layout = passage.dispatcher, passage.layout
        header = dispatcher.header("combine backward", layout, results_RD is not None)
        with rows_moved(dispatcher, header.op, layout.label, layout):
            arriving, grad_TK = dispatcher.start_spread(grad_TD, results_RD, weights_TK, layout, header)
        return cls(passage, arriving), grad_TK

    def whole(self, x_TD: Tensor) -> Dispatched:
        """The dispatch of ``x_TD``, one step, differentiable."""

        def arrived(_: Tensor) -> tuple[Tensor, Layout]:
            with self:
                return self.rows_RD, self._passage.layout

        return dispatch_by(self._passage.dispatcher, x_TD, arrived, self._passage.layout.label, counted=False)

    def follow(self, compute: Callable[[Piece], None], spare: Callable[[], bool] = lambda: False) -> None:
        """Compute all rows as they come: own ones, and ``spare``'s other work, while there is nothing else to do."""
        passage, arriving = self._passage, self._arriving
        own = {piece.expert: piece for piece in passage.own}
        left = [peer for group in passage.groups for peer in group]
        size = max(map(len, passage.groups), default=0)
        while left:
            there = [peer for peer in left if arriving.ready(peer)]
            if len(there) < min(size, len(left)):
                if own:
                    compute(own.popitem()[1])
                elif not spare():
                    with self._waiting():
                        arriving.next([peer for peer in left if peer not in there])
                continue
            left = [peer for peer in left if peer not in there]
            touched = {piece.expert for peer in there for piece in passage.sources[peer]}
            for piece in passage.runs(there, [own.pop(expert) for expert in touched if expert in own]):
                compute(piece)
        for piece in own.values():
            compute(piece)

    def _waiting(self) -> moving:
        return moving(Kind.DISPATCH, "rows of others", layer=self._passage.layout.label)


class SharedHomeward:
    """Results of experts that peers read where they stand: ``rows_RD``, which ``lead`` has computed."""

    def __init__(self, passage: SharedPassage, op: str, weights_grad: bool) -> None:
        dispatcher, layout = passage.dispatcher, passage.layout
        header = dispatcher.header(op, layout, weights_grad)
        self._passage, self._payload = passage, dispatcher.options.payloads.of(op)
        self.rows_RD = self._offered_RD = torch.empty(0, layout.hidden, dtype=layout.dtype)
        try:
            self.rows_RD = self._offered_RD = self._block()
            if self._payload.narrows(layout.dtype):
                self._offered_RD = self._block()
        except HeapError as error:  # all ranks hear of it
            header = replace(header, fault=error.with_traceback(None))
        with rows_moved(dispatcher, op, layout.label, layout):
            self._leaving = dispatcher.start_sum(self._offered_RD, layout, header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._waiting():
            self._leaving.__exit__(*error)  # type: ignore[arg-type]

    def lead(self, compute: Callable[[Piece], None]) -> None:
        """Compute all rows; own ones last, while peers read theirs."""
        for group in self._passage.groups:
            self._compute(self._passage.runs(group), compute)
            for peer in group:
                self._leaving.raise_flag(peer)
        self._compute(self._passage.own, compute)

    def ready(self) -> bool:
        """Whether ``summed`` would not wait."""
        return self._leaving.ready()

    def summed(self, weights_TK: Tensor | None) -> Tensor:
        """[T, D] the sum of each token's results."""
        with self._waiting():
            return self._leaving.sum(weights_TK)

    def _waiting(self) -> moving:
        return moving(Kind.COMBINE, "results of others", layer=self._passage.layout.label)

    def _compute(self, pieces: Iterable[Piece], compute: Callable[[Piece], None]) -> None:
        for piece in pieces:
            compute(piece)
            if self._offered_RD is not self.rows_RD:
                self._offered_RD[piece.rows] = rounded(self.rows_RD[piece.rows], self._payload)

    def _block(self) -> Tensor:
        layout = self._passage.layout
        return self._passage.dispatcher.empty_rows(layout.num_rows, layout.hidden, layout.dtype, layout.device)
