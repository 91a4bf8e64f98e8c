"""How long a product takes that is fused with the transfer before or after it, and how much of the transfer it hides.

Both are cut alike, into a chunk for each rank: rows of one peer at a time. Own rows do not travel, so they come first
where rows arrive, and last where they leave; then only one chunk's product cannot be hidden:

    transfer       | 1 | 2 | 3 |                 transfer     | 1 | 2 | 3 |
    product    | own | 1 | 2 | 3 |               product  | 1 | 2 | 3 | own |

    max(product, transfer + product / chunks) + a flag for each chunk

A product longer than its transfer hides all of it: K >= s R / 2 B (ParallelKittens, arXiv 2511.13940). What the
transfer costs the product depends on who carries it (``Transport``): copy engines and stores from a product's own tiles
take no units from it; units of their own do. Flux (2406.06858), COMET (2502.19811).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from moe_comm.errors import ConfigError
from moe_comm.plan.machine.collectives import Moved, Span, positive, share
from moe_comm.plan.machine.hardware import Accelerator, Cluster, item_bytes

SYNC_S = 832e-9
"""A flag in memory, from one unit to another: one for each chunk (ParallelKittens, on an H100)."""

GROUPED = 0.66
"""Share of a dense product's rate that a product over experts reaches where its rows are gathered by index and experts
have unequal numbers of them. Fitted on one row of Flux' MoE tables: layer 0 on H800, 32 experts, top 4, TP 8."""

Way = Literal["gather", "scatter", "exchange"]


