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

With a quantised payload a row is packed once, where it leaves, and unpacked where it arrives; a token's K copies are
copies of its packed row. Its own rank's rows are packed, too: bits do not depend on where an expert lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.header import Header, describe
from moe_comm.dispatch import plain
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.group_scales import Groups, decode_groups, encode_groups
from moe_comm.dispatch.handshake import Counts, Handshake, Words
from moe_comm.dispatch.sums import scale_, take, weighted_sum
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions
from moe_comm.dispatch.wire_dtype import WireDtype, pack, unpack
from moe_comm.errors import RoutingError
from moe_comm.topology import ExpertPlacement


@dataclass(frozen=True)
class Routes:
    """Where rows go and come from. S rows leave this rank, R arrive.

    place_TK: place of each slot among the rows that leave; -1 where dropped. slot_S: its inverse.
    by_expert_R: ``rows = arrived[by_expert_R]``. by_source_R: the inverse. None where the two orders are one.
    send, receive: rows to and from each rank.
    tokens_W: tokens of each rank. rows_WE: rows that each rank has for each expert; on the host.
    """

    place_TK: Tensor
    slot_S: Tensor
    by_expert_R: Tensor | None
    by_source_R: Tensor | None
    send: tuple[int, ...]
    receive: tuple[int, ...]
    tokens_W: tuple[int, ...]
    rows_WE: Words


