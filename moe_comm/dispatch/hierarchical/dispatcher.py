"""``hierarchical``: between hosts one copy of a token for each host that has an expert of it; shared memory inside.

Two hosts of two ranks; token a of rank 0 has experts on ranks 1, 2 and 3 (twice on 3), so its row crosses once:

    host 0                                host 1
    rank 0 ── a ────── one copy ───────▶ rank 2 ──▶ its expert            rank 0 sends to the rank in its own place on
      └─▶ rank 1's expert                  └──────▶ rank 3's experts      host 1, which forwards inside its host

Combine goes back along the same way. There is a choice in what the relay (rank 2) sends home (``relay_routes.Way``):

    deterministic    the row of each slot, and the sum is taken at home, in fp32 and in slot order, as if one rank held
                     all experts: where a token's slots alternate between hosts, no host can add up its own. Only a run
                     of slots at the token's beginning can go as one sum, which is what one rank would have so far.
    otherwise        one sum of its host's rows, weighted, taken in fp32 and cast; home adds one row of each host.

Backward is the same with the roles exchanged: a token's gradient crosses once to each host, with its weights beside it,
and what comes back are rows or sums. With top-k K over H hosts and balanced routing a token has
H' = (H - 1) (1 - (1 - 1 / H)^K) copies to other hosts and K (H - 1) / H slots there; DeepEP's internode kernels
(github.com/deepseek-ai/DeepEP) send so on GPUs, with sums on the way back.

Each operation inside the host is two: one for tokens of the own host, which is done while the wire brings the others',
and one for those. On the way back the other hosts' come first, and leave, in pieces (``rail.py``), during the second.

What travels between hosts does so in its payload, packed once where it leaves its host; inside a host rows are what
the wire_dtype makes of them. Rows of the own host are rounded alike. Scales of groups (``fp8_group``) are shared by up to
128 rows that go from one rank to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.header import Header, describe
from moe_comm.comm.meeting import compare
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.group_scales import Groups, decode_groups, encode_groups, rounded_in_groups
from moe_comm.dispatch.handshake import Counts, Handshake, settings_of
from moe_comm.dispatch.hierarchical.inside_host import InsideHandle, InsideHost
from moe_comm.dispatch.hierarchical.rail import Pieces, Rail, joined
from moe_comm.dispatch.hierarchical.relay_routes import (
    Departures,
    HostMap,
    Units,
    WireBytes,
    departures,
    expert_places,
    units,
    way_back,
)
from moe_comm.dispatch.sums import weighted_sum
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions
from moe_comm.dispatch.wire_dtype import WireDtype, bytes_per_row, pack, rounded, unpack
from moe_comm.errors import ConfigError, PeerError, RoutingError
from moe_comm.runtime.memory import take, warm_rows
from moe_comm.topology import ExpertPlacement

Ints = tuple[int, ...]
PerHost = list[Ints]
"""By rank, then by host."""


@dataclass(frozen=True)
class Side:
    """What this rank relays for tokens of one side: of its own host, or of all others.

    copies_H, slots_H: tokens and slots that came from each host. inside: of their dispatch on this host. place_N: where
    the rows of it that came to this rank stand among all of its rows.
    """

    copies_H: tuple[int, ...]
    slots_H: tuple[int, ...]
    units: Units
    inside: InsideHandle
    place_N: Tensor

    def header(self, header: Header) -> Header:
        """``header`` inside this host."""
        return replace(header, top_k=self.units.ids_UK.shape[1])

    def weights(self, weights_S: Tensor, only_leading: bool) -> Tensor:
        """[U, K] of its units, from those of slots as they arrived; 1 for others than leading slots if so asked."""
        lead_S = self.units.lead_S if only_leading else None
        weights_UK = weights_S.new_zeros(self.units.ids_UK.shape)
        weights_UK.view(-1)[self.units.slot_S] = weights_S if lead_S is None else weights_S.masked_fill(~lead_S, 1.0)
        return weights_UK


@dataclass(frozen=True)
class RelayHandle:
    """One dispatch, as this rank sees it: what leaves it, and what it relays.

    most_out, most_back: rows of the largest block that goes from one rank to one on another host, and comes back, or a
    bound on them; of all ranks.
    """

    leaving: Departures
    near: Side
    far: Side
    most_out: int
    most_back: int


class HierarchicalDispatcher(Dispatcher):
    """Several hosts with equal numbers of ranks; any device. Construction is collective over ``group``.

    Args:
        hosts: a number for each rank, equal for ranks of one host; found out if not given.
        pieces: how rows that cross between hosts are cut; alike on every rank.

    Attributes:
        wire_bytes: what this rank has sent to other hosts, by operation; ``inter_host_bytes`` has the formula.

    Raises:
        ConfigError: hosts have different numbers of ranks, or ranks of a host are not adjacent; on every rank.
        RankMismatch: ranks build it with different settings; on every rank.
        PeerDied, PeerTimeout: a rank does not take part.
    """

    name = "hierarchical"
    packs = True

    def __init__(
        self,
        placement: ExpertPlacement,
        group: ProcessGroup,
        rank: int,
        options: DispatchOptions | None = None,
        hosts: Sequence[int] | None = None,
        pieces: Pieces | None = None,
    ) -> None:
        super().__init__(placement, group, rank, options)
        assert self.comm is not None
        self.channel = Channel(self.comm, self.options.timeout_s)
        fault = None
        if hosts is not None and len(hosts) != self.world:
            fault = ConfigError(f"hosts must have a number for each of the {self.world} ranks; got {len(hosts)}")
        pieces = Pieces() if pieces is None else pieces
        same = settings_of(self) | {"hosts": None if hosts is None else tuple(hosts), "pieces": pieces}
        compare(self.channel, f"the {self.name} dispatcher", same, fault=fault)
        self.hosts = HostMap.of(self.comm.hosts if hosts is None else hosts)
        shared = self.comm.native and all(
            len({self.comm.hosts[member] for member in self.hosts.members(host)}) == 1
            for host in range(self.hosts.count)
        )
        self._rail = Rail(self.channel, self.hosts, rank, pieces)
        self._host = self.hosts.host(rank)
        self._experts = self.hosts.experts(placement)
        self._handshake = Handshake(self.channel, placement, self.calls)
        inner = self.hosts.inside(placement, self._host)
        self._inside = InsideHost(inner, self.comm, self.hosts, rank, self.options, shared)

    @property
    def wire_bytes(self) -> dict[str, WireBytes]:
        return self._rail.wire_bytes

    def _leave_behind(self, text: str) -> None:
        self.channel.give_up(text)

    def _routing_fault(self, ids_TK: Tensor) -> RoutingError | None:
        return None  # counted with the slots, and told with the counts

    # --- the three primitives ---

    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, DispatchHandle]:
        counts = self._handshake.exchange(header, ids_TK, x_TD.device)
        slots_WH = self._slots(counts)
        way = way_back(self.options.deterministic, x_TD.dtype, self.options.wire_dtypes)
        leaving = departures(ids_TK, self._experts, slots_WH[self.rank], way)
        copies_WH = self._tell(leaving.copies_H, describe(header))
        copies_H, slots_H, most_out = self._relayed(copies_WH), self._relayed(slots_WH), self._most(copies_WH)
        ids_coming = self._rail.start(leaving.ids_CK, leaving.copies_H, copies_H, header, "ids")
        near_x, far_x = self._carry_out(x_TD, leaving, copies_H, most_out, header)
        own = self.local_experts
        near_N, far_N = expert_places(counts.rows_WE, own, self.hosts, self._host, x_TD.device)
        rows_RD = warm_rows(near_N.shape[0] + far_N.shape[0], x_TD.shape[1], x_TD.dtype, x_TD.device)

        def forward(ids_PK: Tensor, copies_H: Ints, slots_H: Ints, x: Callable[..., Tensor], place_N: Tensor) -> Side:
            some = units(ids_PK.long(), copies_H, slots_H, way)
            x_UD = x(some.token_U)
            with self._alive():
                arrived_ND, inside = self._inside.send(x_UD, some.ids_UK, replace(header, top_k=some.ids_UK.shape[1]))
            rows_RD.index_copy_(0, place_N, arrived_ND)
            return Side(copies_H, slots_H, some, inside, place_N)

        own_ids_PK = self._rail.own(leaving.ids_CK, leaving.copies_H)
        near = forward(own_ids_PK, self._rail.only_own(copies_H), self._rail.only_own(slots_H), near_x, near_N)
        far = forward(ids_coming(), self._rail.without_own(copies_H), self._rail.without_own(slots_H), far_x, far_N)
        handle = DispatchHandle(
            num_tokens=x_TD.shape[0],
            top_k=ids_TK.shape[1],
            hidden=x_TD.shape[1],
            dtype=x_TD.dtype,
            device=x_TD.device,
            rows_per_expert=tuple(counts.rows_WE[:, own.start : own.stop].sum(0).tolist()),
            num_rows=rows_RD.shape[0],
            num_dropped=counts.num_dropped,
            label=header.label,
            state=RelayHandle(leaving, near, far, most_out, most_out if way == "sums" else self._most(slots_WH)),
            call=header.seq,
            maker=header.maker,
        )
        return rows_RD, handle

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle, header: Header) -> Tensor:
        self._agree(header, rows_RD.device)
        relay: RelayHandle = handle.state
        leaving = relay.leaving
        by_relay = relay.far.units.token_U is None or leaving.lead_TK is not None  # all weights, or those in front
        near_weights = far_weights = None
        if weights_TK is not None and by_relay:
            near_weights, far_weights = self._relay_weights(weights_TK, relay, header, only_leading=True)
            ones = leaving.lead_TK
            weights_TK = None if ones is None else weights_TK.masked_fill(ones, 1.0)

        def back(side: Side, weights: Callable[[], Tensor] | None) -> Tensor:
            rows_ND = self._rows_of(side, rows_RD)
            weights_UK = None if weights is None else weights()
            with self._alive():
                return self._inside.sum(rows_ND, weights_UK, side.inside, side.header(header))

        pending = self._carry_home(back(relay.far, far_weights), relay, header)
        rows_XD = pending(back(relay.near, near_weights))
        return weighted_sum(rows_XD, leaving.place_TX, weights_TK)

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        self._agree(header, grad_TD.device)
        relay: RelayHandle = handle.state
        leaving, near, far = relay.leaving, relay.near, relay.far
        near_weights, far_weights = self._relay_weights(weights_TK, relay, header)
        near_grad, far_grad = self._carry_out(grad_TD, leaving, far.copies_H, relay.most_out, header)
        grad_RD = warm_rows(handle.num_rows, handle.hidden, grad_TD.dtype, grad_TD.device)

        def forward(side: Side, weights: Callable[[], Tensor], grad: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
            """Gradients that came, and of the weights of slots."""
            rows = None if rows_RD is None else self._rows_of(side, rows_RD)
            weights_UK, grad_UD = weights(), grad(side.units.token_U)
            with self._alive():
                inner = side.header(header)
                arrived_ND, dots_UK = self._inside.spread(grad_UD, rows, weights_UK, side.inside, inner)
            return arrived_ND, weights_TK if dots_UK is None else dots_UK.flatten()[side.units.slot_S]

        near_ND, near_dots_S = forward(near, near_weights, near_grad)
        grad_RD.index_copy_(0, near.place_N, near_ND)
        far_ND, far_dots_S = forward(far, far_weights, far_grad)
        if rows_RD is None:
            return grad_RD.index_copy_(0, far.place_N, far_ND), None
        dots_coming = self._rail.start(far_dots_S, far.slots_H, leaving.slots_H, header, "weights")
        grad_RD.index_copy_(0, far.place_N, far_ND)
        dots = near_dots_S.new_zeros(handle.num_tokens * handle.top_k)
        dots[self._rail.own(leaving.slot_S, leaving.slots_H)] = near_dots_S
        dots[self._rail.far(leaving.slot_S, leaving.slots_H)] = dots_coming()
        return grad_RD, dots.view(handle.num_tokens, handle.top_k)

    # --- the parts of them ---

    def _agree(self, header: Header, device: torch.device) -> None:
        if self.options.checked:
            self._handshake.exchange(header, None, device)

    def _slots(self, counts: Counts) -> PerHost:
        """Slots that each rank has on each host."""
        ends_WE = np.pad(counts.rows_WE.cumsum(1), ((0, 0), (1, 0)))
        return [tuple(row) for row in np.diff(ends_WE[:, list(self._experts)], axis=1).tolist()]

    def _tell(self, copies_H: tuple[int, ...], description: str) -> PerHost:
        """Copies that each rank has for each host."""
        told = torch.tensor(copies_H).to(self.channel.control_device)
        return [tuple(row) for row in self.channel.all_gather(told, description).cpu().tolist()]

    def _relayed(self, some_WH: PerHost) -> Ints:
        """Those that this rank relays for each host."""
        return tuple(some_WH[rank][self._host] for rank in self.hosts.rail(self.rank))

    def _most(self, some_WH: PerHost) -> int:
        """The most that any rank has for another host."""
        return max(
            (
                number
                for rank, row in enumerate(some_WH)
                for host, number in enumerate(row)
                if host != self.hosts.host(rank)
            ),
            default=0,
        )

    def _rows_of(self, side: Side, rows_RD: Tensor) -> Tensor:
        """Rows in the order of the side's dispatch on this host, where its ranks can read them."""
        index_N = side.place_N
        out_ND = self._inside.empty_rows(index_N.shape[0], rows_RD.shape[1], rows_RD.dtype, rows_RD.device)
        return torch.index_select(rows_RD, 0, index_N, out=out_ND)

    def _relay_weights(
        self, weights_TK: Tensor, relay: RelayHandle, header: Header, only_leading: bool = False
    ) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """Start sending weights; what ``Side.weights`` makes of those of the own host, and of those that come."""
        leaving = relay.leaving
        weights_S = weights_TK.reshape(-1)[leaving.slot_S]
        pending = self._rail.start(weights_S, leaving.slots_H, relay.far.slots_H, header, "weights")
        own_S = self._rail.own(weights_S, leaving.slots_H)
        return (
            lambda: relay.near.weights(own_S, only_leading),
            lambda: relay.far.weights(pending(), only_leading),
        )

    def _carry_out(
        self, rows_TD: Tensor, leaving: Departures, copies_H: Ints, most: int, header: Header
    ) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """Start sending tokens' rows in their payload; each takes an ascending index, or None.

        Args:
            copies_H: that come from each host.

        Returns:
            What the payload makes of the own host's rows, and the others', which come, by host.
        """
        wire_dtype: WireDtype = self.options.wire_dtypes.of(header.op)
        width, dtype = rows_TD.shape[1], rows_TD.dtype
        near_N = self._rail.own(leaving.token_C, leaving.copies_H)
        far_N = self._rail.far(leaving.token_C, leaving.copies_H)
        send_H, receive_H = self._rail.without_own(leaving.copies_H), self._rail.without_own(copies_H)
        if wire_dtype.scales == "group":
            far = self._start_groups(take(rows_TD, far_N), send_H, receive_H, most, header)
            near = partial(rounded_in_groups, take(rows_TD, near_N), wire_dtype)
            return _at_index(near), _at_index(lambda: far(rows_TD.new_empty(0, width)))
        packed_TX = pack(rows_TD, wire_dtype)
        open_: Callable[[Tensor], Tensor] = partial(unpack, wire_dtype=wire_dtype, hidden=width, dtype=dtype)
        arriving = self._rail.start_rows(
            lambda spans: take(packed_TX, joined(far_N, spans)),
            send_H,
            receive_H,
            most * bytes_per_row(width, wire_dtype, dtype),
            header,
        )
        nothing = rows_TD.new_empty(0, width)

        def come(index_N: Tensor | None = None) -> Tensor:
            return arriving.take(open_, nothing) if index_N is None else arriving.pick(open_, nothing, index_N)

        return _at_index(lambda: open_(take(packed_TX, near_N))), come

    def _carry_home(self, rows_UD: Tensor, relay: RelayHandle, header: Header) -> Callable[[Tensor], Tensor]:
        """Start sending the far side's rows in their payload; takes the near ones, and gives all that come, by host."""
        wire_dtype: WireDtype = self.options.wire_dtypes.of(header.op)
        width, dtype = rows_UD.shape[1], rows_UD.dtype
        send_H, receive_H = relay.far.units.rows_H, relay.leaving.rows_H
        if wire_dtype.scales == "group":
            come = self._start_groups(rows_UD, send_H, receive_H, relay.most_back, header)
            return lambda own_UD: come(rounded_in_groups(own_UD, wire_dtype))
        arriving = self._rail.start_rows(
            lambda spans: pack(joined(rows_UD, spans), wire_dtype),
            send_H,
            receive_H,
            relay.most_back * bytes_per_row(width, wire_dtype, dtype),
            header,
        )
        open_: Callable[[Tensor], Tensor] = partial(unpack, wire_dtype=wire_dtype, hidden=width, dtype=dtype)
        return lambda own_UD: arriving.take(open_, rounded(own_UD, wire_dtype))

    def _start_groups(
        self, rows_ND: Tensor, send_H: Ints, receive_H: Ints, most: int, header: Header
    ) -> Callable[[Tensor], Tensor]:
        """Start sending other hosts' rows with the scales of their groups beside them; takes the own block."""
        wire_dtype, dtype = self.options.wire_dtypes.of(header.op), rows_ND.dtype
        far_H = self._rail.without_own(receive_H)
        leaving, pending = (
            Groups.of(np.array(sizes, np.int64), range(self.hosts.count + 1), rows_ND.device)
            for sizes in (send_H, far_H)
        )
        packed_NX, scale_GD = encode_groups(rows_ND, leaving, wire_dtype)
        most_bytes = most * bytes_per_row(rows_ND.shape[1], wire_dtype, dtype)
        packed = self._rail.start_rows(partial(joined, packed_NX), send_H, far_H, most_bytes, header)
        scales = self._rail.start(scale_GD, leaving.per_rank, pending.per_rank, header, "rows")

        def come(own_PD: Tensor) -> Tensor:
            far_ND = decode_groups(packed.take(lambda rows: rows, packed_NX[:0]), scales(), pending, dtype)
            before = sum(receive_H[: self._host])
            return torch.cat((far_ND[:before], own_PD, far_ND[before:]))

        return come

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Around what goes through the host's own group: a rank that is lost there is lost to the whole group."""
        self.channel.comm.check()
        try:
            yield
        except PeerError as error:
            self.channel.comm.failed = error
            raise


def _at_index(rows: Callable[[], Tensor]) -> Callable[..., Tensor]:
    """``rows``, or those at an index."""
    return lambda index_N=None: rows() if index_N is None else take(rows(), index_N)
