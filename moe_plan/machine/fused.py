"""Time of a GEMM that is fused with the transfer of its input or output, and the share of the transfer that is hidden.

Both are divided into one chunk for each rank. The rank's own rows are not transferred. They are computed first if rows
are received and last if rows are sent, so the GEMM of only one chunk cannot overlap:

    transfer       | 1 | 2 | 3 |                 transfer     | 1 | 2 | 3 |
    GEMM       | own | 1 | 2 | 3 |               GEMM     | 1 | 2 | 3 | own |

    max(gemm, transfer + gemm / chunks) + a flag for each chunk

A GEMM hides its transfer completely if it takes longer: if K >= s R / (2 B), with s bytes per element, a GEMM rate of R
FLOP/s and a link rate of B bytes/s (ParallelKittens, arXiv 2511.13940). The ``Transport`` determines how much the GEMM
slows down. Copy engines and stores from the GEMM's own tiles take no units (SMs) from it; dedicated units do. Flux
(arXiv 2406.06858) and COMET (arXiv 2502.19811) are such kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from moe_comm.errors import ConfigError
from moe_plan.machine.collectives import CollectiveCost, GroupSpan, check_positive, check_share
from moe_plan.machine.hardware import Accelerator, Cluster

SYNC_S = 832e-9
"""Time to signal a flag in memory from one unit to another, once per chunk (ParallelKittens, on an H100)."""

GROUPED = 0.66
"""Rate of a GEMM over experts with gathered rows and unequal numbers of them, relative to a dense GEMM. Fitted on one
row of Flux' MoE tables: layer 0 on H800, 32 experts, top 4, TP 8."""

CollectiveKind = Literal["gather", "scatter", "exchange"]


