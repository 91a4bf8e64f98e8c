"""What collectives cost over a cluster's links: seconds, and the bytes that each kind of link carries.

A group is described by its ``Span``: how many hosts it covers and how many of its ranks each holds. Every rank drives
its own link between hosts (a NIC for each GPU, joined in rails), so a group with four ranks on a host leaves it by four
NICs. A ring over two hosts of four ranks, and one of its four copies, which start at different ranks:

    host 0   0 -> 1 -> 2 -> 3          inside   g - hosts hops, over links inside a host
             ^              |          between  one hop for each host
    host 1   7 <- 6 <- 5 <- 4

Each of the four carries a quarter of the bytes, and the slowest link on the way sets the pace (NCCL's cost model,
src/graph/tuning.cc: hops times latency, plus bytes over the bus bandwidth). Where hosts are in pods with links of
different kinds (Holmes, arXiv 2312.03549), hops between pods go over a third kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_comm.errors import ConfigError


def positive(owner: str, **values: float) -> None:
    """Raises ConfigError that names the first of ``values`` that is not a finite number above zero."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{owner}: {name} must be a finite number above 0, got {value!r}")


def share(owner: str, **values: float) -> None:
    """Raises ConfigError that names the first of ``values`` that is not above 0 and at most 1."""
    for name, value in values.items():
        positive(owner, **{name: value})
        if value > 1:
            raise ConfigError(f"{owner}: {name} is a share of the peak, above 0 and at most 1, got {value!r}")


@dataclass(frozen=True)
class Link:
    """One kind of link, as one accelerator sees it.

    bytes_per_s: peak in one direction for each accelerator: a NIC that several share counts by its part.
    latency_s: of one hop of a collective. reach: share of the peak that large messages get. one_sided: of the rate that
    copies and stores into a peer's memory get over a switch, what they get here (``moe_comm.plan.machine.fused``).
    """

    name: str
    bytes_per_s: float
    latency_s: float
    reach: float
    one_sided: float = 1.0

    def __post_init__(self) -> None:
        owner = f"link {self.name!r}"
        positive(owner, bytes_per_s=self.bytes_per_s)
        share(owner, reach=self.reach, one_sided=self.one_sided)
        if isinstance(self.latency_s, bool) or not isinstance(self.latency_s, int | float):
            raise ConfigError(f"{owner}: latency_s must be a number, got {self.latency_s!r}")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"{owner}: latency_s must be finite and not negative, got {self.latency_s!r}")

    @property
    def rate(self) -> float:
        """Bytes a second that large messages get, in one direction."""
        return self.bytes_per_s * self.reach


@dataclass(frozen=True)
class Part:
    """The ranks of a group within one pod. fewest, most: of them on one host."""

    pod: int
    hosts: int
    ranks: int
    fewest: int
    most: int


@dataclass(frozen=True)
class Span:
    """Where a group's ranks stand; one ``Part`` for each pod that it touches."""

    parts: tuple[Part, ...]

    @property
    def ranks(self) -> int:
        return sum(part.ranks for part in self.parts)

    @property
    def hosts(self) -> int:
        return sum(part.hosts for part in self.parts)

    @property
    def pods(self) -> int:
        return len(self.parts)

    @property
    def fewest(self) -> int:
        """Ranks on the host that holds the fewest: the links by which rings can leave a host."""
        return min(part.fewest for part in self.parts)

    @property
    def most(self) -> int:
        """Ranks on the host that holds the most."""
        return max(part.most for part in self.parts)


@dataclass(frozen=True)
class Network:
    """The links of a cluster. between: one for each pod. across: of different pods. start_s: of any collective."""

    inside: Link
    between: tuple[Link, ...]
    across: Link
    start_s: float


@dataclass(frozen=True)
class Moved:
    """A collective's cost. seconds: all of it, of which latency_s do not depend on its size.

    inside, between, across: bytes that the busiest rank sends over each kind of link: to ranks of its host, to other
    hosts of its pod, to other pods.
    """

    seconds: float
    latency_s: float
    inside: float
    between: float
    across: float


NOTHING = Moved(0.0, 0.0, 0.0, 0.0, 0.0)


def all_gather(net: Network, num_bytes: float, span: Span) -> Moved:
    """num_bytes: that each rank has afterwards, of which it brought ``1 / ranks``. Every rank sends the rest on."""
    return _ring(net, num_bytes, span, rounds=1)


def reduce_scatter(net: Network, num_bytes: float, span: Span) -> Moved:
    """num_bytes: that each rank brings, of which it keeps ``1 / ranks``, summed. An all-gather backwards."""
    return _ring(net, num_bytes, span, rounds=1)


