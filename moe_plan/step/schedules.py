"""The tasks of a pipeline step, from the order of its passes.

1f1b over 3 ranks, 4 micro-batches; forward F and backward B of equal length:

    rank 0   F0 F1 F2       B0 F3 B1    B2    B3
    rank 1      F0 F1    B0 F2 B1 F3 B2    B3           idle: (pp - 1) / (micro-batches + pp - 1)
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3

With v interleaved stages per rank, the idle share is (pp - 1) / (v * micro-batches + pp - 1), arXiv 2104.04473. Split
backward passes fill the idle time with weight gradients, arXiv 2401.10241.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_comm.errors import ConfigError
from moe_plan.arrays import Floats, Ints
from moe_plan.orders import PassKind, PassOrder
from moe_plan.step.replay import TaskGraph


@dataclass(frozen=True)
class PassSeconds:
    """Durations of passes: arrays [stages], or [stages, micro_batches] if micro-batches differ.

    input, weight: the halves of a backward pass. A complete backward pass takes their sum.
    """

    forward: Floats
    input: Floats
    weight: Floats

    def of(self, order: PassOrder) -> Floats:
        """Return the seconds of each pass of ``order``, [passes]. Raises ConfigError for a wrong shape."""
        durations = []
        for name in ("forward", "input", "weight"):
            values = np.asarray(getattr(self, name), dtype=np.float64)
            values = values[:, None] if values.ndim == 1 else values
            if values.ndim != 2 or values.shape[0] != order.stages or values.shape[1] not in (1, order.micro_batches):
                raise ConfigError(
                    f"{name} must be seconds [{order.stages} stages] or [{order.stages}, {order.micro_batches} "
                    f"micro-batches]; got shape {np.shape(getattr(self, name))}"
                )
            durations.append(np.broadcast_to(values, (order.stages, order.micro_batches)))
        forward, backward, weight = durations
        per_kind = np.stack([forward, backward + weight, backward, weight])
        seconds: Floats = per_kind[order.kind, order.stage, order.micro]
        return seconds


@dataclass(frozen=True)
class PipelineTasks:
    """Tasks of a pipeline step. The first ``len(order)`` tasks are its passes, in order, on stream = rank.

    The others are transfers between ranks: task ``len(order) + i`` connects the passes ``source[i]`` and ``target[i]``.
    Activations leave rank r on stream pp + r, gradients on stream 2 * pp + r.
    """

    order: PassOrder
    tasks: TaskGraph
    source: Ints
    target: Ints


def pipeline_tasks(
    order: PassOrder,
    seconds: PassSeconds,
    transfer: float | Floats = 0.0,
    *,
    exposed: bool = False,
    hidden: float = 0.0,
) -> PipelineTasks:
    """Return the tasks of one step. Each pass waits for the pass of the neighbouring stage that provides its input.

    Args:
        order: the passes.
        seconds: their durations.
        transfer: seconds between stages on different ranks, one number or [stages - 1], in either direction.
        exposed: a rank starts to receive when it is idle, and waits. Otherwise transfers overlap with passes, one after
            another in each direction.
        hidden: overlap of paired passes (``PassOrder.pair``), as a share of the shorter one, 0 to 1.

    Raises:
        ConfigError: a shape is wrong, or a number is out of range.
    """
    if not 0.0 <= hidden <= 1.0:
        raise ConfigError(f"hidden must be a share from 0 to 1; got {hidden}")
    hop = np.asarray(transfer, dtype=np.float64)
    if hop.ndim and hop.shape != (order.stages - 1,):
        raise ConfigError(f"transfer must be seconds, one number or [{order.stages - 1}]; got shape {hop.shape}")
    hop = np.broadcast_to(hop, (order.stages - 1,))
    pass_seconds = _paired(order, seconds.of(order), hidden)
    source, target = _neighbours(order)
    between_ranks = order.rank[source] != order.rank[target]
    near_source, near_target = source[~between_ranks], target[~between_ranks]
    source, target = source[between_ranks], target[between_ranks]

    passes, transfers = len(order), np.arange(len(order), len(order) + len(source))
    forward = order.kind[source] == PassKind.FORWARD
    before, after = [near_source, source, transfers], [near_target, transfers, target]
    stream = np.where(forward, order.pp, 2 * order.pp) + order.rank[source]
    if exposed:
        follows = (target > 0) & (order.rank[target - 1] == order.rank[target])
        before.append(target[follows] - 1)
        after.append(transfers[follows])
        stream = np.full_like(stream, -1)
    between = np.minimum(order.stage[source], order.stage[target])

    def label(task: int) -> str:
        if task < passes:
            kind = PassKind(int(order.kind[task])).name.lower()
            return f"{kind} {order.micro[task]} of stage {order.stage[task]}"
        at = int(source[task - passes])
        return f"transfer of micro-batch {order.micro[at]} from stage {order.stage[at]}"

    tasks = TaskGraph(
        np.concatenate([pass_seconds, hop[between]]),
        np.concatenate([order.rank, stream]),
        np.concatenate(before),
        np.concatenate(after),
        np.full(passes + len(source), -1, dtype=np.int64),
        label,
    )
    return PipelineTasks(order, tasks, source, target)


def _neighbours(order: PassOrder) -> tuple[Ints, Ints]:
    """Return sending and receiving passes: activations to the next stage, gradients to the previous one."""
    at = np.full((2, order.stages, order.micro_batches), -1, dtype=np.int64)
    sends = np.flatnonzero(order.kind != PassKind.WEIGHT)
    at[(order.kind[sends] != PassKind.FORWARD).astype(np.int64), order.stage[sends], order.micro[sends]] = sends
    source = np.concatenate([at[0, :-1].ravel(), at[1, 1:].ravel()])
    target = np.concatenate([at[0, 1:].ravel(), at[1, :-1].ravel()])
    sort = np.argsort(source)  # transfers of a stream are in the order of their sending passes
    return source[sort], target[sort]


def _paired(order: PassOrder, pass_seconds: Floats, hidden: float) -> Floats:
    """Return the durations, with the second pass of each pair shortened by the overlap."""
    first = np.flatnonzero((order.pair[:-1] >= 0) & (order.pair[:-1] == order.pair[1:]))
    if hidden and len(first):
        pass_seconds = pass_seconds.copy()
        pass_seconds[first + 1] -= hidden * np.minimum(pass_seconds[first], pass_seconds[first + 1])
    return pass_seconds
