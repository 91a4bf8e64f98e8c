"""``hierarchical``: sends each token once to each other host that has an expert of it, and forwards it inside the host.

Two hosts of two ranks. Token a of rank 0 has experts on ranks 1, 2 and 3 (two on 3). Its row is sent once to host 1:

    host 0                                host 1
    rank 0 ── a ────── one copy ───────▶ rank 2 ──▶ its expert            rank 2, the relay, has the same local rank as
      └─▶ rank 1's expert                  └──────▶ rank 3's experts      rank 0 and forwards rows inside host 1

Combine reverses this route. ``relay_routes.ReturnFormat`` defines what the relay returns for a token:

    deterministic    the row of each slot. The source rank sums them in fp32 and in slot order, as if one rank held all
                     experts. The hosts of a token's slots may alternate, so a host cannot sum its own slots. Only the
                     leading slots of a token can be returned as one sum, if they are on the same host.
    otherwise        one weighted sum of the host's rows, in fp32, cast to the dtype. The source rank adds one row per
                     host.

Backward exchanges the roles: a token's gradient is sent once to each host with its weights, and rows or sums are
returned. With top-k K, H hosts and balanced routing, a token has H' = (H - 1) (1 - (1 - 1 / H)^K) copies to other hosts
and K (H - 1) / H slots there. DeepEP's internode kernels (github.com/deepseek-ai/DeepEP) do this on GPUs, and return
sums.

Each operation runs twice inside the host: for tokens of this host (*near*) while rows of other hosts are in flight,
then for tokens of other hosts (*far*). On the return route, rows for other hosts are computed first and sent in chunks
(``rail.py``) during the second run.

Rows between hosts are in their wire dtype. They are packed once, before they leave the host. Inside a host they are
decoded rows; rows of the same host are rounded in the same way. Group scales (``fp8_group``) are shared by up to 128
rows from one rank to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.header import describe
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.handshake import Counts, Handshake
from moe_comm.dispatch.hierarchical.inside_host import InsideHandle, InsideHost
from moe_comm.dispatch.hierarchical.rail import Rail, WireBytes, gather_ranges
from moe_comm.dispatch.hierarchical.relay_routes import (
    HostMap,
    RelayUnits,
    SendPlan,
    plan_sends,
    relay_units,
    return_format,
    row_positions,
)
from moe_comm.dispatch.operation import Operation
from moe_comm.dispatch.slots.sums import weighted_sum
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions
from moe_comm.dispatch.wire_dtype import (
    RowGroups,
    WireDtype,
    bytes_per_row,
    decode_groups,
    encode_groups,
    pack,
    rounded,
    rounded_in_groups,
    unpack,
)
from moe_comm.errors import ConfigError, PeerError
from moe_comm.runtime.memory import take, warm_rows
from moe_comm.topology import ExpertPlacement

Ints = tuple[int, ...]
PerHost = list[Ints]
"""Numbers by rank, then by host."""


@dataclass(frozen=True)
class RelaySide:
    """Rows that this rank relays, for tokens of its own host or of all other hosts.

    copies_H, slots_H: number of tokens and slots received from each host.
    inside: handle of the dispatch of ``units`` inside the host.
    position_N: positions of its rows on this rank among all dispatched rows.
    """

    copies_H: tuple[int, ...]
    slots_H: tuple[int, ...]
    units: RelayUnits
    inside: InsideHandle
    position_N: Tensor

    def inside_host(self, operation: Operation) -> Operation:
        """Return the same operation inside this host."""
        return replace(operation, top_k=self.units.ids_UK.shape[1])

    def weights(self, weights_S: Tensor, only_leading: bool) -> Tensor:
        """Return [U, K] weights of the units from those of received slots. ``only_leading``: 1 for all other slots."""
        lead_S = self.units.lead_S if only_leading else None
        weights_UK = weights_S.new_zeros(self.units.ids_UK.shape)
        weights_UK.view(-1)[self.units.slot_S] = weights_S if lead_S is None else weights_S.masked_fill(~lead_S, 1.0)
        return weights_UK


@dataclass(frozen=True)
class RelayHandle:
    """State of one dispatch on this rank. It relays ``near`` for tokens of its own host, and ``far`` for other hosts.

    most_out, most_back: maximum over all ranks of the number of rows from one rank to a rank on another host, in
        dispatch and on the return route; or an upper bound.
    """

    plan: SendPlan
    near: RelaySide
    far: RelaySide
    most_out: int
    most_back: int


class HierarchicalDispatcher(Dispatcher):
    """For several hosts with equal numbers of ranks; any device. Construction is collective over ``group``.

    ``make_dispatcher`` compares the settings of ranks; this class does not.

    Args:
        placement, group, rank, options: see ``Dispatcher``.
        hosts: one number per rank, equal for ranks of one host; detected by default.

    Attributes:
        wire_bytes: bytes sent to other hosts, by operation.

    Raises:
        ConfigError: hosts have different numbers of ranks, or ranks of a host are not adjacent; on every rank.
        PeerDied, PeerTimeout: a rank died, or did not call in time.
    """

    name = "hierarchical"
    checks_ids = True  # the handshake checks when it counts the slots
    packs = True

    def __init__(
        self,
        placement: ExpertPlacement,
        group: ProcessGroup,
        rank: int,
        options: DispatchOptions | None = None,
        hosts: Sequence[int] | None = None,
    ) -> None:
        super().__init__(placement, group, rank, options)
        assert self.comm is not None
        self.channel = Channel(self.comm, self.options.timeout_s)
        self.hosts = HostMap.of(self.comm.hosts if hosts is None else hosts)
        self.rail = Rail(self.channel, self.hosts, rank)
        self._host = self.hosts.host(rank)
        self._experts = self.hosts.experts(placement)
        self._handshake = Handshake(self.channel, placement, self.calls)
        host_placement = self.hosts.inside(placement, self._host)
        self._inside = InsideHost(host_placement, self.comm, self.hosts, rank, self.options)

    @property
    def wire_bytes(self) -> dict[str, WireBytes]:
        return self.rail.wire_bytes

    def _report_stop(self, text: str) -> None:
        self.channel.give_up(text)

    # --- the three primitives ---

    def _send(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, DispatchHandle]:
        x_TD = x_TD.contiguous()  # before the handshake, which reports a failure to the other ranks
        operation = self.context.operation
        counts = self._handshake.exchange(operation, ids_TK, x_TD.device)
        slots_WH = self._slots(counts)
        row_kind = return_format(self.options.deterministic, x_TD.dtype, self.options.wire_dtypes)
        plan = plan_sends(ids_TK, self._experts, slots_WH[self.rank], row_kind)
        copies = torch.tensor(plan.copies_H, dtype=torch.int64, device="cpu").to(self.channel.control_device)
        copies_WH = [tuple(row) for row in self.channel.all_gather(copies, describe(operation)).cpu().tolist()]
        copies_H, slots_H, most_out = self._relayed(copies_WH), self._relayed(slots_WH), self._max_far_count(copies_WH)
        pending_ids = self.rail.start(plan.ids_CK, plan.copies_H, copies_H, operation, "ids")
        near_tokens, far_tokens = self._start_tokens(x_TD, plan, copies_H, most_out)
        own = self.local_experts
        near_N, far_N = row_positions(counts.rows_WE, own, self.hosts, self._host, x_TD.device)
        rows_RD = warm_rows(near_N.shape[0] + far_N.shape[0], x_TD.shape[1], x_TD.dtype, x_TD.device)

        def forward(
            ids_PK: Tensor, copies_H: Ints, slots_H: Ints, tokens_at: Callable[..., Tensor], position_N: Tensor
        ) -> RelaySide:
            """Dispatch relayed tokens inside this host, and write this rank's rows into ``rows_RD``."""
            units = relay_units(ids_PK.long(), copies_H, slots_H, row_kind)
            x_UD = tokens_at(units.token_U)
            with self._guard():
                rows_ND, inside = self._inside.send(x_UD, units.ids_UK, replace(operation, top_k=units.ids_UK.shape[1]))
            rows_RD.index_copy_(0, position_N, rows_ND)
            return RelaySide(copies_H, slots_H, units, inside, position_N)

        own_ids_PK = self.rail.own(plan.ids_CK, plan.copies_H)
        near_copies_H, near_slots_H = self.rail.only_own(copies_H), self.rail.only_own(slots_H)
        near = forward(own_ids_PK, near_copies_H, near_slots_H, near_tokens, near_N)
        far_copies_H, far_slots_H = self.rail.without_own(copies_H), self.rail.without_own(slots_H)
        far = forward(pending_ids(), far_copies_H, far_slots_H, far_tokens, far_N)
        most_back = most_out if row_kind == "sums" else self._max_far_count(slots_WH)
        state = RelayHandle(plan, near, far, most_out, most_back)
        rows_per_expert = tuple(counts.rows_WE[:, own.start : own.stop].sum(0).tolist())
        handle = self._handle(x_TD, rows_per_expert, rows_RD.shape[0], counts.num_dropped, state)
        return rows_RD, handle

    def _send_scaled(self, x_TD: Tensor, ids_TK: Tensor) -> NoReturn:
        fault = self.context.operation.fault or ConfigError(
            "hierarchical decodes fp8 rows before it forwards them inside a host, so it cannot return them as values "
            "and scales; dispatch with the wire dtype 'same' or 'bf16', or use all_to_all"
        )
        self._raise_fault(fault, self.context.operation)

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle) -> Tensor:
        self._check_headers(rows_RD.device)
        relay: RelayHandle = handle.state
        plan = relay.plan
        # The relay applies the weights of all slots, or of the leading slots; else this rank applies them.
        by_relay = relay.far.units.token_U is None or plan.lead_TK is not None
        near_weights = far_weights = None
        if weights_TK is not None and by_relay:
            near_weights, far_weights = self._start_weights(weights_TK, relay, only_leading=True)
            applied_TK = plan.lead_TK
            weights_TK = None if applied_TK is None else weights_TK.masked_fill(applied_TK, 1.0)

        def sum_inside(side: RelaySide, weights: Callable[[], Tensor] | None) -> Tensor:
            """Return the sum of each relayed unit's rows."""
            rows_ND = self._rows_of(side, rows_RD)
            weights_UK = None if weights is None else weights()
            with self._guard():
                return self._inside.sum(rows_ND, weights_UK, side.inside, side.inside_host(self.context.operation))

        receive = self._start_returns(sum_inside(relay.far, far_weights), relay)
        rows_XD = receive(sum_inside(relay.near, near_weights))
        return weighted_sum(rows_XD, plan.row_index_TX, weights_TK)

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor | None]:
        self._check_headers(grad_TD.device)
        relay: RelayHandle = handle.state
        plan, near, far = relay.plan, relay.near, relay.far
        near_weights, far_weights = self._start_weights(weights_TK, relay)
        near_grad, far_grad = self._start_tokens(grad_TD, plan, far.copies_H, relay.most_out)
        grad_RD = warm_rows(handle.num_rows, handle.hidden, grad_TD.dtype, grad_TD.device)

        def forward(
            side: RelaySide, weights: Callable[[], Tensor], grad: Callable[..., Tensor]
        ) -> tuple[Tensor, Tensor]:
            """Return the gradients of rows on this rank, and of the weights of relayed slots."""
            rows = None if rows_RD is None else self._rows_of(side, rows_RD)
            weights_UK, grad_UD = weights(), grad(side.units.token_U)
            with self._guard():
                operation = side.inside_host(self.context.operation)
                grad_ND, dots_UK = self._inside.spread(grad_UD, rows, weights_UK, side.inside, operation)
            return grad_ND, weights_TK if dots_UK is None else dots_UK.flatten()[side.units.slot_S]

        # Tokens of this host first, while those of other hosts are in flight.
        near_ND, near_dots_S = forward(near, near_weights, near_grad)
        grad_RD.index_copy_(0, near.position_N, near_ND)
        far_ND, far_dots_S = forward(far, far_weights, far_grad)
        if rows_RD is None:
            return grad_RD.index_copy_(0, far.position_N, far_ND), None
        dots_of = self._start_dots(far_dots_S, handle)
        grad_RD.index_copy_(0, far.position_N, far_ND)
        return grad_RD, dots_of(near_dots_S)

    # --- weights and their gradients, along the routes of the rows. Other extra values have a dispatch of their own ---

    def _send_gradients(self, grad_TD: Tensor, words_TKX: Tensor, handle: DispatchHandle) -> tuple[Tensor, Tensor]:
        self._check_headers(grad_TD.device)
        relay: RelayHandle = handle.state
        weights = self._start_weights(words_TKX.squeeze(2), relay)
        grads = self._start_tokens(grad_TD, relay.plan, relay.far.copies_H, relay.most_out)
        grad_RD = warm_rows(handle.num_rows, handle.hidden, grad_TD.dtype, grad_TD.device)
        weights_R1 = words_TKX.new_empty(handle.num_rows, 1)
        for side, weights_at, grad_at in zip((relay.near, relay.far), weights, grads, strict=True):
            weights_UK, grad_UD = weights_at(), grad_at(side.units.token_U)
            with self._guard():
                operation = side.inside_host(self.context.operation)
                grad_ND, weights_N1 = self._inside.share(grad_UD, weights_UK, side.inside, operation)
            grad_RD.index_copy_(0, side.position_N, grad_ND)
            weights_R1.index_copy_(0, side.position_N, weights_N1)
        return grad_RD, weights_R1

    def _sum_with(
        self, rows_RD: Tensor | None, words_RX: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor | None, Tensor]:
        if handle.extra is None or handle.extra.slots is not None:
            return super()._sum_with(rows_RD, words_RX, handle)
        relay: RelayHandle = handle.state
        if rows_RD is None:
            self._check_headers(words_RX.device)
        y_TD = None if rows_RD is None else self._sum(rows_RD, None, handle)

        def dots_of(side: RelaySide) -> Tensor:
            """Return the values of relayed slots."""
            with self._guard():
                operation = side.inside_host(self.context.operation)
                dots_UK = self._inside.return_dots(words_RX[side.position_N], side.inside, operation)
            return dots_UK.flatten()[side.units.slot_S]

        to_slots = self._start_dots(dots_of(relay.far), handle)
        return y_TD, to_slots(dots_of(relay.near)).unsqueeze(2)

    # --- helpers ---

    def _start_dots(self, far_S: Tensor, handle: DispatchHandle) -> Callable[[Tensor], Tensor]:
        """Start to return values of relayed slots to the ranks of their tokens.

        Returns a function that takes the values of this host's slots and returns [T, K].
        """
        relay: RelayHandle = handle.state
        plan = relay.plan
        pending = self.rail.start(far_S, relay.far.slots_H, plan.slots_H, self.context.operation, "weights")

        def to_slots(near_S: Tensor) -> Tensor:
            values = near_S.new_zeros(handle.num_tokens * handle.top_k)
            values[self.rail.own(plan.slot_S, plan.slots_H)] = near_S
            values[self.rail.far(plan.slot_S, plan.slots_H)] = pending()
            return values.view(handle.num_tokens, handle.top_k)

        return to_slots

    def _check_headers(self, device: torch.device) -> None:
        if self.options.checked:
            self._handshake.exchange(self.context.operation, None, device)

    def _slots(self, counts: Counts) -> PerHost:
        """Return the number of slots of each rank on each host."""
        ends_WE = np.pad(counts.rows_WE.cumsum(1), ((0, 0), (1, 0)))
        return [tuple(row) for row in np.diff(ends_WE[:, list(self._experts)], axis=1).tolist()]

    def _relayed(self, counts_WH: PerHost) -> Ints:
        """Return the counts that this rank relays for each host."""
        return tuple(counts_WH[rank][self._host] for rank in self.hosts.rail(self.rank))

    def _max_far_count(self, counts_WH: PerHost) -> int:
        """Return the maximum over all ranks of a rank's count for another host."""
        return max(
            (
                count
                for rank, row in enumerate(counts_WH)
                for host, count in enumerate(row)
                if host != self.hosts.host(rank)
            ),
            default=0,
        )

    def _rows_of(self, side: RelaySide, rows_RD: Tensor) -> Tensor:
        """Return rows in the order of the side's dispatch, in memory that the ranks of this host can read."""
        index_N = side.position_N
        out_ND = self._inside.empty_rows(index_N.shape[0], rows_RD.shape[1], rows_RD.dtype, rows_RD.device)
        return torch.index_select(rows_RD, 0, index_N, out=out_ND)

    def _start_weights(
        self, weights_TK: Tensor, relay: RelayHandle, only_leading: bool = False
    ) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """Start sending weights. Return functions that give ``RelaySide.weights`` of the near and of the far side."""
        plan = relay.plan
        weights_S = weights_TK.reshape(-1)[plan.slot_S]
        pending = self.rail.start(weights_S, plan.slots_H, relay.far.slots_H, self.context.operation, "weights")
        own_S = self.rail.own(weights_S, plan.slots_H)
        return (lambda: relay.near.weights(own_S, only_leading), lambda: relay.far.weights(pending(), only_leading))

    def _start_tokens(
        self, rows_TD: Tensor, plan: SendPlan, copies_H: Ints, max_block_rows: int
    ) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """Start sending tokens' rows in their wire dtype. ``copies_H`` is the number of tokens received from each host.

        Returns two functions of an optional ascending index. They return decoded rows of this host, and received rows
        of other hosts, ordered by host.
        """
        wire_dtype: WireDtype = self.options.wire_dtypes.of(self.context.operation.op)
        width, dtype = rows_TD.shape[1], rows_TD.dtype
        near_N = self.rail.own(plan.token_C, plan.copies_H)
        far_N = self.rail.far(plan.token_C, plan.copies_H)
        send_H, receive_H = self.rail.without_own(plan.copies_H), self.rail.without_own(copies_H)
        if wire_dtype.scales == "group":
            far = self._start_groups(take(rows_TD, far_N), send_H, receive_H, max_block_rows)
            near = partial(rounded_in_groups, take(rows_TD, near_N), wire_dtype)
            return _at_index(near), _at_index(lambda: far(rows_TD.new_empty(0, width)))
        packed_TX = pack(rows_TD, wire_dtype)
        decode: Callable[[Tensor], Tensor] = partial(unpack, wire_dtype=wire_dtype, hidden=width, dtype=dtype)
        pending = self.rail.start_rows(
            lambda ranges: take(packed_TX, gather_ranges(far_N, ranges)),
            send_H,
            receive_H,
            max_block_rows * bytes_per_row(width, wire_dtype, dtype),
            self.context.operation,
        )
        empty = rows_TD.new_empty(0, width)

        def receive(index_N: Tensor | None = None) -> Tensor:
            return pending.take(decode, empty) if index_N is None else pending.pick(decode, empty, index_N)

        return _at_index(lambda: decode(take(packed_TX, near_N))), receive

    def _start_returns(self, rows_UD: Tensor, relay: RelayHandle) -> Callable[[Tensor], Tensor]:
        """Start returning the far side's rows in their wire dtype.

        Returns a function that takes the near side's rows and returns all rows of this rank's tokens, ordered by host.
        """
        wire_dtype: WireDtype = self.options.wire_dtypes.of(self.context.operation.op)
        width, dtype = rows_UD.shape[1], rows_UD.dtype
        send_H, receive_H = relay.far.units.rows_H, relay.plan.rows_H
        if wire_dtype.scales == "group":
            receive = self._start_groups(rows_UD, send_H, receive_H, relay.most_back)
            return lambda own_UD: receive(rounded_in_groups(own_UD, wire_dtype))
        pending = self.rail.start_rows(
            lambda ranges: pack(gather_ranges(rows_UD, ranges), wire_dtype),
            send_H,
            receive_H,
            relay.most_back * bytes_per_row(width, wire_dtype, dtype),
            self.context.operation,
        )
        decode: Callable[[Tensor], Tensor] = partial(unpack, wire_dtype=wire_dtype, hidden=width, dtype=dtype)
        return lambda own_UD: pending.take(decode, rounded(own_UD, wire_dtype))

    def _start_groups(
        self, rows_ND: Tensor, send_H: Ints, receive_H: Ints, max_block_rows: int
    ) -> Callable[[Tensor], Tensor]:
        """Start sending rows and group scales to other hosts. Return a function that inserts this host's block."""
        wire_dtype, dtype = self.options.wire_dtypes.of(self.context.operation.op), rows_ND.dtype
        far_H = self.rail.without_own(receive_H)
        sent, received = (
            RowGroups.of(np.array(sizes, np.int64), range(self.hosts.count + 1), rows_ND.device)
            for sizes in (send_H, far_H)
        )
        packed_NX, scale_GD = encode_groups(rows_ND, sent, wire_dtype)
        most_bytes = max_block_rows * bytes_per_row(rows_ND.shape[1], wire_dtype, dtype)
        packed = self.rail.start_rows(
            partial(gather_ranges, packed_NX), send_H, far_H, most_bytes, self.context.operation
        )
        scales = self.rail.start(scale_GD, sent.per_rank, received.per_rank, self.context.operation, "rows")

        def receive(own_PD: Tensor) -> Tensor:
            far_ND = decode_groups(packed.take(lambda rows: rows, packed_NX[:0]), scales(), received, dtype)
            before = sum(receive_H[: self._host])
            return torch.cat((far_ND[:before], own_PD, far_ND[before:]))

        return receive

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Mark the whole group as failed if an operation of the host's group loses a peer."""
        self.channel.comm.check()
        try:
            yield
        except PeerError as error:
            self.channel.comm.failed = error
            raise


def _at_index(rows: Callable[[], Tensor]) -> Callable[..., Tensor]:
    """Return a function of an optional index into ``rows()``."""
    return lambda index_N=None: rows() if index_N is None else take(rows(), index_N)