@dataclass(frozen=True)
class Transport:
    """Who moves a fused operator's bytes inside a host. Between hosts NICs do, at their own rate.

    reach: share of the link's peak in one direction, over a switch (``Link.one_sided`` of it elsewhere).
    unit_bytes_per_s: that one of the accelerator's units moves, where units are set apart for it; None: the product
    keeps all.
    """

    name: str
    reach: float
    unit_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        share(f"transport {self.name!r}", reach=self.reach)
        if self.unit_bytes_per_s is not None:
            positive(f"transport {self.name!r}", unit_bytes_per_s=self.unit_bytes_per_s)

    def rate(self, cluster: Cluster) -> float:
        """Bytes a second inside a host, in one direction."""
        return cluster.inside.bytes_per_s * self.reach * cluster.inside.one_sided

    def units(self, cluster: Cluster) -> int:
        """That it takes from a product: as many as fill the link, at most half of all."""
        if self.unit_bytes_per_s is None:
            return 0
        wanted = math.ceil(self.rate(cluster) / self.unit_bytes_per_s)
        return min(wanted, cluster.accelerator.units // 2)


# Reach: ParallelKittens, 1 GB between H100s of 450 GB/s: copy engines 369 GB/s, TMA 350, registers 343.
COPIES = Transport("copies", 0.82)
STORES = Transport("stores", 0.78)
# Stores that add in place at the other side. Fitted on one row of ParallelKittens' table 3: GEMM+RS at K = 512.
ADDS = Transport("adds", 0.667)
# Thread blocks of their own, which gather and reduce a token's rows. Bytes of one: COMET's code takes 28 blocks for the
# 158 GB/s that an H800 gets.
UNITS = Transport("units", 0.76, 5.6e9)
TRANSPORTS = {transport.name: transport for transport in (COPIES, STORES, ADDS, UNITS)}


@dataclass(frozen=True)
class Fused:
    """Seconds of an operator and its transfer.

    seconds: fused. product_s, transfer_s: of each alone, as it goes within the fused kernel. serial_s: a kernel, then a
    collective (or the other way round). collective_s: of that collective.
    """

    seconds: float
    product_s: float
    transfer_s: float
    serial_s: float
    collective_s: float

    @property
    def hidden(self) -> float:
        """Share of the collective's time that fusing saves: 0 where fusing does not pay, 1 where nothing is seen."""
        if not self.collective_s:
            return 0.0
        return min(1.0, max(0.0, (self.serial_s - self.seconds) / self.collective_s))


@dataclass(frozen=True)
class Product:
    """``groups`` products ``[m, k] x [k, n]`` on one rank. gathered: their rows come by index, as experts' do."""

    m: float
    n: float
    k: float
    dtype: str = "bf16"
    groups: int = 1
    gathered: bool = False

    def seconds(self, gpu: Accelerator) -> float:
        found = gpu.gemm_seconds(self.m, self.n, self.k, self.dtype, self.groups)
        return found / GROUPED if self.gathered else found


def overlapped(product_s: float, transfer_s: float, chunks: int, sync_s: float = SYNC_S) -> float:
    """Seconds of a product in ``chunks`` equal chunks, all but one of which travel, before or after.

    In one chunk nothing overlaps. Raises ConfigError for fewer.
    """
    if chunks < 1:
        raise ConfigError(f"an operator is cut into at least one chunk, got {chunks}")
    if not transfer_s:
        return product_s
    return max(product_s, transfer_s + product_s / chunks) + chunks * sync_s


def fused(
    cluster: Cluster,
    span: Span,
    product: Product,
    way: Way,
    num_bytes: float,
    transport: Transport,
    *,
    cut: float | None = None,
    local_bytes: float = 0.0,
    tail_bytes: float = 0.0,
) -> Fused:
    """A product fused with the transfer that feeds it, or that takes its result away.

    Args:
        span: of the ranks that talk.
        way: "gather" (then the product), the product then "scatter", or an "exchange" on either side, as dispatch and
            combine do.
        num_bytes: as the collective counts them: that each rank has after a gather, brings to a reduce-scatter, sends
            to all ranks in an exchange.
        cut: rows, or columns, that are cut into chunks, of at least a tile each; None: the product's rows.
        local_bytes: read and written in memory beside the transfer, by what carries it: rows that are put in order.
        tail_bytes: read and written when both are done: parts of other ranks that are summed.

    Raises:
        ConfigError: negative sizes or an unknown dtype.
    """
    if min(num_bytes, local_bytes, tail_bytes) < 0:
        raise ConfigError(f"bytes must not be negative, got {num_bytes}, {local_bytes}, {tail_bytes}")
    gpu = cluster.accelerator
    moved = _collective(cluster, span, way, num_bytes)
    alone = product.seconds(gpu)
    serial = alone + moved.seconds
    if local_bytes:
        serial += gpu.launch_s + gpu.memory_seconds(local_bytes)
    if not moved.seconds:
        return Fused(serial, alone, 0.0, serial, 0.0)
    tiles = int((product.m if cut is None else cut) // min(tile.rows for tile in gpu.tiles))
    chunks = max(1, min(span.ranks, tiles))
    product_s = product.seconds(_without(gpu, transport.units(cluster)))
    transfer_s = max(_carried(cluster, span, moved, transport), gpu.memory_seconds(local_bytes))
    seconds = overlapped(product_s, transfer_s, chunks)
    if tail_bytes:
        seconds += gpu.launch_s + gpu.memory_seconds(tail_bytes)
    return Fused(seconds, product_s, transfer_s, serial, moved.seconds)


def gather_product(cluster: Cluster, span: Span, product: Product, transport: Transport = COPIES) -> Fused:
    """All ranks' rows ``[m, k]`` are gathered, each rank multiplies all of them (Flux' AG+GEMM)."""
    return fused(cluster, span, product, "gather", product.m * product.k * _size(product), transport)


def product_scatter(cluster: Cluster, span: Span, product: Product, transport: Transport = STORES) -> Fused:
    """Each rank's ``[m, n]`` are summed and dealt out by rows (GEMM+RS).

    Without adding stores each rank's part lands beside the others' and is summed at the end.
    """
    brought = product.m * product.n * _size(product)
    tail = 0.0 if transport is ADDS else brought * (1 + 1 / span.ranks)
    return fused(cluster, span, product, "scatter", brought, transport, tail_bytes=tail)


def dispatch_product(
    cluster: Cluster, span: Span, product: Product, num_bytes: float, way: Way, transport: Transport = COPIES
) -> Fused:
    """Tokens come to their experts ("exchange"), or all tokens to all ("gather"), which multiply them as they come."""
    return fused(cluster, span, replace(product, gathered=True), way, num_bytes, transport)


def product_combine(
    cluster: Cluster, span: Span, product: Product, num_bytes: float, way: Way, transport: Transport = UNITS
) -> Fused:
    """Experts' rows go back ("exchange"), or are summed by token and dealt out ("scatter"); num_bytes: of that.

    Before a scatter a token's rows are read and reduced on the rank; what comes from other ranks is summed at the end.
    """
    rows = product.groups * product.m * product.n * _size(product)
    local = rows if way == "scatter" else 0.0
    tail = num_bytes * (1 + 1 / span.ranks)
    return fused(
        cluster,
        span,
        replace(product, gathered=True),
        way,
        num_bytes,
        transport,
        cut=product.n,  # every expert makes its first columns first (COMET)
        local_bytes=local,
        tail_bytes=tail,
    )


def _size(product: Product) -> int:
    """Bytes of an element that travels: activations stay in bf16 beside fp8 products."""
    return item_bytes(product.dtype)


def _collective(cluster: Cluster, span: Span, way: Way, num_bytes: float) -> Moved:
    ways = {"gather": cluster.all_gather, "scatter": cluster.reduce_scatter, "exchange": cluster.all_to_all}
    if way not in ways:
        raise ConfigError(f"a fused operator's way is one of {', '.join(ways)}; got {way!r}")
    return ways[way](num_bytes, span)


def _carried(cluster: Cluster, span: Span, moved: Moved, transport: Transport) -> float:
    """Seconds in which one rank's bytes travel, each kind of link on its own."""
    network, hop = cluster.network, cluster.inside.latency_s
    taken = [moved.inside / transport.rate(cluster), moved.across / network.across.rate]
    if moved.between:
        taken += [moved.between / network.between[part.pod].rate for part in span.parts]
        hop = max(network.between[part.pod].latency_s for part in span.parts)
    return max(taken) + span.ranks * hop


@lru_cache(maxsize=256)
def _without(gpu: Accelerator, units: int) -> Accelerator:
    """The accelerator with so many units fewer, and the rates of those that stay."""
    if not units:
        return gpu
    left = gpu.units - units
    return replace(gpu, units=left, flops={dtype: rate * left / gpu.units for dtype, rate in gpu.flops.items()})