def all_reduce(net: Network, num_bytes: float, span: Span) -> Moved:
    """num_bytes: that each rank brings and gets back summed: a reduce-scatter and an all-gather."""
    return _ring(net, num_bytes, span, rounds=2)


def all_to_all(net: Network, num_bytes: float, span: Span) -> Moved:
    """num_bytes: that each rank sends to all ranks together, itself among them, in equal parts.

    Each rank's rows for other hosts leave by its own NIC, once for each rank that they go to.
    """
    ranks = span.ranks
    each = num_bytes / ranks
    return exchange(
        net,
        span,
        inside=each * (span.most - 1),
        # The busiest rank of a pod is one of the host that holds the fewest of its ranks.
        between=tuple(each * (part.ranks - part.fewest) for part in span.parts),
        across=each * (ranks - min(part.ranks for part in span.parts)),
    )


def exchange(net: Network, span: Span, inside: float, between: tuple[float, ...], across: float = 0.0) -> Moved:
    """Every rank of a group with others, at once, so many bytes by the busiest rank over each kind of link.

    For exchanges that are not in equal parts: routing that prefers some ranks, or one copy for each host.
    between: bytes in each part of the span, in its order.
    """
    if len(between) != span.pods:
        raise ConfigError(f"an exchange takes bytes between hosts for each of {span.pods} parts, got {len(between)}")
    moved = max(between)
    if span.ranks == 1 or not inside + moved + across:
        return NOTHING
    taken = [inside / net.inside.rate, across / net.across.rate]
    taken += [count / net.between[part.pod].rate for count, part in zip(between, span.parts, strict=True)]
    latency = net.start_s + _tree_latency(net, span)
    return Moved(latency + max(taken), latency, inside, moved, across)


def send(net: Network, num_bytes: float, span: Span) -> Moved:
    """num_bytes from one rank to another; ``span`` holds both."""
    if span.ranks != 2:
        raise ConfigError(f"a transfer is between 2 ranks, got a group of {span.ranks}")
    if not num_bytes:
        return NOTHING
    kind = "across" if span.pods > 1 else "between" if span.hosts > 1 else "inside"
    link = {"across": net.across, "between": net.between[span.parts[0].pod], "inside": net.inside}[kind]
    latency = net.start_s + link.latency_s
    sent = {"inside": 0.0, "between": 0.0, "across": 0.0}
    sent[kind] = float(num_bytes)
    return Moved(latency + num_bytes / link.rate, latency, **sent)


def _ring(net: Network, num_bytes: float, span: Span, rounds: int) -> Moved:
    """A ring that goes round ``rounds`` times, or a tree: what is faster.

    Trees take a hop for each doubling of the group instead of one for each rank, at half the bandwidth: they win where
    bytes are few or ranks many.
    """
    ranks = span.ranks
    if ranks == 1 or not num_bytes:
        return NOTHING
    volume = rounds * num_bytes * (ranks - 1) / ranks
    many_hosts = [part for part in span.parts if part.hosts > 1]
    # A rank hands on all that passes it, except in the rings in which it is the one that leaves the host.
    inside = volume if span.hosts == 1 else volume * (span.most - 1) / span.most
    leaving = volume / span.fewest
    between = leaving if many_hosts else 0.0
    across = leaving if span.pods > 1 else 0.0
    taken = [inside / net.inside.rate, across / net.across.rate]
    taken += [between / net.between[part.pod].rate for part in many_hosts]

    hops = (ranks if span.hosts == 1 else ranks - span.hosts) * net.inside.latency_s
    for part in many_hosts:
        hops += (part.hosts - (span.pods > 1)) * net.between[part.pod].latency_s
    if span.pods > 1:
        hops += span.pods * net.across.latency_s
    hops *= rounds * (ranks - 1) / ranks  # the last link of the circle is not used
    tree = rounds * _tree_latency(net, span)
    latency, seconds = min((hops, hops + max(taken)), (tree, tree + 2 * max(taken)), key=lambda way: way[1])
    return Moved(net.start_s + seconds, net.start_s + latency, inside, between, across)


def _tree_latency(net: Network, span: Span) -> float:
    """Hops of a tree over each host's ranks, then over hosts, then over pods; seconds."""
    between = max(_doublings(part.hosts) * net.between[part.pod].latency_s for part in span.parts)
    inside, across = _doublings(span.most), _doublings(span.pods)
    return inside * net.inside.latency_s + between + across * net.across.latency_s


def _doublings(count: int) -> int:
    return (count - 1).bit_length()
