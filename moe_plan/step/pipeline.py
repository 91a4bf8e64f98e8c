"""The tasks of a pipeline step, from the order of its passes.

1f1b over 3 ranks, 4 micro-batches; forward F and backward B of equal length:

    rank 0   F0 F1 F2       B0 F3 B1    B2    B3
    rank 1      F0 F1    B0 F2 B1 F3 B2    B3           idle: (pp - 1) / (micro-batches + pp - 1)
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3

With v interleaved stages per rank, the idle share is (pp - 1) / (v * micro-batches + pp - 1), arXiv 2104.04473. Split
backward passes fill the idle time with weight gradients, arXiv 2401.10241.

``shared_span`` replays a pipeline whose ranks share cores: while some ranks wait for their neighbours, the others run
faster.

    4 ranks on 2 cores; the described rate of a rank is that of half a core (shared = 2)

    rank 0  ████████████▒▒▒▒▒▒▒▒          one or two running ranks run twice as fast, four ranks at the described rate
    rank 1        ██████▒▒▒▒▒▒▒▒
    rank 2              ▒▒▒▒▒▒▒▒

This is a fluid model: if ``a`` of ``n`` ranks compute, each runs at ``min(shared, n / a)`` times its described rate.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from moe_plan.arrays import Floats, Ints
from moe_plan.orders import PassKind, PassOrder
from moe_plan.step.replay import TaskGraph

_ENDED = 1e-12
"""A task with at most this share of its duration left counts as completed."""


def pipeline_tasks(order: PassOrder, *, exposed: bool = False) -> TaskGraph:
    """Return the tasks of one step, without durations. Each pass waits for the neighbouring stage that feeds it.

    The first ``len(order)`` tasks are the passes, in order, on stream = rank. The others are transfers between ranks:
    activations leave rank r on stream pp + r, gradients on stream 2 * pp + r.

    Args:
        exposed: a rank starts to receive when it is idle, and waits. Otherwise transfers overlap with passes, one after
            another in each direction.
    """
    source, target = _neighbours(order)
    between_ranks = order.rank[source] != order.rank[target]
    near_source, near_target = source[~between_ranks], target[~between_ranks]
    source, target = source[between_ranks], target[between_ranks]

    passes, transfers = len(order), np.arange(len(order), len(order) + len(source))
    forward = order.kind[source] == PassKind.FORWARD
    before, after = [near_source, source, transfers], [near_target, transfers, target]
    stream = np.where(forward, order.pp, 2 * order.pp) + order.rank[source]
    if exposed:
        # The receiver's previous pass ends first.
        follows = (target > 0) & (order.rank[target - 1] == order.rank[target])
        before.append(target[follows] - 1)
        after.append(transfers[follows])
        stream = np.full_like(stream, -1)

    def label(task: int) -> str:
        if task < passes:
            kind = PassKind(int(order.kind[task])).name.lower()
            return f"{kind} {order.micro[task]} of stage {order.stage[task]}"
        at = int(source[task - passes])
        return f"transfer of micro-batch {order.micro[at]} from stage {order.stage[at]}"

    return TaskGraph(
        np.zeros(passes + len(source)),
        np.concatenate([order.rank, stream]),
        np.concatenate(before),
        np.concatenate(after),
        np.full(passes + len(source), -1, dtype=np.int64),
        label,
    )


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


def _neighbours(order: PassOrder) -> tuple[Ints, Ints]:
    """Return sending and receiving passes: activations to the next stage, gradients to the previous one."""
    at = np.full((2, order.stages, order.micro_batches), -1, dtype=np.int64)
    sends = np.flatnonzero(order.kind != PassKind.WEIGHT)
    at[(order.kind[sends] != PassKind.FORWARD).astype(np.int64), order.stage[sends], order.micro[sends]] = sends
    source = np.concatenate([at[0, :-1].ravel(), at[1, 1:].ravel()])
    target = np.concatenate([at[0, 1:].ravel(), at[1, :-1].ravel()])
    sort = np.argsort(source)  # transfers of a stream are in the order of their sending passes
    return source[sort], target[sort]
