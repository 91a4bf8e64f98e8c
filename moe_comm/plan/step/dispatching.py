"""What it takes to bring tokens' rows to their experts and back, by the dispatchers of ``moe_comm.dispatch``.

With b tokens of a rank, k experts a token, n ranks on H hosts that share the experts, in rows that a rank sends:

    all_to_all     each row to its expert's rank         k b (n - 1) / n, and as many back
    all_gather     each token to every rank, also of     b (n - 1); back as all_to_all, or a sum in fp32 for each token,
                                                         scattered by rank, where that is fewer bytes
    hierarchical   a copy of a token to each other host  H' b between hosts, k b (L - 1) / L inside them with L ranks
                   that has experts of it; from there    each; and as many back, for a host's rows of a token are
                   each row to its expert's rank         summed before they leave it

H' is ``hosts_reached`` less the own host. The rail of a rank, those in its own place on other hosts, receives its
copies and passes them on. Tokens for the own host are dispatched meanwhile; those of other hosts when they have come,
or, overlapped, host by host as they come (DeepSeek-V3, arXiv 2412.19437, section 3.2.2).

Sums are what ``DispatchOptions(deterministic=False)`` allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from moe_comm.plan.machine import fused
from moe_comm.plan.machine.collectives import Moved, Part, Span, exchange
from moe_comm.plan.machine.hardware import Cluster
from moe_comm.plan.model.mapping import Dispatcher, Place
from moe_comm.plan.model.routing import SUM_BYTES, hosts_reached, sends_sums
from moe_comm.plan.model.shape import ModelShape

MANY = 1 << 32
"""Tokens with which a transfer takes what its bytes take, and not what its steps' latencies do."""
LESS = 0.999
"""Of all_to_all's seconds: nobody tries a dispatcher that sends as many bytes in fewer steps."""


@dataclass(frozen=True)
class Rows:
    """What a rank has to dispatch of a micro-batch. tokens: its own. even: their rows, if none is dropped. kept: share
    of them that is not. uneven: rows of the busiest rank's experts, over even. size: bytes of an element. parts: of an
    expert, on as many ranks, each of which takes part; a row goes to all parts."""

    tokens: float
    even: float
    kept: float
    uneven: float
    hidden: int
    size: int
    parts: int = 1

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.size

    def for_parts(self, parts: int) -> Rows:
        """The same where each expert is in so many parts."""
        return replace(self, even=self.even * parts, parts=parts)

    @property
    def token_bytes(self) -> float:
        return self.tokens * self.row_bytes

    @property
    def sent_bytes(self) -> float:
        return self.even * self.kept * self.row_bytes

    @property
    def busiest_bytes(self) -> float:
        return self.even * self.uneven * self.row_bytes


@dataclass(frozen=True)
class Transfer:
    """One direction. way, num_bytes: as ``fused.fused`` takes them; way None: it is not fused with a product."""

    moved: Moved
    way: fused.Way | None
    num_bytes: float


@dataclass(frozen=True)
class Dispatching:
    """There and back; backward takes the same, the other way round.

    leave, home: bytes that passes over memory read and write where the tokens are, before ``out`` and after ``back``.
    arrive, depart: the same where the experts are, after ``out`` and before ``back``, beside sorting rows by expert.
    sorted_out, sorted_back: whether rows are sorted by expert after ``out``, and back again before ``back``.
    """

    out: Transfer
    back: Transfer
    leave: float
    home: float
    arrive: float = 0.0
    depart: float = 0.0
    sorted_out: bool = True
    sorted_back: bool = True


def dispatching(
    dispatcher: Dispatcher, shape: ModelShape, cluster: Cluster, span: Span, rows: Rows, *, overlapped: bool = False
) -> Dispatching:
    """Costs of a dispatcher among the ranks of ``span``, for which nothing is lacking (``mapping.lacks``).

    Args:
        overlapped: rows that come from other hosts are passed on as they come.
    """
    if dispatcher == "all_gather":
        return _all_gather(shape, cluster, span, rows)
    if dispatcher == "hierarchical":
        return _hierarchical(shape, cluster, span, rows, overlapped)
    num_bytes = rows.busiest_bytes
    moved = Transfer(cluster.all_to_all(num_bytes, span), "exchange", num_bytes)
    home = rows.token_bytes + rows.sent_bytes
    return Dispatching(moved, moved, home, home)


