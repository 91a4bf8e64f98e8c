"""Machine descriptions: the time of a matrix product on an accelerator, and of a collective on a cluster.

Descriptions hold numbers from data sheets (``hardware_table``) or measured numbers from a file, so no accelerator is
needed. Constants belong to an accelerator or a link, never to a model or a mapping.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moe_comm.errors import ConfigError
from moe_plan.machine import collectives
from moe_plan.machine.collectives import (
    CollectiveCost,
    GroupSpan,
    Link,
    Network,
    PodRanks,
    check_integer,
    check_positive,
    check_share,
)

BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
"""Bytes of an element, by dtype."""


def item_bytes(dtype: str) -> int:
    """Return the bytes of a stored or transferred element. With fp8, only operands of matrix products are fp8."""
    return BYTES["bf16" if dtype == "fp8" else dtype]


@dataclass(frozen=True)
class GemmTile:
    """An output tile of a GEMM that one unit computes at a time, in either orientation.

    efficiency: share of the accelerator's best rate. Smaller tiles load more operands per operation.
    """

    rows: int
    columns: int
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        owner = f"tile {self.rows} x {self.columns}"
        check_integer(owner, rows=self.rows, columns=self.columns)
        check_share(owner, efficiency=self.efficiency)


@dataclass(frozen=True)
class Accelerator:
    """A GPU, or the cores of one CPU rank.

    flops: dense peak FLOP/s by dtype ("fp32", "bf16", "fp8"). efficiency: share of the peak that the best GEMM reaches,
        for the same dtypes.
    units: SMs, CUs or cores over which the tiles of a GEMM are distributed. tiles: the available tile sizes.
    fill_k: time to fill a tile's pipeline and to write its result, in columns of K.
    memory_bytes: available to a process. memory_bytes_per_s: peak bandwidth. memory_reach: share that kernels reach.
    launch_s: launch time of a kernel.
    attention_forward, attention_backward: share of ``flops`` that fused attention reaches.
    sustained: rate of GEMMs and attention within a training step, relative to running alone. Clocks drop with power,
        operands are not cached, and kernels do not start back to back.
    shared: number of ranks per core. Rates apply while all ranks compute, and are up to ``shared`` times higher while
        other ranks wait.
    accumulate: memory traffic per byte of a weight gradient to add it to that of earlier micro-batches, after its GEMM.
        0: the GEMM accumulates.
    grouped: rate of a GEMM over experts with unequal numbers of rows, relative to a dense GEMM.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    efficiency: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bytes_per_s: float
    units: int
    tiles: tuple[GemmTile, ...]
    fill_k: int = 64
    memory_reach: float = 0.9
    launch_s: float = 3e-6
    attention_forward: float = 0.6
    attention_backward: float = 0.5
    sustained: float = 1.0
    shared: float = 1.0
    accumulate: float = 0.0
    grouped: float = 1.0

    def __post_init__(self) -> None:
        owner = f"accelerator {self.name!r}"
        if unknown := sorted(set(self.flops) - set(BYTES)):
            raise ConfigError(f"{owner}: unknown dtype {unknown[0]!r}; known: {', '.join(BYTES)}")
        if not self.flops or set(self.flops) != set(self.efficiency):
            raise ConfigError(
                f"{owner}: flops and efficiency must have the same dtypes, at least one; "
                f"got {sorted(self.flops)} and {sorted(self.efficiency)}"
            )
        check_positive(owner, **{f"flops of {dtype}": value for dtype, value in self.flops.items()})
        check_share(owner, **{f"efficiency of {dtype}": value for dtype, value in self.efficiency.items()})
        check_positive(owner, memory_bytes=self.memory_bytes, memory_bytes_per_s=self.memory_bytes_per_s)
        check_positive(owner, launch_s=self.launch_s)
        check_integer(owner, units=self.units)
        check_integer(owner, 0, fill_k=self.fill_k)
        check_share(owner, memory_reach=self.memory_reach, sustained=self.sustained, grouped=self.grouped)
        check_share(owner, attention_forward=self.attention_forward, attention_backward=self.attention_backward)
        if not 1 <= self.shared < math.inf:
            raise ConfigError(f"{owner}: shared must be a finite number of at least 1; got {self.shared!r}")
        if not 0 <= self.accumulate < math.inf:
            raise ConfigError(f"{owner}: accumulate must be a finite number of at least 0; got {self.accumulate!r}")
        if not self.tiles:
            raise ConfigError(f"{owner}: tiles must not be empty")

    def peak(self, dtype: str) -> float:
        """Return the dense peak FLOP/s. Raises ConfigError if the accelerator does not support ``dtype``."""
        try:
            return self.flops[dtype]
        except KeyError:
            raise ConfigError(
                f"accelerator {self.name!r} does not support products in {dtype!r}; it supports {', '.join(self.flops)}"
            ) from None

    def gemm_seconds(self, m: float, n: float, k: float, dtype: str, groups: int = 1, *, uneven: bool = False) -> float:
        """Return the seconds of ``groups`` products ``[m, k] x [k, n]`` in one kernel.

        ``m`` is the number of rows of each group. With ``uneven`` it is the mean over the groups, and the last tile of
        a group is half full on average. Tiles are distributed over the units in complete rounds, and each costs
        ``fill_k`` columns more than K. The fastest tile size is chosen, as libraries do, and K is split if there are
        too few tiles. The result is at least the time to read the inputs and to write the output. fp8 products write
        bf16.
        """
        peak = self.peak(dtype)
        if not (m >= 0 and n >= 0 and k >= 0 and groups >= 0 and math.isfinite(m * n * k * groups)):
            raise ConfigError(
                f"sizes of a product must be finite and not negative; got {m} x {k} x {n}, {groups} groups"
            )
        if not m * n * k * groups:
            return self.launch_s
        unit_rate = peak * self.efficiency[dtype] / self.units
        compute_s = math.inf
        for tile in self.tiles:
            for rows, columns in {(tile.rows, tile.columns), (tile.columns, tile.rows)}:
                row_tiles = m / rows + 0.5 if uneven else math.ceil(m / rows)
                tiles = math.ceil(groups * row_tiles) * math.ceil(n / columns)
                splits = max(1, min(self.units // tiles, int(k) // (8 * self.fill_k or 1))) if groups == 1 else 1
                rounds = math.ceil(tiles * splits / self.units)
                seconds = rounds * 2 * rows * columns * (k / splits + self.fill_k) / (unit_rate * tile.efficiency)
                if splits > 1:  # partial sums are written in fp32 and read again
                    seconds += self.memory_seconds(2 * BYTES["fp32"] * splits * m * n)
                compute_s = min(compute_s, seconds)
        item_size = BYTES[dtype]
        traffic = groups * ((m * k + k * n) * item_size + m * n * max(item_size, BYTES["bf16"]))
        return self.launch_s + max(compute_s, self.memory_seconds(traffic))

    def memory_seconds(self, num_bytes: float) -> float:
        """Return the seconds to read and write ``num_bytes`` in total, without the launch."""
        return num_bytes / (self.memory_bytes_per_s * self.memory_reach)

    def attention_seconds(self, flops: float, dtype: str, backward: bool = False) -> float:
        """Return the seconds of fused attention with ``flops`` (two products in forward, five in backward)."""
        share = self.attention_backward if backward else self.attention_forward
        return self.launch_s + flops / (self.peak(dtype) * share)


@dataclass(frozen=True)
class Pod:
    """Consecutive hosts with the same kind of link between them."""

    hosts: int
    link: Link

    def __post_init__(self) -> None:
        check_integer("pod", hosts=self.hosts)


@dataclass(frozen=True)
class Cluster:
    """``gpus`` accelerators, ``host_size`` on each host, in order: rank r is on host ``r // host_size``.

    inside, between: links inside a host and between hosts. pods: hosts with different kinds of links (Holmes, arXiv
    2312.03549). Hosts of one pod use its link, hosts of different pods use ``across``, by default ``between``.
    start_s: time before a collective sends anything, for its kernel launch and to find its peers. direct: ranks of a
    host write rows into each other's memory; the cost of an all-to-all within a host is that of these writes.
    """

    accelerator: Accelerator
    gpus: int
    host_size: int
    inside: Link
    between: Link
    pods: tuple[Pod, ...] = ()
    across: Link | None = None
    start_s: float = 8.4e-6  # NCCL's base of a ring, src/graph/tuning.cc
    direct: bool = False

    def __post_init__(self) -> None:
        check_integer("cluster", gpus=self.gpus, host_size=self.host_size)
        check_positive("cluster", start_s=self.start_s)
        if self.pods and sum(pod.hosts for pod in self.pods) != self.hosts:
            raise ConfigError(
                f"the pods have {[pod.hosts for pod in self.pods]} hosts, which do not add up to the cluster's "
                f"{self.hosts} ({self.gpus} accelerators, {self.host_size} per host)"
            )
        if self.across is not None and len(self.pods) < 2:
            raise ConfigError("across (the link between pods) needs at least two pods")

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.host_size)

    @cached_property
    def network(self) -> Network:
        """The links, for ``moe_plan.machine.collectives``."""
        between = tuple(pod.link for pod in self.pods) or (self.between,)
        return Network(self.inside, between, self.across or self.between, self.start_s)

    def span(self, ranks: Iterable[int]) -> GroupSpan:
        """Return the location of a group of ranks. Raises ConfigError for no, repeated, or non-existent ranks.

        The time is proportional to the number of ranks, so keep the result for groups that are used often.
        """
        group = np.sort(ranks if isinstance(ranks, np.ndarray) else np.array(list(ranks)))
        if (
            not group.size
            or group.ndim != 1
            or group.dtype.kind not in "iu"
            or group[0] < 0
            or group[-1] >= self.gpus
            or (np.diff(group) == 0).any()
        ):
            raise ConfigError(
                f"a group must hold different ranks from 0 to {self.gpus - 1}, at least one; "
                f"got {group[:8].tolist()}{' ...' if group.size > 8 else ''}"
            )
        hosts, counts = np.unique(group // self.host_size, return_counts=True)
        ends = np.cumsum([pod.hosts for pod in self.pods] or [self.hosts])
        pods = np.searchsorted(ends, hosts, side="right")
        parts = []
        for pod in np.unique(pods).tolist():
            per_host = counts[pods == pod]  # ranks of the group on each host of the pod
            parts.append(PodRanks(pod, len(per_host), int(per_host.sum()), int(per_host.min()), int(per_host.max())))
        return GroupSpan(tuple(parts))

    def free_share(self, span: GroupSpan) -> float:
        """Return the share of a transfer over ``span`` during which all cores can compute (``Link.processor``)."""
        return 1 - (self.between if span.hosts > 1 else self.inside).processor

    def all_gather(self, num_bytes: float, group: GroupSpan | Iterable[int]) -> CollectiveCost:
        """Return the cost of an all-gather. ``num_bytes``: the gathered result on each rank."""
        return collectives.ring(self.network, num_bytes, self._span(group), rounds=1)

    def reduce_scatter(self, num_bytes: float, group: GroupSpan | Iterable[int]) -> CollectiveCost:
        """Return the cost of a reduce-scatter. ``num_bytes``: the input of each rank."""
        return collectives.ring(self.network, num_bytes, self._span(group), rounds=1)

    def all_reduce(self, num_bytes: float, group: GroupSpan | Iterable[int]) -> CollectiveCost:
        """Return the cost of an all-reduce. ``num_bytes``: the input of each rank."""
        return collectives.ring(self.network, num_bytes, self._span(group), rounds=2)

    def all_to_all(self, num_bytes: float, group: GroupSpan | Iterable[int]) -> CollectiveCost:
        """Return the cost of an all-to-all. ``num_bytes``: sent by each rank to all ranks, including itself."""
        return collectives.all_to_all(self.network, num_bytes, self._span(group))

    def send(self, num_bytes: float, group: GroupSpan | Iterable[int]) -> CollectiveCost:
        """Return the cost of sending ``num_bytes`` between the two ranks of a group."""
        return collectives.send(self.network, num_bytes, self._span(group))

    def _span(self, group: GroupSpan | Iterable[int]) -> GroupSpan:
        return group if isinstance(group, GroupSpan) else self.span(group)
