"""``all_to_all``: rows travel by ``all_to_all_single``, over any backend of torch.distributed.

Two ranks, experts 0 1 on rank 0 and 2 3 on rank 1; "a2" is a row of rank 0 for expert 2, "b0" of rank 1 for 0:

    rank 0: tokens ──sort by expert──▶ a0 a1 a1 | a2 ─┐      ┌─▶ a0 a1 a1 | b0 b1 ──by expert──▶ a0 b0 | a1 a1 b1
                                                      ├──⇄───┤   (by source)                  (by expert, then source)
    rank 1: tokens ──sort by expert──▶ b0 b1 | b2 b3 ─┘      └─▶ a2 | b2 b3    ──by expert──▶ a2 b2 | b3

Combine is the way back, and the weighted sum is taken where the tokens are, in slot order: the same arithmetic
on the same values as when one rank holds everything, hence the same bits.

In combine's backward a token's gradient travels as it is, with its weight beside it, when the weights need a
gradient: the product and the dot product with the expert's output are taken where that output is, and one number
a row comes back. The other ways cost a second transfer of all rows, or keeping a second copy of them from combine
to backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.dispatch import plain
from moe_comm.dispatch.base import Dispatcher, DispatchOptions, Layout
from moe_comm.dispatch.channel import Channel
from moe_comm.dispatch.handshake import Counts, Handshake, describe, digest, meet
from moe_comm.dispatch.header import Header
from moe_comm.errors import RoutingError
from moe_comm.topology import ExpertPlacement


@dataclass(frozen=True)
class Routes:
    """Where rows go and come from. S rows leave this rank, R arrive.

    place_TK: place of each slot among the rows that leave; -1 where dropped. slot_S: its inverse.
    by_expert_R: ``rows = arrived[by_expert_R]``. by_source_R: the inverse. None where the two orders are one.
    send, receive: rows to and from each rank.
    tokens_W: tokens of each rank.
    """

    place_TK: Tensor
    slot_S: Tensor
    by_expert_R: Tensor | None
    by_source_R: Tensor | None
    send: tuple[int, ...]
    receive: tuple[int, ...]
    tokens_W: tuple[int, ...]


class AllToAllDispatcher(Dispatcher):
    """Any device and number of hosts; construction is collective over ``group``.

    Raises:
        RankMismatch: ranks build it with different settings.
    """

    name = "all_to_all"

    def __init__(
        self,
        placement: ExpertPlacement,
        group: ProcessGroup,
        rank: int,
        options: DispatchOptions | None = None,
    ) -> None:
        super().__init__(placement, group, rank, options)
        self._channel = Channel(group, rank, self.world, self.options.timeout_s)
        same = {
            "backend": digest(self.name),
            "number of experts": placement.num_experts,
            "experts per rank": digest(placement.experts_per_rank),
            "deterministic": int(self.options.deterministic),
            "checked": int(self.options.checked),
        }
        meet(self._channel, group, f"the {self.name} dispatcher", same)
        self._handshake = Handshake(self._channel, placement)

    def _routing_fault(self, ids_TK: Tensor) -> RoutingError | None:
        return None  # counted with the slots, and told with the counts

    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, Layout]:
        counts = self._handshake.exchange(header, ids_TK, x_TD.device)
        routes = self._routes(ids_TK, counts)
        rows_SD = x_TD[routes.slot_S // ids_TK.shape[1]]
        rows_RD = self._out(rows_SD, routes, describe(header))
        return rows_RD, self._layout(x_TD, ids_TK, counts, routes, header)

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, layout: Layout, header: Header) -> Tensor:
        self._agree(header, rows_RD.device)
        rows_SD = self._back(rows_RD, layout.state, describe(header))
        return plain.weighted_sum(rows_SD, layout.state.place_TK, weights_TK)

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, layout: Layout, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        self._agree(header, grad_TD.device)
        routes: Routes = layout.state
        grad_SD = grad_TD[routes.slot_S // layout.top_k]
        weights_S = weights_TK.reshape(-1)[routes.slot_S]
        doing = describe(header)
        if rows_RD is None:
            return self._out(plain.scale(grad_SD, weights_S), routes, doing), None
        grad_RD, weights_R = self._out(grad_SD, routes, doing), self._out(weights_S, routes, doing)
        return plain.scale(grad_RD, weights_R), self._dots(grad_RD, rows_RD, layout, doing)

    def _dots(self, grad_RD: Tensor, rows_RD: Tensor, layout: Layout, doing: str) -> Tensor:
        """[T, K] dot products of rows and gradients, taken here and sent to their tokens."""
        routes: Routes = layout.state
        dots_S = self._back(plain.lane_dot(grad_RD, rows_RD), routes, doing)
        dots = dots_S.new_zeros(layout.num_tokens * layout.top_k)
        dots[routes.slot_S] = dots_S
        return dots.view(layout.num_tokens, layout.top_k)

    def _agree(self, header: Header, device: torch.device) -> None:
        if self.options.checked:
            self._handshake.exchange(header, None, device)

    def _out(self, rows_SD: Tensor, routes: Routes, doing: str) -> Tensor:
        """To the experts: rows ordered by expert, from here; by (expert, source) there."""
        arrived = self._channel.all_to_all(rows_SD, routes.send, routes.receive, doing)
        return arrived if routes.by_expert_R is None else arrived[routes.by_expert_R]

    def _back(self, rows_RD: Tensor, routes: Routes, doing: str) -> Tensor:
        """To the tokens: the inverse of ``_out``."""
        leaving = rows_RD if routes.by_source_R is None else rows_RD[routes.by_source_R]
        return self._channel.all_to_all(leaving, routes.receive, routes.send, doing)

    def _routes(self, ids_TK: Tensor, counts: Counts) -> Routes:
        own = self.local_experts
        offsets = self.placement.offsets
        counts_WL = torch.from_numpy(counts.rows_WE[:, own.start : own.stop].copy())
        send = [int(counts.rows_WE[self.rank, lo:hi].sum()) for lo, hi in pairwise(offsets)]
        receive = counts_WL.sum(1).tolist()
        by_expert_R = by_source_R = None
        if len(own) > 1 and self.world > 1:
            counts_WL = counts_WL.to(ids_TK.device, non_blocking=True)
            by_expert_R = plain.transpose_blocks(counts_WL, sum(receive))
            by_source_R = plain.transpose_blocks(counts_WL.T, sum(receive))
        order, place_TK = plain.order_slots(ids_TK, self.num_experts)
        return Routes(
            place_TK, order[: sum(send)], by_expert_R, by_source_R, tuple(send), tuple(receive), counts.tokens_W
        )

    def _layout(self, x_TD: Tensor, ids_TK: Tensor, counts: Counts, routes: Routes, header: Header) -> Layout:
        own = self.local_experts
        return Layout(
            num_tokens=x_TD.shape[0],
            top_k=ids_TK.shape[1],
            hidden=x_TD.shape[1],
            dtype=x_TD.dtype,
            device=x_TD.device,
            rows_per_expert=tuple(counts.rows_WE[:, own.start : own.stop].sum(0).tolist()),
            num_rows=sum(routes.receive),
            num_dropped=counts.num_dropped,
            label=header.label,
            state=routes,
            call=header.seq,
        )