def pays(dispatcher: Dispatcher, shape: ModelShape, place: Place, kept: float, uneven: float, size: int) -> bool:
    """Whether a dispatcher's transfers take less than ``all_to_all``'s where rows are many."""
    p = place.mapping.parallel
    spans = (place.spans["ep"], place.spans["etp"], place.spans["experts"])
    return dispatcher == "all_to_all" or _pays(dispatcher, shape, place.cluster, spans, (kept, uneven, p.etp, size))


@lru_cache(maxsize=1 << 14)
def _pays(
    dispatcher: Dispatcher,
    shape: ModelShape,
    cluster: Cluster,
    spans: tuple[Span, Span, Span],
    rows: tuple[float, float, int, int],
) -> bool:
    kept, uneven, etp, size = rows
    ep, parts, both = spans

    def seconds(one: Dispatcher) -> float:
        whole = one == "all_gather"
        found = Rows(MANY, MANY * shape.chosen, kept, uneven, shape.hidden, size).for_parts(etp if whole else 1)
        moves = dispatching(one, shape, cluster, both if whole else ep, found, overlapped=True)
        taken = moves.out.moved.seconds + moves.back.moved.seconds
        if whole or etp == 1:
            return taken
        full = etp * found.busiest_bytes
        return taken + cluster.all_gather_s(full, parts) + cluster.reduce_scatter_s(full, parts)

    return seconds(dispatcher) < LESS * seconds("all_to_all")


def _all_gather(shape: ModelShape, cluster: Cluster, span: Span, rows: Rows) -> Dispatching:
    every = span.ranks * rows.token_bytes
    out = Transfer(cluster.all_gather(every, span), "gather", every)
    picked = 2 * rows.busiest_bytes
    if not sends_sums("all_gather", shape, span.ranks // rows.parts, rows.size):
        num_bytes = rows.busiest_bytes
        back = Transfer(cluster.all_to_all(num_bytes, span), "exchange", num_bytes)
        home = rows.token_bytes + rows.sent_bytes
        return Dispatching(out, back, 0.0, home, arrive=picked, sorted_out=False)
    wide = SUM_BYTES / rows.size
    back = Transfer(cluster.reduce_scatter(wide * every, span), "scatter", wide * every)
    # Rows are made wide, and each is added to its token's sum, which begins as zeros.
    summed = rows.busiest_bytes * (1 + 4 * wide) + wide * every
    home = rows.token_bytes * (1 + wide)
    return Dispatching(out, back, 0.0, home, arrive=picked, depart=summed, sorted_out=False, sorted_back=False)


def _hierarchical(shape: ModelShape, cluster: Cluster, span: Span, rows: Rows, overlapped: bool) -> Dispatching:
    net, hosts, ranks = cluster.network, span.hosts, span.most
    reached = hosts_reached(shape, hosts, rows.kept)
    # Rows of several ranks vary less than those of one; and no token goes to a host twice.
    uneven = 1 + (rows.uneven / rows.kept - 1) / math.sqrt(ranks)
    each = min(1.0, reached / hosts * uneven) * rows.token_bytes
    rail = Span(tuple(Part(part.pod, part.hosts, part.hosts, 1, 1) for part in span.parts))
    across = each * (hosts - min(part.hosts for part in span.parts))
    wire = exchange(net, rail, 0.0, tuple(each * (part.hosts - 1) for part in span.parts), across)
    host = Span((Part(span.parts[0].pod, 1, ranks, ranks, ranks),))
    passed = rows.busiest_bytes * (ranks - 1) / ranks
    near, far, both = (exchange(net, host, passed * part, (0.0,)) for part in (1 / hosts, 1 - 1 / hosts, 1.0))
    seconds = max(wire.seconds, near.seconds) + far.seconds
    if overlapped:
        seconds = min(seconds, fused.overlapped(both.seconds, wire.seconds, hosts))
    moved = Moved(seconds, wire.latency_s + far.latency_s, both.inside, wire.between, wire.across)
    one = Transfer(moved, None, 0.0)
    held = reached * rows.token_bytes
    home, relayed = rows.token_bytes + held, held + rows.sent_bytes + 2 * rows.busiest_bytes
    return Dispatching(one, one, home, home, arrive=relayed, depart=relayed)
