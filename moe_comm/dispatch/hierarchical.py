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

What travels between hosts does so in its payload, packed once where it leaves its host; inside a host rows are what
the payload makes of them. Rows of the own host are rounded alike. Scales of groups (``fp8_group``) are shared by up to
128 rows that go from one rank to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.dispatch.base import Dispatcher, DispatchOptions, Layout
from moe_comm.dispatch.channel import Channel
from moe_comm.dispatch.group_scales import Groups, decode_groups, encode_groups
from moe_comm.dispatch.handshake import Counts, Handshake, describe, digest, meet, settings_of
from moe_comm.dispatch.header import Header
from moe_comm.dispatch.inside_host import InsideHost, InsideLayout
from moe_comm.dispatch.payload import Payload, pack, unpack
from moe_comm.dispatch.relay_routes import (
    OPS,
    Departures,
    HostMap,
    Units,
    WireBytes,
    departures,
    expert_orders,
    units,
    way_back,
)
from moe_comm.dispatch.sums import weighted_sum
from moe_comm.errors import ConfigError, PeerError, RoutingError
from moe_comm.runtime.memory import take
from moe_comm.runtime.shared import host_word, native_is_built
from moe_comm.topology import ExpertPlacement


@dataclass(frozen=True)
class RelayLayout:
    """One dispatch, as this rank sees it: what leaves it, what it relays, and the rows of its experts.

    copies_H, slots_H: tokens and slots that came from each host to be relayed; relayed: what they are on this host.
    orders: see ``expert_orders``. inside: of the dispatch on this host.
    """

    leaving: Departures
    copies_H: tuple[int, ...]
    slots_H: tuple[int, ...]
    relayed: Units
    orders: tuple[Tensor, Tensor] | None
    inside: InsideLayout


