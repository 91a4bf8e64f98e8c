"""Cost of collectives on a cluster: seconds, and bytes sent over each kind of link.

A group is described by its ``GroupSpan``: the hosts that it covers and its ranks on each. Every rank uses its own link
between hosts (one NIC per GPU, connected in rails), so a group with four ranks on a host uses four of its NICs. The
picture shows a ring over two hosts with four ranks each. There are four such rings, which start at different ranks:

    host 0   0 -> 1 -> 2 -> 3          inside   ranks - hosts hops, over links inside a host
             ^              |          between  one hop for each host
    host 1   7 <- 6 <- 5 <- 4

Each of the four rings transfers a quarter of the bytes. The slowest link of a ring determines its rate (NCCL's cost
model, src/graph/tuning.cc: hops times latency, plus bytes over bus bandwidth). If pods of hosts have different kinds of
links (Holmes, arXiv 2312.03549), hops between pods use a third kind of link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_comm.errors import ConfigError


def check_positive(owner: str, **values: float) -> None:
    """Raise ConfigError, naming the value, unless all ``values`` are finite numbers above zero."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{owner}: {name} must be a finite number above 0, got {value!r}")


def check_integer(owner: str, least: int = 1, **values: object) -> None:
    """Raise ConfigError, naming the value, unless all ``values`` are integers of at least ``least``."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{owner}: {name} must be an integer of at least {least}; got {value!r}")


def check_share(owner: str, **values: float) -> None:
    """Raise ConfigError, naming the value, unless all ``values`` are above 0 and at most 1."""
    for name, value in values.items():
        check_positive(owner, **{name: value})
        if value > 1:
            raise ConfigError(f"{owner}: {name} must be a share of the peak, above 0 and at most 1; got {value!r}")


@dataclass(frozen=True)
class Link:
    """A kind of link, as seen by one accelerator.

    bytes_per_s: peak in one direction per accelerator. A NIC that several accelerators share counts proportionally.
    latency_s: of one hop of a collective. reach: share of the peak that large messages reach. one_sided: rate of copies
    and stores into a peer's memory, relative to the rate over a switch (``moe_plan.machine.fused``). processor:
    share of a transfer's time in which it occupies the cores that compute (sockets between CPU ranks), so that it does
    not overlap with computation.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    reach: float
    one_sided: float = 1.0
    processor: float = 0.0

    def __post_init__(self) -> None:
        owner = f"link {self.name!r}"
        check_positive(owner, bytes_per_s=self.bytes_per_s)
        check_share(owner, reach=self.reach, one_sided=self.one_sided)
        if not 0 <= self.processor <= 1:
            raise ConfigError(f"{owner}: processor must be a share from 0 to 1; got {self.processor!r}")
        if isinstance(self.latency_s, bool) or not isinstance(self.latency_s, int | float):
            raise ConfigError(f"{owner}: latency_s must be a number, got {self.latency_s!r}")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"{owner}: latency_s must be finite and not negative, got {self.latency_s!r}")

    @property
    def rate(self) -> float:
        """Bytes per second of large messages in one direction."""
        return self.bytes_per_s * self.reach


@dataclass(frozen=True)
class PodRanks:
    """The ranks of a group in one pod. fewest, most: ranks on the host with the fewest and the most of them."""

    pod: int
    hosts: int
    ranks: int
    fewest: int
    most: int


@dataclass(frozen=True)
class GroupSpan:
    """The location of a group's ranks: one ``PodRanks`` for each pod with ranks of the group."""

    parts: tuple[PodRanks, ...]

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
        """Ranks on the host with the fewest: the number of links over which rings leave a host."""
        return min(part.fewest for part in self.parts)

    @property
    def most(self) -> int:
        """Ranks on the host with the most."""
        return max(part.most for part in self.parts)


@dataclass(frozen=True)
class Network:
    """The links of a cluster. between: one for each pod. across: between pods. start_s: latency of each collective."""

    inside: Link
    between: tuple[Link, ...]
    across: Link
    start_s: float


@dataclass(frozen=True)
class CollectiveCost:
    """The cost of a collective.

    seconds: total time. latency_s: the part of it that does not depend on the size. inside, between, across: bytes sent
    by the busiest rank to ranks of its host, to other hosts of its pod, and to other pods.
    """

    seconds: float
    latency_s: float
    inside: float
    between: float
    across: float


NO_COST = CollectiveCost(0.0, 0.0, 0.0, 0.0, 0.0)


