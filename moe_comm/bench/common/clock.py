"""Timing on several ranks: start together, take the slowest rank of each iteration, then the median.

    rank 0  ──barrier──┆──spin──▶│ t0 ███████ t1         │
    rank 1  ────barrier┆───spin─▶│ t0 ████████████ t1    │     time of the iteration: t1 - t0 of rank 1
                                 └ common start

Ranks leave a barrier tens of microseconds apart. All ranks therefore agree on a start time shortly after the barrier
and spin until then. The monotonic clock is the same for all processes of a host.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

LEAD_NS = 1_000_000
"""Time from the barrier to the common start. All ranks leave the barrier within this time."""

Sync = Callable[[int], int]
"""Barrier over all ranks that returns the maximum of their values."""


def sync_group(value: int) -> int:
    """Return the maximum over the default process group."""
    shared = torch.tensor(value, dtype=torch.int64, device="cpu")
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return int(shared)


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks of the default process group. Collective."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, value)
    return by_rank


class Clock:
    """Records the times of this rank, in seconds, by (contestant, phase).

    A contestant is one of the implementations that a benchmark compares.
    """

    def __init__(self, device: str = "cpu", sync: Sync = sync_group) -> None:
        self._sync = sync
        self._cuda = device == "cuda"
        self.times: dict[tuple[str, str], list[float]] = defaultdict(list)

    def measure(self, contestant: str, *phases: tuple[str, Callable[[], Any]], in_a_row: int = 1) -> None:
        """Run the phases in order from a common start on all ranks, and record the time of each. Collective.

        Several phases also record their sum as the phase ``total``. Each phase is called ``in_a_row`` times, and the
        mean is recorded.
        """
        self._wait_for_device()
        start = self._sync(time.monotonic_ns()) + LEAD_NS
        while time.monotonic_ns() < start:
            os.sched_yield()
        timestamps = [time.perf_counter()]
        for _, work in phases:
            for _ in range(in_a_row):
                work()
            self._wait_for_device()
            timestamps.append(time.perf_counter())
        for (phase, _), before, after in zip(phases, timestamps, timestamps[1:], strict=False):
            self.times[contestant, phase].append((after - before) / in_a_row)
        if len(phases) > 1:
            self.times[contestant, "total"].append((timestamps[-1] - timestamps[0]) / in_a_row)

    def _wait_for_device(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def clear(self) -> None:
        """Discard all recorded times."""
        self.times.clear()


Stats = dict[str, float]
Summary = dict[tuple[str, str], Stats]
"""Statistics by (contestant, phase)."""


def summarize(ranks: list[dict[tuple[str, str], list[float]]]) -> Summary:
    """Return median, minimum and 90th percentile of the slowest rank's times, in ms, by (contestant, phase)."""
    stats_by_key = {}
    for key in ranks[0]:
        slowest = torch.tensor([times[key] for times in ranks], dtype=torch.float64, device="cpu").amax(0) * 1e3
        stats_by_key[key] = {
            "median_ms": float(slowest.median() if len(slowest) % 2 else slowest.quantile(0.5)),
            "min_ms": float(slowest.min()),
            "p90_ms": float(slowest.quantile(0.9)),
            "iterations": len(slowest),
        }
    return stats_by_key


def times_of(stats: Stats, phase: str) -> dict[str, float]:
    """Return median, minimum and 90th percentile of ``phase`` as in a result, such as ``total_min_ms``."""
    return {f"{phase}_ms": stats["median_ms"], f"{phase}_min_ms": stats["min_ms"], f"{phase}_p90_ms": stats["p90_ms"]}