@dataclass(frozen=True)
class Transport:
    """A mechanism that moves the bytes of a fused operator inside a host. Between hosts, NICs move them at their rate.

    reach: share of the link's peak in one direction over a switch; elsewhere multiplied with ``Link.one_sided``.
    unit_bytes_per_s: rate of one of the accelerator's units that are dedicated to the transfer. None: no unit is.
    """

    name: str
    reach: float
    unit_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        check_share(f"transport {self.name!r}", reach=self.reach)
        if self.unit_bytes_per_s is not None:
            check_positive(f"transport {self.name!r}", unit_bytes_per_s=self.unit_bytes_per_s)

    def rate(self, cluster: Cluster) -> float:
        """Return the bytes per second inside a host in one direction."""
        return cluster.inside.bytes_per_s * self.reach * cluster.inside.one_sided

    def units(self, cluster: Cluster) -> int:
        """Return the number of dedicated units: as many as saturate the link, at most half of all."""
        if self.unit_bytes_per_s is None:
            return 0
        return min(math.ceil(self.rate(cluster) / self.unit_bytes_per_s), cluster.accelerator.units // 2)


# Reach: ParallelKittens, 1 GB between H100s of 450 GB/s: copy engines 369 GB/s, TMA 350, registers 343.
COPIES = Transport("copies", 0.82)
STORES = Transport("stores", 0.78)


@dataclass(frozen=True)
class FusedCost:
    """Time of an operator and its transfer.

    seconds: fused kernel. gemm_s, transfer_s: GEMM and transfer inside the fused kernel. serial_s: without fusion, a
    kernel and a collective one after the other. collective_s: that collective alone.
    """

    seconds: float
    gemm_s: float
    transfer_s: float
    serial_s: float
    collective_s: float

    @property
    def hidden(self) -> float:
        """Share of the collective's time that fusion saves: 0 if fusion does not help, 1 if the transfer is hidden."""
        if not self.collective_s:
            return 0.0
        return min(1.0, max(0.0, (self.serial_s - self.seconds) / self.collective_s))


@dataclass(frozen=True)
class Gemm:
    """``groups`` products ``[m, k] x [k, n]`` on one rank. gathered: rows are gathered by index, as for experts."""

    m: float
    n: float
    k: float
    dtype: str = "bf16"
    groups: int = 1
    gathered: bool = False

    def seconds(self, gpu: Accelerator) -> float:
        seconds = gpu.gemm_seconds(self.m, self.n, self.k, self.dtype, self.groups)
        return seconds / GROUPED if self.gathered else seconds


def overlapped(gemm_s: float, transfer_s: float, chunks: int, sync_s: float = SYNC_S) -> float:
    """Return the seconds of a GEMM in ``chunks`` equal chunks that overlaps with the transfer of all chunks but one.

    ``sync_s``: time to signal a flag per chunk. Raises ConfigError for less than one chunk. One chunk cannot overlap.
    """
    if chunks < 1:
        raise ConfigError(f"an operator needs at least one chunk; got {chunks}")
    if not transfer_s:
        return gemm_s
    return max(gemm_s, transfer_s + gemm_s / chunks) + chunks * sync_s


def fused(
    cluster: Cluster,
    span: GroupSpan,
    gemm: Gemm,
    collective: CollectiveKind,
    num_bytes: float,
    transport: Transport,
    *,
    cut: float | None = None,
    memory_bytes: float = 0.0,
    tail_bytes: float = 0.0,
) -> FusedCost:
    """Return the cost of a GEMM that is fused with the transfer of its input or output.

    Args:
        span: the communicating ranks.
        collective: "gather" before the GEMM, "scatter" after it, or "exchange" on either side (dispatch and combine).
        num_bytes: size as for the collective: gathered result, input of a reduce-scatter, or bytes that a rank sends.
        cut: number of rows or columns to divide into chunks of at least one tile. None: the rows of the GEMM.
        memory_bytes: bytes that the transport reads and writes in memory during the transfer, to sort rows.
        tail_bytes: bytes read and written after both, to sum the contributions of other ranks.

    Raises:
        ConfigError: a size is negative or the dtype is unknown.
    """
    if min(num_bytes, memory_bytes, tail_bytes) < 0:
        raise ConfigError(f"bytes must not be negative; got {num_bytes}, {memory_bytes}, {tail_bytes}")
    gpu = cluster.accelerator
    cost = _collective(cluster, span, collective, num_bytes)
    gemm_alone = gemm.seconds(gpu)
    serial = gemm_alone + cost.seconds
    if memory_bytes:
        serial += gpu.launch_s + gpu.memory_seconds(memory_bytes)
    if not cost.seconds:
        return FusedCost(serial, gemm_alone, 0.0, serial, 0.0)
    tiles = int((gemm.m if cut is None else cut) // min(tile.rows for tile in gpu.tiles))
    chunks = max(1, min(span.ranks, tiles))
    gemm_s = gemm.seconds(_with_fewer_units(gpu, transport.units(cluster)))
    transfer_s = max(_transfer_seconds(cluster, span, cost, transport), gpu.memory_seconds(memory_bytes))
    seconds = overlapped(gemm_s, transfer_s, chunks)
    if tail_bytes:
        seconds += gpu.launch_s + gpu.memory_seconds(tail_bytes)
    return FusedCost(seconds, gemm_s, transfer_s, serial, cost.seconds)


def transfer_seconds(cluster: Cluster, span: GroupSpan, collective: CollectiveKind, num_bytes: float) -> float:
    """Return the seconds of a transfer that is not fused. Arguments are as for ``fused``."""
    return _collective(cluster, span, collective, num_bytes).seconds


def _collective(cluster: Cluster, span: GroupSpan, collective: CollectiveKind, num_bytes: float) -> CollectiveCost:
    collectives = {"gather": cluster.all_gather, "scatter": cluster.reduce_scatter, "exchange": cluster.all_to_all}
    if collective not in collectives:
        raise ConfigError(f"collective must be one of {', '.join(collectives)}; got {collective!r}")
    return collectives[collective](num_bytes, span)


def _transfer_seconds(cluster: Cluster, span: GroupSpan, cost: CollectiveCost, transport: Transport) -> float:
    """Return the seconds of one rank's transfer. Each kind of link is used in parallel."""
    network, hop = cluster.network, cluster.inside.latency_s
    seconds = [cost.inside / transport.rate(cluster), cost.across / network.across.rate]
    if cost.between:
        seconds += [cost.between / network.between[part.pod].rate for part in span.parts]
        hop = max(network.between[part.pod].latency_s for part in span.parts)
    return max(seconds) + span.ranks * hop


@lru_cache(maxsize=256)
def _with_fewer_units(gpu: Accelerator, units: int) -> Accelerator:
    """Return the accelerator without ``units`` of its units, at the rates of the remaining ones."""
    if not units:
        return gpu
    remaining = gpu.units - units
    flops = {dtype: rate * remaining / gpu.units for dtype, rate in gpu.flops.items()}
    return replace(gpu, units=remaining, flops=flops)