def all_to_all(net: Network, num_bytes: float, span: GroupSpan) -> CollectiveCost:
    """Return the cost of an all-to-all with equal parts.

    ``num_bytes``: sent by each rank to all ranks together, including itself. A rank sends rows for other hosts over its
    own NIC, once for each destination rank.
    """
    ranks = span.ranks
    peer_bytes = num_bytes / ranks
    return exchange(
        net,
        span,
        inside=peer_bytes * (span.most - 1),
        # A rank on the host with the fewest ranks of the group sends the most to other hosts.
        between=tuple(peer_bytes * (part.ranks - part.fewest) for part in span.parts),
        across=peer_bytes * (ranks - min(part.ranks for part in span.parts)),
    )


def exchange(
    net: Network, span: GroupSpan, inside: float, between: tuple[float, ...], across: float = 0.0
) -> CollectiveCost:
    """Return the cost of an exchange in which the busiest rank sends the given bytes over each kind of link.

    This covers unequal exchanges: imbalanced routing, or one copy for each host. ``between`` has one number for each
    part of the span.
    """
    if len(between) != span.pods:
        raise ConfigError(f"an exchange needs the bytes between hosts of each of {span.pods} pods; got {len(between)}")
    most_between = max(between)
    if span.ranks == 1 or not inside + most_between + across:
        return NO_COST
    seconds = [inside / net.inside.rate, across / net.across.rate]
    seconds += [count / net.between[part.pod].rate for count, part in zip(between, span.parts, strict=True)]
    latency = net.start_s + _tree_latency(net, span)
    return CollectiveCost(latency + max(seconds), latency, inside, most_between, across)


def send(net: Network, num_bytes: float, span: GroupSpan) -> CollectiveCost:
    """Return the cost of sending ``num_bytes`` between the two ranks of ``span``."""
    if span.ranks != 2:
        raise ConfigError(f"a transfer needs a group of 2 ranks; got {span.ranks}")
    if not num_bytes:
        return NO_COST
    kind = "across" if span.pods > 1 else "between" if span.hosts > 1 else "inside"
    link = {"across": net.across, "between": net.between[span.parts[0].pod], "inside": net.inside}[kind]
    latency = net.start_s + link.latency_s
    sent = {"inside": 0.0, "between": 0.0, "across": 0.0}
    sent[kind] = float(num_bytes)
    return CollectiveCost(latency + num_bytes / link.rate, latency, **sent)


def ring(net: Network, num_bytes: float, span: GroupSpan, rounds: int) -> CollectiveCost:
    """Return the cost of ``rounds`` passes around a ring, or of a tree if it is faster.

    One round is an all-gather of a result of ``num_bytes``, or a reduce-scatter of such inputs; two are an all-reduce.
    A tree needs one hop for each doubling of the group instead of one for each rank, at half the bandwidth. It is
    faster for small messages and many ranks.
    """
    ranks = span.ranks
    if ranks == 1 or not num_bytes:
        return NO_COST
    volume = rounds * num_bytes * (ranks - 1) / ranks
    many_hosts = [part for part in span.parts if part.hosts > 1]
    # A rank sends to a rank of its host, except in the rings in which its successor is on another host.
    inside = volume if span.hosts == 1 else volume * (span.most - 1) / span.most
    bytes_per_nic = volume / span.fewest
    between = bytes_per_nic if many_hosts else 0.0
    across = bytes_per_nic if span.pods > 1 else 0.0
    seconds = [inside / net.inside.rate, across / net.across.rate]
    seconds += [between / net.between[part.pod].rate for part in many_hosts]

    ring_latency = (ranks if span.hosts == 1 else ranks - span.hosts) * net.inside.latency_s
    for part in many_hosts:
        ring_latency += (part.hosts - (span.pods > 1)) * net.between[part.pod].latency_s
    if span.pods > 1:
        ring_latency += span.pods * net.across.latency_s
    ring_latency *= rounds * (ranks - 1) / ranks  # the link that closes the ring is not used
    tree_latency = rounds * _tree_latency(net, span)
    as_ring = (ring_latency, ring_latency + max(seconds))
    as_tree = (tree_latency, tree_latency + 2 * max(seconds))
    latency, total = min(as_ring, as_tree, key=lambda option: option[1])
    return CollectiveCost(net.start_s + total, net.start_s + latency, inside, between, across)


def _tree_latency(net: Network, span: GroupSpan) -> float:
    """Return the latency in seconds of a tree over the ranks of each host, then over hosts, then over pods."""
    between = max(_doublings(part.hosts) * net.between[part.pod].latency_s for part in span.parts)
    inside, across = _doublings(span.most), _doublings(span.pods)
    return inside * net.inside.latency_s + between + across * net.across.latency_s


def _doublings(count: int) -> int:
    return (count - 1).bit_length()
