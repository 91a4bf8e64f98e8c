"""The time of a pipeline whose ranks share cores: while some ranks wait for their neighbours, the others run faster.

    4 ranks, 2 cores, rates of accelerators are those of half a core

    rank 0  ████████████▒▒▒▒▒▒▒▒          one rank runs twice as fast, two ranks too, four ranks at the described rate
    rank 1        ██████▒▒▒▒▒▒▒▒
    rank 2              ▒▒▒▒▒▒▒▒

This is a fluid model: if ``a`` of ``n`` ranks compute, each runs at ``min(shared, n / a)`` times its described rate.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from moe_comm.plan.arrays import Floats
from moe_comm.plan.step.replay import TaskGraph

_ENDED = 1e-12
"""A task with at most this share of its duration left counts as completed."""


def shared_span(tasks: TaskGraph, duration: Floats, computing: int, ranks: int, shared: float) -> float:
    """Return the seconds until the last task ends.

    Args:
        tasks: tasks without collectives.
        duration: [n] seconds of each task while all ranks compute.
        computing: number of leading tasks that compute. The others are transfers, at a constant rate.
        ranks: number of ranks that share cores. Each runs its tasks one after another.
        shared: speedup of a rank if no other rank computes.
    """
    pending, follows = np.zeros(len(tasks), dtype=np.int64), defaultdict(list)
    last: dict[int, int] = {}
    pairs = list(zip(tasks.before.tolist(), tasks.after.tolist(), strict=True))
    for task, stream in enumerate(tasks.stream.tolist()):
        if stream >= 0:
            pairs += [(last[stream], task)] if stream in last else []
            last[stream] = task
    for first, then in pairs:
        follows[first].append(then)
        pending[then] += 1
    left = np.asarray(duration, dtype=np.float64).tolist()
    running = np.flatnonzero(pending == 0).tolist()
    now = 0.0
    while running:
        active = sum(task < computing for task in running)
        speed = min(shared, ranks / active) if active else 1.0
        rates = [speed if task < computing else 1.0 for task in running]
        elapsed = min(left[task] / rate for task, rate in zip(running, rates, strict=True))
        now += elapsed
        still_running = []
        for task, rate in zip(running, rates, strict=True):
            left[task] -= elapsed * rate
            if left[task] > _ENDED * duration[task]:
                still_running.append(task)
                continue
            for then in follows[task]:
                pending[then] -= 1
                if not pending[then]:
                    still_running.append(then)
        running = still_running
    return now
