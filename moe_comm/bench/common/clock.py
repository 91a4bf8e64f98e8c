"""Timing on several ranks: start together, take the slowest rank, then the median of the iterations.

    rank 0  ──barrier──┆──spin──▶│ t0 ███████ t1         │
    rank 1  ────barrier┆───spin─▶│ t0 ████████████ t1    │     the iteration took rank 1's t1 - t0
                                 └ common start

Leaving a barrier is itself uneven by tens of microseconds, so all ranks agree on a moment shortly after it
and spin until then: the clock is the same for all processes of a host.
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
"""From the barrier to the common start; longer than ranks need to leave the barrier."""

Sync = Callable[[int], int]
"""Barrier over all ranks that also returns the largest of the integers they brought."""


def sync_alone(value: int) -> int:
    """One rank."""
    return value


def sync_group(value: int) -> int:
    """Ranks of the default process group, through gloo."""
    shared = torch.tensor(value)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return int(shared)


class Clock:
    """Collects this rank's times, in seconds, by (contestant, phase)."""

    def __init__(self, sync: Sync, device: str = "cpu") -> None:
        self._sync = sync
        self._cuda = device == "cuda"
        self.times: dict[tuple[str, str], list[float]] = defaultdict(list)

    def measure(self, contestant: str, *parts: tuple[str, Callable[[], Any]], in_a_row: int = 1) -> None:
        """Run the parts one after another on every rank from one common start; note how long each took this rank.

        Several parts also give the phase ``total``. With ``in_a_row`` each part runs so many times; the mean counts.
        """
        self._wait_for_device()
        start = self._sync(time.monotonic_ns()) + LEAD_NS
        while time.monotonic_ns() < start:
            os.sched_yield()
        moments = [time.perf_counter()]
        for _, work in parts:
            for _ in range(in_a_row):
                work()
            self._wait_for_device()
            moments.append(time.perf_counter())
        for (phase, _), before, after in zip(parts, moments, moments[1:], strict=False):
            self.times[contestant, phase].append((after - before) / in_a_row)
        if len(parts) > 1:
            self.times[contestant, "total"].append((moments[-1] - moments[0]) / in_a_row)

    def _wait_for_device(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def clear(self) -> None:
        """Forget the warm-up."""
        self.times.clear()


Stats = dict[str, float]


def summarise(ranks: list[dict[tuple[str, str], list[float]]]) -> dict[tuple[str, str], Stats]:
    """Milliseconds by (contestant, phase): per iteration the slowest rank, then median, min and p90."""
    found = {}
    for key in ranks[0]:
        slowest = torch.tensor([times[key] for times in ranks], dtype=torch.float64).amax(0) * 1e3
        found[key] = {
            "median_ms": float(slowest.median() if len(slowest) % 2 else slowest.quantile(0.5)),
            "min_ms": float(slowest.min()),
            "p90_ms": float(slowest.quantile(0.9)),
            "iterations": len(slowest),
        }
    return found
