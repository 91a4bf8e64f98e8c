"""The time of a pipeline whose ranks share cores: while some ranks wait for their neighbours, the others run faster.

    4 ranks on 2 cores; the described rate of a rank is that of half a core (shared = 2)

    rank 0  ████████████▒▒▒▒▒▒▒▒          one or two running ranks run twice as fast, four ranks at the described rate
    rank 1        ██████▒▒▒▒▒▒▒▒
    rank 2              ▒▒▒▒▒▒▒▒

This is a fluid model: if ``a`` of ``n`` ranks compute, each runs at ``min(shared, n / a)`` times its described rate.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from moe_plan.arrays import Floats
from moe_plan.step.replay import TaskGraph

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
    pending, successors = np.zeros(len(tasks), dtype=np.int64), defaultdict(list)
    last_on_stream: dict[int, int] = {}
    pairs = list(zip(tasks.before.tolist(), tasks.after.tolist(), strict=True))
    for task, stream in enumerate(tasks.stream.tolist()):
        if stream >= 0:
            pairs += [(last_on_stream[stream], task)] if stream in last_on_stream else []
            last_on_stream[stream] = task
    for first, successor in pairs:
        successors[first].append(successor)
        pending[successor] += 1
    remaining = np.asarray(duration, dtype=np.float64).tolist()
    running = np.flatnonzero(pending == 0).tolist()
    now = 0.0
    while running:
        active = sum(task < computing for task in running)
        speed = min(shared, ranks / active) if active else 1.0
        rates = [speed if task < computing else 1.0 for task in running]
        elapsed = min(remaining[task] / rate for task, rate in zip(running, rates, strict=True))
        now += elapsed
        still_running = []
        for task, rate in zip(running, rates, strict=True):
            remaining[task] -= elapsed * rate
            if remaining[task] > _ENDED * duration[task]:
                still_running.append(task)
                continue
            for successor in successors[task]:
                pending[successor] -= 1
                if not pending[successor]:
                    still_running.append(successor)
        running = still_running
    return now
