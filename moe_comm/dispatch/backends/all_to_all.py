"""``all_to_all``: sends rows with ``all_to_all_single``, over any backend of torch.distributed.

Two ranks, experts 0 1 on rank 0 and 2 3 on rank 1; "a2" is a row of rank 0 for expert 2, "b0" of rank 1 for 0:

    rank 0: tokens ──sort by expert──▶ a0 a1 a1 | a2 ─┐      ┌─▶ a0 a1 a1 | b0 b1 ──by expert──▶ a0 b0 | a1 a1 b1
                                                      ├──⇄───┤   (by source)                  (by expert, then source)
    rank 1: tokens ──sort by expert──▶ b0 b1 | b2 b3 ─┘      └─▶ a2 | b2 b3    ──by expert──▶ a2 b2 | b3

Combine reverses these steps. The rank of a token takes the weighted sum in slot order. This is the same arithmetic on
the same values as with all experts on one rank, so the bits are the same.

If the weights need a gradient, the backward of combine sends the unscaled gradient of each token and its weight. The
rank of the expert computes the product, and the dot product with the expert's output, and returns one number per row.
The alternatives are a second transfer of all rows, or a copy of them from combine to backward.

With a wire dtype a token's row is packed once, and its K copies are copies of the packed row. Rows for local experts
are packed too, so that the bits do not depend on the placement of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.header import describe
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.handshake import Counts, Handshake, Words
from moe_comm.dispatch.slots import plain, sums
from moe_comm.dispatch.slots.sums import take, weighted_sum
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions
from moe_comm.dispatch.wire_dtype import RowGroups, WireDtype, decode_groups, encode_groups, pack, unpack, unpack_scaled
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.kernels.row_weights import scale, scale_
from moe_comm.topology import ExpertPlacement


@dataclass(frozen=True)
class Routes:
    """Order and destinations of rows. This rank sends S rows and receives R. A slot is one (token, k) of ``ids_TK``.

    place_TK: index of each slot among the S rows; -1 if dropped. slot_S: its inverse.
    by_expert_R: ``rows = received[by_expert_R]``; None if both orders are equal. by_source_R: its inverse.
    send, receive: number of rows to and from each rank.
    tokens_W: number of tokens of each rank. rows_WE: number of rows of each rank for each expert, on the CPU.
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
    """For any device and number of hosts. ``make_dispatcher`` compares the settings of ranks; this class does not."""

    name = "all_to_all"
    checks_ids = True  # the handshake checks when it counts the slots
    packs = True

    def __init__(
        self, placement: ExpertPlacement, group: ProcessGroup, rank: int, options: DispatchOptions | None = None
    ) -> None:
        super().__init__(placement, group, rank, options)
        assert self.comm is not None
        self.channel = Channel(self.comm, self.options.timeout_s)
        self._handshake = Handshake(self.channel, placement, self.calls)

    def _report_stop(self, text: str) -> None:
        self.channel.give_up(text)

    def prepare_dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> DispatchHandle:
        """Run the handshake of a dispatch and compute its routes. No rows move."""
        counts = self._handshake.exchange(self.context.operation, ids_TK, x_TD.device)
        return self._routed(x_TD, counts, self._routes(ids_TK, counts))

    def check_headers(self, device: torch.device) -> None:
        """Run the handshake of any operation after dispatch, if operations are ``checked``."""
        if self.options.checked:
            self._handshake.exchange(self.context.operation, None, device)

    def send(self, x_TD: Tensor, handle: DispatchHandle) -> Tensor:
        """Return [R, D], the rows of this rank's experts, after ``prepare_dispatch``. No autograd."""
        routes: Routes = handle.state
        wire_dtype = self.options.wire_dtypes.of(self.context.operation.op)
        return self._send_rows(x_TD, wire_dtype, routes, describe(self.context.operation))

    def send_scaled(self, x_TD: Tensor, handle: DispatchHandle) -> ScaledRows:
        """Run ``send`` for a dispatch with an fp8 wire dtype, and return the encoded rows."""
        routes, wire_dtype = handle.state, self.options.wire_dtypes.of(self.context.operation.op)
        packed_SX = sums.copy(pack(x_TD, wire_dtype), routes.place_TK, routes.slot_S)
        packed_RX = self._to_experts(packed_SX, routes, describe(self.context.operation))
        return unpack_scaled(packed_RX, wire_dtype, handle.hidden)

    def _send(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, DispatchHandle]:
        x_TD = x_TD.contiguous()  # before the handshake, which reports a failure to the other ranks
        handle = self.prepare_dispatch(x_TD, ids_TK)
        return self.send(x_TD, handle), handle

    def _send_scaled(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[ScaledRows, DispatchHandle]:
        handle = self.prepare_dispatch(x_TD, ids_TK)
        return self.send_scaled(x_TD, handle), handle

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle) -> Tensor:
        rows_RD = rows_RD.contiguous()
        self.check_headers(rows_RD.device)
        wire_dtype = self.options.wire_dtypes.of(self.context.operation.op)
        rows_SD = self._return_rows(rows_RD, wire_dtype, handle.state, describe(self.context.operation))
        return weighted_sum(rows_SD, handle.state.place_TK, weights_TK)

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor | None]:
        self.check_headers(grad_TD.device)
        routes: Routes = handle.state
        wire_dtype = self.options.wire_dtypes.of(self.context.operation.op)
        weights_S = weights_TK.reshape(-1)[routes.slot_S]
        description = describe(self.context.operation)
        if rows_RD is None and not wire_dtype.narrows(grad_TD.dtype):
            grad_SD = sums.copy(grad_TD, routes.place_TK, routes.slot_S)
            return self._to_experts(scale(grad_SD, weights_S), routes, description), None
        # A gradient in a wire dtype is rounded before it is scaled, whether or not the weights need a gradient.
        grad_RD = self._send_rows(grad_TD, wire_dtype, routes, description)
        weights_R = self._to_experts(weights_S, routes, description)
        dots_R = scale_(grad_RD, weights_R, rows_RD)
        return grad_RD, None if dots_R is None else self._dots(dots_R, handle, description)

    def _send_gradients(self, grad_TD: Tensor, words_TKX: Tensor, handle: DispatchHandle) -> tuple[Tensor, Tensor]:
        self.check_headers(grad_TD.device)
        wire_dtype, description = (
            self.options.wire_dtypes.of(self.context.operation.op),
            describe(self.context.operation),
        )
        grad_RD = self._send_rows(grad_TD, wire_dtype, handle.state, description)
        return grad_RD, self._send_words(words_TKX, handle)

    def _send_words(self, words_TKX: Tensor, handle: DispatchHandle) -> Tensor:
        """Send the words along the routes of the rows, without another handshake."""
        words_SX = take(words_TKX.reshape(-1, words_TKX.shape[2]), handle.state.slot_S)
        return self._to_experts(words_SX, handle.state, f"extra values of layer {handle.label!r}")

    def _return_words(self, words_RX: Tensor, handle: DispatchHandle) -> Tensor:
        words_SX = self._to_tokens(words_RX, handle.state, f"extra values of layer {handle.label!r}, backward")
        return to_slots(words_SX, handle)

    def _dots(self, dots_R: Tensor, handle: DispatchHandle, description: str) -> Tensor:
        """Send dot products of rows and gradients to their tokens: [T, K]."""
        routes: Routes = handle.state
        return to_slots(self._to_tokens(dots_R, routes, description), handle)

    def _send_rows(self, rows_TD: Tensor, wire_dtype: WireDtype, routes: Routes, description: str) -> Tensor:
        """Send the row of each slot to its expert, in the wire dtype."""
        if wire_dtype.scales == "group":
            sent, received = self._groups(routes, rows_TD.device)
            packed_SX, scale_GD = encode_groups(sums.copy(rows_TD, routes.place_TK, routes.slot_S), sent, wire_dtype)
            packed_RX = self.channel.all_to_all(packed_SX, routes.send, routes.receive, description)
            scale_GD = self.channel.all_to_all(scale_GD, sent.per_rank, received.per_rank, description)
            rows_RD = decode_groups(packed_RX, scale_GD, received, rows_TD.dtype)
            return rows_RD if routes.by_expert_R is None else take(rows_RD, routes.by_expert_R)
        packed_RX = self._to_experts(
            sums.copy(pack(rows_TD, wire_dtype), routes.place_TK, routes.slot_S), routes, description
        )
        return unpack(packed_RX, wire_dtype, rows_TD.shape[1], rows_TD.dtype)

    def _return_rows(self, rows_RD: Tensor, wire_dtype: WireDtype, routes: Routes, description: str) -> Tensor:
        """Send rows of experts to their tokens, in the wire dtype."""
        if wire_dtype.scales == "group":
            received, sent = self._groups(routes, rows_RD.device)
            ordered_RD = rows_RD if routes.by_source_R is None else take(rows_RD, routes.by_source_R)
            packed_RX, scale_GD = encode_groups(ordered_RD, sent, wire_dtype)
            packed_SX = self.channel.all_to_all(packed_RX, routes.receive, routes.send, description)
            scale_GD = self.channel.all_to_all(scale_GD, sent.per_rank, received.per_rank, description)
            return decode_groups(packed_SX, scale_GD, received, rows_RD.dtype)
        packed_SX = self._to_tokens(pack(rows_RD, wire_dtype), routes, description)
        return unpack(packed_SX, wire_dtype, rows_RD.shape[1], rows_RD.dtype)

    def _groups(self, routes: Routes, device: torch.device) -> tuple[RowGroups, RowGroups]:
        """Return the scale groups of this rank's tokens, by expert, and of its experts' rows, by (source, expert)."""
        own = self.local_experts
        own_rows_WL = routes.rows_WE[:, own.start : own.stop]
        sources = range(0, (self.world + 1) * len(own), len(own)) if len(own) else [0] * (self.world + 1)
        tokens = RowGroups.of(routes.rows_WE[self.rank], self.placement.offsets, device)
        return tokens, RowGroups.of(own_rows_WL.reshape(-1), sources, device)

    def _to_experts(self, rows_SX: Tensor, routes: Routes, description: str) -> Tensor:
        """Send rows ordered by expert, and order the received rows by (expert, source)."""
        received = self.channel.all_to_all(rows_SX, routes.send, routes.receive, description)
        return received if routes.by_expert_R is None else _permuted(received, routes.by_expert_R)

    def _to_tokens(self, rows_RX: Tensor, routes: Routes, description: str) -> Tensor:
        """Reverse ``_to_experts``."""
        by_source = rows_RX if routes.by_source_R is None else _permuted(rows_RX, routes.by_source_R)
        return self.channel.all_to_all(by_source, routes.receive, routes.send, description)

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
        order, place_TK = sums.order(ids_TK, self.num_experts)
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

    def _routed(self, x_TD: Tensor, counts: Counts, routes: Routes) -> DispatchHandle:
        own = self.local_experts
        rows_per_expert = tuple(counts.rows_WE[:, own.start : own.stop].sum(0).tolist())
        return self._handle(
            x_TD, rows_per_expert, sum(routes.receive), counts.num_dropped, routes, routes.send[self.rank]
        )


def to_slots(values_S: Tensor, handle: DispatchHandle) -> Tensor:
    """Return [T, K], the value (or vector) of the row of each slot; 0 for dropped slots."""
    flat = values_S.new_zeros(handle.num_tokens * handle.top_k, *values_S.shape[1:])
    flat[handle.state.slot_S] = values_S
    return flat.view(handle.num_tokens, handle.top_k, *values_S.shape[1:])


def _permuted(x_RX: Tensor, order_R: Tensor) -> Tensor:
    """Return rows [R, X], or one number per row [R], in the order ``order_R``."""
    return take(x_RX, order_R) if x_RX.dim() == 2 else x_RX[order_R]