class AllToAllDispatcher(Dispatcher):
    """Any device and number of hosts. ``make_dispatcher`` compares settings between ranks; this does not."""

    name = "all_to_all"
    packs = True

    def __init__(
        self,
        placement: ExpertPlacement,
        group: ProcessGroup,
        rank: int,
        options: DispatchOptions | None = None,
    ) -> None:
        super().__init__(placement, group, rank, options)
        assert self.comm is not None
        self.channel = Channel(self.comm, self.options.timeout_s)
        self._handshake = Handshake(self.channel, placement, self.calls)

    def _leave_behind(self, text: str) -> None:
        self.channel.give_up(text)

    def _routing_fault(self, ids_TK: Tensor) -> RoutingError | None:
        return None  # counted with the slots, and told with the counts

    def agree(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> DispatchHandle:
        """The handshake of a dispatch, and where all rows will go; none has moved yet.

        Raises:
            InputError, RoutingError, RankMismatch: on every rank. PeerDied, PeerTimeout: a rank does not answer.
        """
        counts = self._handshake.exchange(header, ids_TK, x_TD.device)
        return self._layout(x_TD, ids_TK, counts, self._routes(ids_TK, counts), header)

    def agree_again(self, header: Header, device: torch.device) -> None:
        """The handshake of any other operation, if checked."""
        if self.options.checked:
            self._handshake.exchange(header, None, device)

    def send(self, x_TD: Tensor, handle: DispatchHandle, header: Header) -> Tensor:
        """[R, D] the rows of this rank's experts, moved as ``agree`` has laid them out; without autograd."""
        routes: Routes = handle.state
        wire_dtype = self.options.wire_dtypes.of(header.op)
        return self._rows_out(x_TD, routes.slot_S // handle.top_k, wire_dtype, routes, describe(header))

    def own_rows(self, handle: DispatchHandle, leaving: int) -> int | None:
        return int(handle.state.send[self.rank])

    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, DispatchHandle]:
        handle = self.agree(x_TD, ids_TK, header)
        return self.send(x_TD, handle, header), handle

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle, header: Header) -> Tensor:
        self.agree_again(header, rows_RD.device)
        wire_dtype = self.options.wire_dtypes.of(header.op)
        rows_SD = self._rows_back(rows_RD, wire_dtype, handle.state, describe(header))
        return weighted_sum(rows_SD, handle.state.place_TK, weights_TK)

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        self.agree_again(header, grad_TD.device)
        routes: Routes = handle.state
        wire_dtype = self.options.wire_dtypes.of(header.op)
        token_S = routes.slot_S // handle.top_k
        weights_S = weights_TK.reshape(-1)[routes.slot_S]
        description = describe(header)
        if rows_RD is None and not wire_dtype.narrows(grad_TD.dtype):
            return self._out(plain.scale(take(grad_TD, token_S), weights_S), routes, description), None
        # A quantised gradient is rounded before it is scaled, whether or not the weights need a gradient.
        grad_RD = self._rows_out(grad_TD, token_S, wire_dtype, routes, description)
        weights_R = self._out(weights_S, routes, description)
        dots_R = scale_(grad_RD, weights_R, rows_RD)
        return grad_RD, None if dots_R is None else self._dots(dots_R, handle, description)

    def _dots(self, dots_R: Tensor, handle: DispatchHandle, description: str) -> Tensor:
        """[T, K] dot products of rows and gradients, sent to their tokens."""
        routes: Routes = handle.state
        return to_slots(self._back(dots_R, routes, description), handle)

    def _rows_out(
        self, rows_TD: Tensor, token_S: Tensor, wire_dtype: WireDtype, routes: Routes, description: str
    ) -> Tensor:
        """``_out`` of each slot's row, in its payload."""
        if wire_dtype.scales == "group":
            leaving, arriving = self._groups(routes, rows_TD.device)
            packed_SX, scale_GD = encode_groups(take(rows_TD, token_S), leaving, wire_dtype)
            packed_RX = self.channel.all_to_all(packed_SX, routes.send, routes.receive, description)
            scale_GD = self.channel.all_to_all(scale_GD, leaving.per_rank, arriving.per_rank, description)
            rows_RD = decode_groups(packed_RX, scale_GD, arriving, rows_TD.dtype)
            return rows_RD if routes.by_expert_R is None else take(rows_RD, routes.by_expert_R)
        moved_RX = self._out(take(pack(rows_TD, wire_dtype), token_S), routes, description)
        return unpack(moved_RX, wire_dtype, rows_TD.shape[1], rows_TD.dtype)

    def _rows_back(self, rows_RD: Tensor, wire_dtype: WireDtype, routes: Routes, description: str) -> Tensor:
        """``_back`` of rows in their payload."""
        if wire_dtype.scales == "group":
            arriving, leaving = self._groups(routes, rows_RD.device)
            ordered_RD = rows_RD if routes.by_source_R is None else take(rows_RD, routes.by_source_R)
            packed_RX, scale_GD = encode_groups(ordered_RD, leaving, wire_dtype)
            packed_SX = self.channel.all_to_all(packed_RX, routes.receive, routes.send, description)
            scale_GD = self.channel.all_to_all(scale_GD, leaving.per_rank, arriving.per_rank, description)
            return decode_groups(packed_SX, scale_GD, arriving, rows_RD.dtype)
        moved_SX = self._back(pack(rows_RD, wire_dtype), routes, description)
        return unpack(moved_SX, wire_dtype, rows_RD.shape[1], rows_RD.dtype)

    def _groups(self, routes: Routes, device: torch.device) -> tuple[Groups, Groups]:
        """Of the rows of this rank's tokens, by expert; and of those of its experts, by (source, expert)."""
        own = self.local_experts
        here = routes.rows_WE[:, own.start : own.stop].reshape(-1)
        sources = range(0, (self.world + 1) * len(own), len(own)) if len(own) else [0] * (self.world + 1)
        tokens = Groups.of(routes.rows_WE[self.rank], self.placement.offsets, device)
        return tokens, Groups.of(here, sources, device)

    def _out(self, rows_SX: Tensor, routes: Routes, description: str) -> Tensor:
        """To the experts: rows ordered by expert, from here; by (expert, source) there."""
        arrived = self.channel.all_to_all(rows_SX, routes.send, routes.receive, description)
        return arrived if routes.by_expert_R is None else _permuted(arrived, routes.by_expert_R)

    def _back(self, rows_RX: Tensor, routes: Routes, description: str) -> Tensor:
        """To the tokens: the inverse of ``_out``."""
        leaving = rows_RX if routes.by_source_R is None else _permuted(rows_RX, routes.by_source_R)
        return self.channel.all_to_all(leaving, routes.receive, routes.send, description)

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
            place_TK,
            order[: sum(send)],
            by_expert_R,
            by_source_R,
            tuple(send),
            tuple(receive),
            counts.tokens_W,
            counts.rows_WE,
        )

    def _layout(self, x_TD: Tensor, ids_TK: Tensor, counts: Counts, routes: Routes, header: Header) -> DispatchHandle:
        own = self.local_experts
        return DispatchHandle(
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
            maker=header.maker,
        )


def to_slots(values_S: Tensor, handle: DispatchHandle) -> Tensor:
    """[T, K] of numbers that stand as rows leave; 0 where a slot goes nowhere."""
    flat = values_S.new_zeros(handle.num_tokens * handle.top_k)
    flat[handle.state.slot_S] = values_S
    return flat.view(handle.num_tokens, handle.top_k)


def _permuted(x_RX: Tensor, order_R: Tensor) -> Tensor:
    """Rows, or numbers, in another order."""
    return take(x_RX, order_R) if x_RX.dim() == 2 else x_RX[order_R]