class HierarchicalDispatcher(Dispatcher):
    """Several hosts with equal numbers of ranks; any device. Construction is collective over ``group``.

    Args:
        hosts: a number for each rank, equal for ranks of one host; found out if not given.

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
    ) -> None:
        super().__init__(placement, group, rank, options)
        self.channel = Channel(group, rank, self.world, self.options.timeout_s)
        fault = None
        if hosts is not None and len(hosts) != self.world:
            fault = ConfigError(f"hosts must have a number for each of the {self.world} ranks; got {len(hosts)}")
        same = settings_of(self) | {"hosts": digest(None if hosts is None else tuple(hosts))}
        told = {"host": host_word(), "native": int(native_is_built())}
        found = meet(self.channel, group, f"the {self.name} dispatcher", same, told, fault)
        self.hosts = HostMap.of(found["host"] if hosts is None else hosts)
        shared = all(found["native"]) and all(
            len({found["host"][member] for member in self.hosts.members(host)}) == 1 for host in range(self.hosts.count)
        )
        self.wire_bytes = dict.fromkeys(OPS, WireBytes())
        self._host = self.hosts.host(rank)
        self._experts = self.hosts.experts(placement)
        self._handshake = Handshake(self.channel, placement)
        inner = self.hosts.inside(placement, self._host)
        self._inside = InsideHost(inner, group, self.hosts, rank, self.options, shared)

    def _routing_fault(self, ids_TK: Tensor) -> RoutingError | None:
        return None  # counted with the slots, and told with the counts

    # --- the three primitives ---

    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, Layout]:
        counts = self._handshake.exchange(header, ids_TK, x_TD.device)
        top_k = ids_TK.shape[1]
        from_host_H, slots_H = self._slots(counts)
        way = way_back(self.options.deterministic, x_TD.dtype, self.options.payloads)
        leaving = departures(ids_TK, self._experts, slots_H, way)
        copies_H = self._tell(leaving.copies_H, describe(header))
        ids_coming = self._rail(leaving.ids_CK, leaving.copies_H, copies_H, header, "ids")
        x_coming = self._carry(x_TD, leaving.token_C, leaving.copies_H, copies_H, header)
        relayed = units(ids_coming().long(), copies_H, from_host_H, way)
        x_PD = x_coming()
        x_UD = x_PD if relayed.token_U is None else take(x_PD, relayed.token_U)
        inner = replace(header, top_k=relayed.ids_UK.shape[1])
        with self._alive():
            arrived_RD, inside = self._inside.send(x_UD, relayed.ids_UK, inner)
        own = self.local_experts
        orders = expert_orders(counts.rows_WE, own, self.hosts, x_TD.device)
        layout = Layout(
            num_tokens=x_TD.shape[0],
            top_k=top_k,
            hidden=x_TD.shape[1],
            dtype=x_TD.dtype,
            device=x_TD.device,
            rows_per_expert=tuple(counts.rows_WE[:, own.start : own.stop].sum(0).tolist()),
            num_rows=arrived_RD.shape[0],
            num_dropped=counts.num_dropped,
            label=header.label,
            state=RelayLayout(leaving, copies_H, from_host_H, relayed, orders, inside),
            call=header.seq,
        )
        return arrived_RD if orders is None else take(arrived_RD, orders[0]), layout

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, layout: Layout, header: Header) -> Tensor:
        self._agree(header, rows_RD.device)
        relay: RelayLayout = layout.state
        leaving, relayed = relay.leaving, relay.relayed
        weighted = relayed.token_U is None or relayed.lead_S is not None  # by the relay: all slots, or those in front
        weights_UK = None
        if weights_TK is not None and weighted:
            weights_UK = self._relay_weights(weights_TK, relay, header, relayed.lead_S)
            ones = leaving.lead_TK
            weights_TK = None if ones is None else weights_TK.masked_fill(ones, 1.0)
        with self._alive():
            rows_UD = self._inside.sum(
                self._as_arrived(rows_RD, relay), weights_UK, relay.inside, self._inner(header, relay)
            )
        rows_XD = self._carry(rows_UD, None, relayed.rows_H, leaving.rows_H, header)()
        return weighted_sum(rows_XD, leaving.place_TX, weights_TK)

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, layout: Layout, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        self._agree(header, grad_TD.device)
        relay: RelayLayout = layout.state
        leaving, relayed = relay.leaving, relay.relayed
        weights_UK = self._relay_weights(weights_TK, relay, header)
        grad_UD = self._carry(grad_TD, leaving.token_C, leaving.copies_H, relay.copies_H, header)()
        if relayed.token_U is not None:
            grad_UD = take(grad_UD, relayed.token_U)
        rows = None if rows_RD is None else self._as_arrived(rows_RD, relay)
        with self._alive():
            grad_RD, dots_UK = self._inside.spread(grad_UD, rows, weights_UK, relay.inside, self._inner(header, relay))
        if relay.orders is not None:
            grad_RD = take(grad_RD, relay.orders[0])
        if dots_UK is None:
            return grad_RD, None
        dots_S = self._rail(dots_UK.flatten()[relayed.slot_S], relay.slots_H, leaving.slots_H, header, "weights")()
        dots = dots_S.new_zeros(layout.num_tokens * layout.top_k)
        dots[leaving.slot_S] = dots_S
        return grad_RD, dots.view(layout.num_tokens, layout.top_k)

    # --- the parts of them ---

    def _agree(self, header: Header, device: torch.device) -> None:
        if self.options.checked:
            self._handshake.exchange(header, None, device)

    def _inner(self, header: Header, relay: RelayLayout) -> Header:
        return replace(header, top_k=relay.relayed.ids_UK.shape[1])

    def _slots(self, counts: Counts) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Slots that this rank relays for each host, and those that it has on each."""
        first = self._experts
        here = slice(first[self._host], first[self._host + 1])
        relayed = tuple(int(counts.rows_WE[rank, here].sum()) for rank in self.hosts.rail(self.rank))
        own = counts.rows_WE[self.rank]
        return relayed, tuple(int(own[lo:hi].sum()) for lo, hi in pairwise(first))

    def _tell(self, copies_H: tuple[int, ...], doing: str) -> tuple[int, ...]:
        """How many copies come from each host."""
        told = torch.tensor(copies_H).to(self.channel.control_device)
        copies_WH = self.channel.all_gather(told, doing).cpu()
        return tuple(int(copies_WH[rank, self._host]) for rank in self.hosts.rail(self.rank))

    def _as_arrived(self, rows_RD: Tensor, relay: RelayLayout) -> Tensor:
        """Rows in the order of the dispatch on this host, where its ranks can read them."""
        if relay.orders is None:
            return rows_RD
        out_RD = self._inside.empty_rows(rows_RD.shape[0], rows_RD.shape[1], rows_RD.dtype, rows_RD.device)
        return torch.index_select(rows_RD, 0, relay.orders[1], out=out_RD)

    def _relay_weights(
        self, weights_TK: Tensor, relay: RelayLayout, header: Header, only_S: Tensor | None = None
    ) -> Tensor:
        """[U, K] weights of what this rank relays; 1 for slots that are not of ``only_S``."""
        weights_S = weights_TK.reshape(-1)[relay.leaving.slot_S]
        weights_S = self._rail(weights_S, relay.leaving.slots_H, relay.slots_H, header, "weights")()
        weights_UK = weights_S.new_zeros(relay.relayed.ids_UK.shape)
        weights_UK.view(-1)[relay.relayed.slot_S] = weights_S if only_S is None else weights_S.masked_fill(~only_S, 1.0)
        return weights_UK

    def _carry(
        self, rows_TD: Tensor, token_N: Tensor | None, send_H: Sequence[int], receive_H: Sequence[int], header: Header
    ) -> Callable[[], Tensor]:
        """Start sending rows in their payload, those of ``token_N`` if given; ordered by host, here and there."""
        payload: Payload = self.options.payloads.of(header.op)
        width, dtype = rows_TD.shape[1], rows_TD.dtype
        if payload.scales != "group":
            packed_NX = pack(rows_TD, payload)
            packed_NX = packed_NX if token_N is None else take(packed_NX, token_N)
            moving = self._rail(packed_NX, send_H, receive_H, header, "rows")
            return lambda: unpack(moving(), payload, width, dtype)
        rows_ND = rows_TD if token_N is None else rows_TD[token_N]
        leaving, coming = (
            Groups.of(np.array(sizes, np.int64), range(self.hosts.count + 1), rows_TD.device)
            for sizes in (send_H, receive_H)
        )
        packed_NX, scale_GD = encode_groups(rows_ND, leaving, payload)
        packed = self._rail(packed_NX, send_H, receive_H, header, "rows")
        scales = self._rail(scale_GD, leaving.per_rank, coming.per_rank, header, "rows")
        return lambda: decode_groups(packed(), scales(), coming, dtype)

    def _rail(
        self, tensor_N: Tensor, send_H: Sequence[int], receive_H: Sequence[int], header: Header, kind: str
    ) -> Callable[[], Tensor]:
        """Start sending parts of ``tensor_N`` to the ranks of the rail, and count what goes to other hosts.

        It is a collective of all ranks, most of whose parts are empty: any of them that is gone or late is noticed by
        all, and named as they are numbered.
        """
        away = sum(send_H) - send_H[self._host]
        sent = away * tensor_N[:1].numel() * tensor_N.element_size()  # no rows, no bytes
        self.wire_bytes[header.op] += WireBytes(**{kind: sent})
        send, receive = [0] * self.world, [0] * self.world
        for host, peer in enumerate(self.hosts.rail(self.rank)):
            send[peer], receive[peer] = send_H[host], receive_H[host]
        return self.channel.start_all_to_all(tensor_N, send, receive, describe(header))

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Around what goes through the host's own group: a rank that is lost there is lost to the whole group."""
        if self.channel.failed is not None:
            raise type(self.channel.failed)(*self.channel.failed.args)
        try:
            yield
        except PeerError as error:
            self.channel.failed = error
            raise
