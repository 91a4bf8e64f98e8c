"""Described machines: how long an accelerator takes for a matrix product, and a cluster's links for a collective.

No accelerator is needed: descriptions are numbers from data sheets (``hardware_table``) or measured ones that a file
holds. Constants belong to an accelerator or a link, never to a model or a mapping.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moe_comm.errors import ConfigError
from moe_comm.plan.machine import collectives
from moe_comm.plan.machine.collectives import Link, Moved, Network, Part, Span, positive, share

BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
"""Of an element, by dtype."""


def item_bytes(dtype: str) -> int:
    """Of an element that is kept or moved: products alone are in fp8."""
    return BYTES["bf16" if dtype == "fp8" else dtype]


@dataclass(frozen=True)
class Tile:
    """A block of a product's output that one unit makes at a time, either way round.

    efficiency: share of the accelerator's best that it reaches: small blocks load more for each operation.
    """

    rows: int
    columns: int
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("columns", self.columns)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"tile {self.rows} x {self.columns}: {name} must be a whole number from 1, got {value!r}"
                )
        share(f"tile {self.rows} x {self.columns}", efficiency=self.efficiency)


@dataclass(frozen=True)
class Accelerator:
    """A GPU, or the cores that one CPU rank has.

    flops: dense peak by dtype ("fp32", "bf16", "fp8"), operations a second. efficiency: share of it that the best
    product reaches, by the same dtypes. units: SMs, CUs or cores, among which the tiles of a product are dealt out.
    fill_k: columns of K whose time each tile takes to fill its pipeline and to write its result.
    memory_bytes: that a process can have. memory_bytes_per_s, memory_reach: peak of memory, and share that a kernel
    gets. launch_s: of one kernel. attention_forward, attention_backward: share of ``flops`` that fused attention gets.
    sustained: of the rates of products and attention alone, what they keep within a training step: clocks fall with
    power, operands are not in the cache, and kernels do not follow each other at once.
    shared: ranks that share a core: all rates are those while all of them compute, and up to so many times higher while
    others wait. accumulate: bytes that go over memory for each of a weight's gradient, after its product, to add it to
    those of earlier micro-batches; 0: the product adds it itself. grouped: share of a dense product's rate that a
    product over experts reaches where these have unequal numbers of rows.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    efficiency: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bytes_per_s: float
    units: int
    tiles: tuple[Tile, ...]
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
            raise ConfigError(f"{owner}: no dtype {unknown[0]!r}; known: {', '.join(BYTES)}")
        if not self.flops or set(self.flops) != set(self.efficiency):
            raise ConfigError(
                f"{owner}: flops and efficiency must be given for the same dtypes, at least one; "
                f"got {sorted(self.flops)} and {sorted(self.efficiency)}"
            )
        positive(owner, **{f"flops of {dtype}": value for dtype, value in self.flops.items()})
        share(owner, **{f"efficiency of {dtype}": value for dtype, value in self.efficiency.items()})
        positive(owner, memory_bytes=self.memory_bytes, memory_bytes_per_s=self.memory_bytes_per_s)
        positive(owner, launch_s=self.launch_s)
        for name, value, least in (("units", self.units, 1), ("fill_k", self.fill_k, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{owner}: {name} must be a whole number from {least}, got {value!r}")
        share(owner, memory_reach=self.memory_reach, sustained=self.sustained, grouped=self.grouped)
        share(owner, attention_forward=self.attention_forward, attention_backward=self.attention_backward)
        if not 1 <= self.shared < math.inf:
            raise ConfigError(f"{owner}: shared must be a finite number from 1, got {self.shared!r}")
        if not 0 <= self.accumulate < math.inf:
            raise ConfigError(f"{owner}: accumulate must be a finite number from 0, got {self.accumulate!r}")
        if not self.tiles:
            raise ConfigError(f"{owner}: at least one tile is needed")

    def peak(self, dtype: str) -> float:
        """Dense peak, operations a second. Raises ConfigError if the accelerator does not have ``dtype``."""
        try:
            return self.flops[dtype]
        except KeyError:
            raise ConfigError(
                f"accelerator {self.name!r} has no products in {dtype!r}; it has {', '.join(self.flops)}"
            ) from None

    def gemm_seconds(self, m: float, n: float, k: float, dtype: str, groups: int = 1, *, uneven: bool = False) -> float:
        """Seconds for ``groups`` products ``[m, k] x [k, n]`` in one kernel; m: rows of each group, or, ``uneven``, of
        the mean of groups, whose last tiles then are half full on average.

        Tiles are dealt out to the units in whole rounds (the last may leave most of them idle), each takes ``fill_k``
        more than its K, and the tile that ends first is taken, as libraries do; with too few tiles K is split. Never
        less than reading the inputs and writing the output once takes. fp8 products write bf16.
        """
        peak = self.peak(dtype)
        if not (m >= 0 and n >= 0 and k >= 0 and groups >= 0 and math.isfinite(m * n * k * groups)):
            raise ConfigError(
                f"a product's sizes must be finite and not negative, got {m} x {k} x {n}, {groups} groups"
            )
        if not m * n * k * groups:
            return self.launch_s
        one = peak * self.efficiency[dtype] / self.units
        computing = math.inf
        for tile in self.tiles:
            for rows, columns in {(tile.rows, tile.columns), (tile.columns, tile.rows)}:
                down = m / rows + 0.5 if uneven else math.ceil(m / rows)
                tiles = math.ceil(groups * down) * math.ceil(n / columns)
                splits = max(1, min(self.units // tiles, int(k) // (8 * self.fill_k or 1))) if groups == 1 else 1
                rounds = math.ceil(tiles * splits / self.units)
                seconds = rounds * 2 * rows * columns * (k / splits + self.fill_k) / (one * tile.efficiency)
                if splits > 1:  # partial sums are written in fp32 and read again
                    seconds += self.memory_seconds(2 * BYTES["fp32"] * splits * m * n)
                computing = min(computing, seconds)
        size = BYTES[dtype]
        moved = groups * ((m * k + k * n) * size + m * n * max(size, BYTES["bf16"]))
        return self.launch_s + max(computing, self.memory_seconds(moved))

    def memory_seconds(self, num_bytes: float) -> float:
        """Seconds in which a kernel reads and writes so many bytes in all, without its launch."""
        return num_bytes / (self.memory_bytes_per_s * self.memory_reach)

    def attention_seconds(self, flops: float, dtype: str, backward: bool = False) -> float:
        """Seconds for the two products of fused attention (forward), or the five of its backward; flops: of those."""
        reached = self.attention_backward if backward else self.attention_forward
        return self.launch_s + flops / (self.peak(dtype) * reached)


@dataclass(frozen=True)
class Pod:
    """Hosts that follow each other and have the same kind of link between them."""

    hosts: int
    link: Link

    def __post_init__(self) -> None:
        if isinstance(self.hosts, bool) or not isinstance(self.hosts, int) or self.hosts < 1:
            raise ConfigError(f"a pod must have a whole number of hosts from 1, got {self.hosts!r}")


@dataclass(frozen=True)
class Cluster:
    """``gpus`` accelerators, ``host_size`` on each host, in order: rank r is on host ``r // host_size``.

    inside: links of a host. between: of hosts. pods: where links between hosts are of several kinds (Holmes, arXiv
    2312.03549): hosts of one pod talk over its link, hosts of different pods over ``across``, which is ``between``
    unless it is given. start_s: before a collective moves anything: its kernel's launch and finding its peers. direct:
    ranks of a host put rows into each other's memory, and what an all-to-all takes is what that does.
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
        for name, value in (("gpus", self.gpus), ("host_size", self.host_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"a cluster's {name} must be a whole number from 1, got {value!r}")
        positive("a cluster", start_s=self.start_s)
        if self.pods and sum(pod.hosts for pod in self.pods) != self.hosts:
            raise ConfigError(
                f"pods of {[pod.hosts for pod in self.pods]} hosts do not add up to the cluster's {self.hosts} "
                f"({self.gpus} accelerators, {self.host_size} a host)"
            )
        if self.across is not None and len(self.pods) < 2:
            raise ConfigError("a link across pods needs at least two pods")

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.host_size)

    @cached_property
    def network(self) -> Network:
        """The links, for ``moe_comm.plan.machine.collectives``."""
        between = tuple(pod.link for pod in self.pods) or (self.between,)
        return Network(self.inside, between, self.across or self.between, self.start_s)

    def span(self, ranks: Iterable[int]) -> Span:
        """Where a group of ranks stands. Raises ConfigError for no ranks, repeated ones, and those that are not there.

        Compute it once for groups that are used often: it takes time in proportion to the ranks.
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
            here = counts[pods == pod]
            parts.append(Part(pod, len(here), int(here.sum()), int(here.min()), int(here.max())))
        return Span(tuple(parts))

    def all_gather(self, num_bytes: float, group: Span | Iterable[int]) -> Moved:
        """num_bytes: that each rank has afterwards."""
        return collectives.all_gather(self.network, num_bytes, self._span(group))

    def reduce_scatter(self, num_bytes: float, group: Span | Iterable[int]) -> Moved:
        """num_bytes: that each rank brings."""
        return collectives.reduce_scatter(self.network, num_bytes, self._span(group))

    def all_reduce(self, num_bytes: float, group: Span | Iterable[int]) -> Moved:
        """num_bytes: that each rank brings, and has afterwards."""
        return collectives.all_reduce(self.network, num_bytes, self._span(group))

    def all_to_all(self, num_bytes: float, group: Span | Iterable[int]) -> Moved:
        """num_bytes: that each rank sends to all ranks together, itself among them, in equal parts."""
        return collectives.all_to_all(self.network, num_bytes, self._span(group))

    def send(self, num_bytes: float, group: Span | Iterable[int]) -> Moved:
        """num_bytes: from one of the group's two ranks to the other."""
        return collectives.send(self.network, num_bytes, self._span(group))

    def all_gather_s(self, num_bytes: float, group: Span | Iterable[int]) -> float:
        """Seconds of ``all_gather``."""
        return self.all_gather(num_bytes, group).seconds

    def reduce_scatter_s(self, num_bytes: float, group: Span | Iterable[int]) -> float:
        """Seconds of ``reduce_scatter``."""
        return self.reduce_scatter(num_bytes, group).seconds

    def _span(self, group: Span | Iterable[int]) -> Span:
        return group if isinstance(group, Span) else self.span(group)
