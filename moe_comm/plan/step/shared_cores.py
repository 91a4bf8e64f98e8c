"""How long a pipeline takes whose ranks share cores: while some wait for their neighbours, the others go faster.

    4 ranks, 2 cores, rates of accelerators are those of half a core

    rank 0  ████████████▒▒▒▒▒▒▒▒          alone, twice as fast; two at once, twice as fast; four, as described
    rank 1        ██████▒▒▒▒▒▒▒▒
    rank 2              ▒▒▒▒▒▒▒▒

A fluid model: of ``n`` ranks ``a`` have something to compute, each at ``min(shared, n / a)`` times its described rate.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from moe_comm.plan.arrays import Floats
from moe_comm.plan.step.replay import Tasks

_ENDED = 1e-12
"""Share of a task that may be left when it counts as done."""


def shared_span(tasks: Tasks, duration: Floats, computing: int, ranks: int, shared: float) -> float:
    """Seconds until the last task ends.

    Args:
        tasks: without meetings.
        duration: [n] seconds of each, while all ranks compute.
        computing: how many of the first tasks compute; the others move bytes, as fast as ever.
        ranks: that share, of whom each runs its tasks one after another.
        shared: how much faster one rank is if no other computes.
    """
    before, follows = np.zeros(len(tasks), dtype=np.int64), defaultdict(list)
    last: dict[int, int] = {}
    pairs = list(zip(tasks.before.tolist(), tasks.after.tolist(), strict=True))
    for task, stream in enumerate(tasks.stream.tolist()):
        if stream >= 0:
            pairs += [(last[stream], task)] if stream in last else []
            last[stream] = task
    for first, then in pairs:
        follows[first].append(then)
        before[then] += 1
    left = np.asarray(duration, dtype=np.float64).tolist()
    running = np.flatnonzero(before == 0).tolist()
    now = 0.0
    while running:
        active = sum(task < computing for task in running)
        speed = min(shared, ranks / active) if active else 1.0
        rates = [speed if task < computing else 1.0 for task in running]
        passed = min(left[task] / rate for task, rate in zip(running, rates, strict=True))
        now += passed
        going = []
        for task, rate in zip(running, rates, strict=True):
            left[task] -= passed * rate
            if left[task] > _ENDED * duration[task]:
                going.append(task)
                continue
            for then in follows[task]:
                before[then] -= 1
                if not before[then]:
                    going.append(then)
        running = going
    return now
