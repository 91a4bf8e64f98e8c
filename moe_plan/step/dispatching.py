"""Cost of dispatch and combine with the dispatchers of ``moe_comm.dispatch``.

With b tokens per rank, top-k routing, and n ranks on H hosts that share the experts, a rank sends this number of rows:

    all_to_all     each row to its expert's rank         k b (n - 1) / n; the same for combine
    all_gather     each token to every rank              b (n - 1); combine as all_to_all, or a reduce-scatter of one
                                                         fp32 sum for each token if that is fewer bytes
    hierarchical   one copy of a token to each other     H' b between hosts, k b (L - 1) / L inside hosts with L ranks
                   host with experts of it, and from     each; the same for combine, which sums the rows of a token
                   there each row to its expert's rank   on each host before sending them

H' is ``hosts_reached`` without the rank's own host. A rank sends its copies to its rail (the ranks with the same index
on other hosts), which relay them. At the same time, it dispatches tokens to its own host. Tokens of other hosts are
relayed after all of them have been received or, with overlap, host by host (DeepSeek-V3, arXiv 2412.19437, section
3.2.2).

A combine that sends sums requires ``DispatchOptions(deterministic=False)``. With ``DispatchRows.deterministic``,
combine sends rows: between hosts k b (H - 1) / H with hierarchical. ``DispatchRows.wire`` scales the bytes of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from moe_comm.layers.transformer.shape import ModelShape
from moe_plan.machine import fused
from moe_plan.machine.collectives import CollectiveCost, GroupSpan, PodRanks, exchange
from moe_plan.machine.hardware import Cluster
from moe_plan.model.load import Workload
from moe_plan.model.mapping import SUM_BYTES, Dispatcher, PlacedMapping, hosts_reached, sends_sums

MANY = 1 << 32
"""A number of tokens for which latencies are negligible."""
LESS = 0.999
"""A dispatcher is tried only if its time is below this share of all_to_all's. Sending equal bytes in fewer steps does
not suffice."""


@dataclass(frozen=True)
class DispatchRows:
    """The rows of a micro-batch that a rank dispatches.

    tokens: tokens of the rank. routed: their rows if none is dropped. kept_fraction: share of the rows that is not
    dropped. imbalance: rows of the busiest rank's experts divided by ``routed``. size: bytes of an element. parts:
    number of ranks over which each expert is sharded; each row is sent to all of them. deterministic, wire: as in
    ``moe_plan.model.load.Workload``.
    """

    tokens: float
    routed: float
    kept_fraction: float
    imbalance: float
    hidden: int
    size: int
    parts: int = 1
    deterministic: bool = False
    wire: float = 1.0

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.size

    def for_parts(self, parts: int) -> DispatchRows:
        """Return the rows if each expert is sharded over ``parts`` ranks."""
        return replace(self, routed=self.routed * parts / self.parts, parts=parts)

    @property
    def token_bytes(self) -> float:
        return self.tokens * self.row_bytes

    @property
    def sent_bytes(self) -> float:
        return self.routed * self.kept_fraction * self.row_bytes

    @property
    def busiest_bytes(self) -> float:
        return self.routed * self.imbalance * self.row_bytes


@dataclass(frozen=True)
class DispatchTransfer:
    """One direction. collective, num_bytes: as for ``fused.fused``; collective None: it cannot be fused with a GEMM."""

    cost: CollectiveCost
    collective: fused.CollectiveKind | None
    num_bytes: float


@dataclass(frozen=True)
class DispatchCost:
    """Cost of dispatch and combine in forward. Backward swaps them.

    permute_bytes, unpermute_bytes: memory traffic on the tokens' rank, before dispatch and after combine.
    receive_bytes, return_bytes: memory traffic on the experts' rank, after dispatch and before combine, without sorting
    rows by expert. sort_after_dispatch, sort_before_combine: whether rows are sorted by expert, and back.
    """

    dispatch: DispatchTransfer
    combine: DispatchTransfer
    permute_bytes: float
    unpermute_bytes: float
    receive_bytes: float = 0.0
    return_bytes: float = 0.0
    sort_after_dispatch: bool = True
    sort_before_combine: bool = True


def dispatching(
    dispatcher: Dispatcher,
    shape: ModelShape,
    cluster: Cluster,
    span: GroupSpan,
    rows: DispatchRows,
    *,
    overlapped: bool = False,
) -> DispatchCost:
    """Return the cost of a dispatcher that applies to the ranks of ``span`` (``mapping.inapplicable``).

    ``overlapped``: rows from other hosts are relayed host by host.
    """
    if dispatcher == "all_gather":
        return _all_gather(shape, cluster, span, rows)
    if dispatcher == "hierarchical":
        return _hierarchical(shape, cluster, span, rows, overlapped)
    transfer = _exchanged_rows(cluster, span, rows)
    permute = rows.token_bytes + rows.sent_bytes
    return DispatchCost(transfer, transfer, permute, permute)


def _exchanged_rows(cluster: Cluster, span: GroupSpan, rows: DispatchRows) -> DispatchTransfer:
    num_bytes = rows.busiest_bytes * rows.wire
    return DispatchTransfer(cluster.all_to_all(num_bytes, span), "exchange", num_bytes)


def beats_all_to_all(dispatcher: Dispatcher, shape: ModelShape, placed: PlacedMapping, load: Workload) -> bool:
    """Return whether the transfers of a dispatcher are faster than those of ``all_to_all`` for many rows."""
    spans, p = (placed.spans["ep"], placed.spans["etp"], placed.spans["experts"]), placed.mapping.parallel
    kept_fraction, imbalance = min(1.0, load.capacity or 1.0), load.busiest(p.ep)
    rows = DispatchRows(MANY, MANY * shape.chosen, kept_fraction, imbalance, shape.hidden, load.size)
    rows = replace(rows, deterministic=load.deterministic, wire=load.wire).for_parts(p.etp)
    return dispatcher == "all_to_all" or _beats_all_to_all(dispatcher, shape, placed.cluster, spans, rows)


@lru_cache(maxsize=1 << 14)
def _beats_all_to_all(
    dispatcher: Dispatcher,
    shape: ModelShape,
    cluster: Cluster,
    spans: tuple[GroupSpan, GroupSpan, GroupSpan],
    rows: DispatchRows,
) -> bool:
    ep, parts, experts = spans
    etp = rows.parts

    def seconds(name: Dispatcher) -> float:
        gathers = name == "all_gather"
        rows_of_rank = rows.for_parts(etp if gathers else 1)
        costs = dispatching(name, shape, cluster, experts if gathers else ep, rows_of_rank, overlapped=True)
        total = costs.dispatch.cost.seconds + costs.combine.cost.seconds
        if gathers or etp == 1:
            return total
        gathered_bytes = etp * rows_of_rank.busiest_bytes
        total += cluster.all_gather(gathered_bytes, parts).seconds
        return total + cluster.reduce_scatter(gathered_bytes, parts).seconds

    return seconds(dispatcher) < LESS * seconds("all_to_all")


def _all_gather(shape: ModelShape, cluster: Cluster, span: GroupSpan, rows: DispatchRows) -> DispatchCost:
    gathered_bytes = span.ranks * rows.token_bytes
    wire_bytes = gathered_bytes * rows.wire
    dispatch = DispatchTransfer(cluster.all_gather(wire_bytes, span), "gather", wire_bytes)
    select_bytes = 2 * rows.busiest_bytes
    # With a wire dtype, combine sends rows.
    deterministic = rows.deterministic or rows.wire < 1
    if not sends_sums("all_gather", shape, span.ranks // rows.parts, rows.size, deterministic=deterministic):
        combine = _exchanged_rows(cluster, span, rows)
        unpermute = rows.token_bytes + rows.sent_bytes
        return DispatchCost(dispatch, combine, 0.0, unpermute, receive_bytes=select_bytes, sort_after_dispatch=False)
    sum_ratio = SUM_BYTES / rows.size
    sum_bytes = sum_ratio * gathered_bytes
    combine = DispatchTransfer(cluster.reduce_scatter(sum_bytes, span), "scatter", sum_bytes)
    # Rows are converted to fp32, and each is added to its token's sum, which is initialized with zeros.
    return DispatchCost(
        dispatch,
        combine,
        permute_bytes=0.0,
        unpermute_bytes=rows.token_bytes * (1 + sum_ratio),
        receive_bytes=select_bytes,
        return_bytes=rows.busiest_bytes * (1 + 4 * sum_ratio) + sum_bytes,
        sort_after_dispatch=False,
        sort_before_combine=False,
    )


def _hierarchical(
    shape: ModelShape, cluster: Cluster, span: GroupSpan, rows: DispatchRows, overlapped: bool
) -> DispatchCost:
    net, hosts, ranks = cluster.network, span.hosts, span.most
    reached = hosts_reached(shape, hosts, rows.kept_fraction)
    # The rows of several ranks vary less than those of one rank, and no token is sent to a host twice.
    imbalance = 1 + (rows.imbalance / rows.kept_fraction - 1) / math.sqrt(ranks)
    # Bytes sent to each other host: copies of tokens, or rows.
    copy_bytes = min(1.0, reached / hosts * imbalance) * rows.token_bytes
    row_bytes = rows.sent_bytes / hosts * imbalance if rows.deterministic else copy_bytes
    rail = GroupSpan(tuple(PodRanks(part.pod, part.hosts, part.hosts, 1, 1) for part in span.parts))
    host = GroupSpan((PodRanks(span.parts[0].pod, 1, ranks, ranks, ranks),))
    relayed = rows.busiest_bytes * (ranks - 1) / ranks
    own_host, other_hosts, all_hosts = (
        exchange(net, host, relayed * part, (0.0,)) for part in (1 / hosts, 1 - 1 / hosts, 1.0)
    )

    def transfer(host_bytes: float) -> DispatchTransfer:
        host_bytes *= rows.wire
        across = host_bytes * (hosts - min(part.hosts for part in span.parts))
        wire = exchange(net, rail, 0.0, tuple(host_bytes * (part.hosts - 1) for part in span.parts), across)
        seconds = max(wire.seconds, own_host.seconds) + other_hosts.seconds
        if overlapped:
            seconds = min(seconds, fused.overlapped(all_hosts.seconds, wire.seconds, hosts))
        latency = wire.latency_s + other_hosts.latency_s
        return DispatchTransfer(
            CollectiveCost(seconds, latency, all_hosts.inside, wire.between, wire.across), None, 0.0
        )

    copies_bytes = reached * rows.token_bytes
    permute, relay = rows.token_bytes + copies_bytes, copies_bytes + rows.sent_bytes + 2 * rows.busiest_bytes
    dispatch, combine = transfer(copy_bytes), transfer(row_bytes)
    return DispatchCost(dispatch, combine, permute, permute, receive_bytes=relay, return_bytes=relay)
