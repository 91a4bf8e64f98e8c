"""A pipeline's step from the order of its passes: tasks to replay, the bubble, and what ranks hold meanwhile.

1f1b over 3 ranks, 4 micro-batches; forwards F and backwards B of equal length:

    rank 0   F0 F1 F2       B0 F3 B1    B2    B3
    rank 1      F0 F1    B0 F2 B1 F3 B2    B3           idle: (pp - 1) / (micro-batches + pp - 1)
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3

Interleaving v stages a rank makes that (pp - 1) / (v * micro-batches + pp - 1), arXiv 2104.04473; splitting the
backward fills it with weights' passes, arXiv 2401.10241.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_comm.errors import ConfigError
from moe_comm.plan.arrays import Floats, Ints
from moe_comm.plan.pipeline.orders import PassKind, PassOrder
from moe_comm.plan.step.replay import Tasks


@dataclass(frozen=True)
class PassSeconds:
    """How long passes take: arrays [stages], or [stages, micro_batches] where micro-batches differ.

    input, weight: the halves of a backward; a whole one takes their sum.
    """

    forward: Floats
    input: Floats
    weight: Floats

    def of(self, order: PassOrder) -> Floats:
        """Seconds of each pass of ``order``, [passes].

        Raises:
            ConfigError: a shape is wrong.
        """
        found = []
        for name in ("forward", "input", "weight"):
            got = np.asarray(getattr(self, name), dtype=np.float64)
            got = got[:, None] if got.ndim == 1 else got
            if got.ndim != 2 or got.shape[0] != order.stages or got.shape[1] not in (1, order.micro_batches):
                raise ConfigError(
                    f"{name} must be seconds [{order.stages} stages] or [{order.stages}, {order.micro_batches} "
                    f"micro-batches]; got shape {np.shape(getattr(self, name))}"
                )
            found.append(np.broadcast_to(got, (order.stages, order.micro_batches)))
        forward, backward, weight = found
        per_kind = np.stack([forward, backward + weight, backward, weight])
        seconds: Floats = per_kind[order.kind, order.stage, order.micro]
        return seconds


@dataclass(frozen=True)
class PipelineTasks:
    """Tasks of a pipeline's step; the first ``len(order)`` are its passes, in its order, on stream = rank.

    Behind them the transfers between ranks: ``source[i]`` and ``target[i]`` are the passes that task
    ``len(order) + i`` is between. Those of activations leave rank r on stream pp + r, of gradients on 2 * pp + r.
    """

    order: PassOrder
    tasks: Tasks
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
    """Tasks of one step: a pass waits for the pass of the neighbour stage that it takes its input from.

    Args:
        transfer: seconds between stages on different ranks, one number or [stages - 1], either way.
        exposed: a rank asks for what a pass takes only when it has nothing else left before that pass, and waits; else
            transfers run beside passes, one after another in each direction.
        hidden: of passes that are a pair, the share of the shorter one that overlaps with the longer: 0 to 1.

    Raises:
        ConfigError: shapes are wrong, or a number is out of range.
    """
    if not 0.0 <= hidden <= 1.0:
        raise ConfigError(f"hidden is a share, 0 to 1; got {hidden}")
    hop = np.asarray(transfer, dtype=np.float64)
    if hop.ndim and hop.shape != (order.stages - 1,):
        raise ConfigError(f"transfer must be seconds, one number or [{order.stages - 1}]; got shape {hop.shape}")
    hop = np.broadcast_to(hop, (order.stages - 1,))
    takes = _paired(order, seconds.of(order), hidden)
    source, target = _neighbours(order)
    far = order.rank[source] != order.rank[target]
    near_source, near_target, source, target = source[~far], target[~far], source[far], target[far]

    passes, moves = len(order), np.arange(len(order), len(order) + len(source))
    forward = order.kind[source] == PassKind.FORWARD
    before, after = [near_source, source, moves], [near_target, moves, target]
    lane = np.where(forward, order.pp, 2 * order.pp) + order.rank[source]
    if exposed:
        follows = (target > 0) & (order.rank[target - 1] == order.rank[target])
        before.append(target[follows] - 1)
        after.append(moves[follows])
        lane = np.full_like(lane, -1)
    between = np.minimum(order.stage[source], order.stage[target])

    def label(task: int) -> str:
        if task < passes:
            kind = PassKind(int(order.kind[task])).name.lower()
            return f"{kind} {order.micro[task]} of stage {order.stage[task]}"
        at = int(source[task - passes])
        return f"what stage {order.stage[at]} sends of {order.micro[at]}"

    tasks = Tasks(
        np.concatenate([takes, hop[between]]),
        np.concatenate([order.rank, lane]),
        np.concatenate(before),
        np.concatenate(after),
        np.full(passes + len(source), -1, dtype=np.int64),
        label,
    )
    return PipelineTasks(order, tasks, source, target)


def _neighbours(order: PassOrder) -> tuple[Ints, Ints]:
    """Passes that give and passes that take: activations to the next stage, gradients to the one before."""
    at = np.full((2, order.stages, order.micro_batches), -1, dtype=np.int64)
    travels = np.flatnonzero(order.kind != PassKind.WEIGHT)
    at[(order.kind[travels] != PassKind.FORWARD).astype(np.int64), order.stage[travels], order.micro[travels]] = travels
    source = np.concatenate([at[0, :-1].ravel(), at[1, 1:].ravel()])
    target = np.concatenate([at[0, 1:].ravel(), at[1, :-1].ravel()])
    sort = np.argsort(source)  # transfers of a stream leave in the order of the passes that make them
    return source[sort], target[sort]


def _paired(order: PassOrder, takes: Floats, hidden: float) -> Floats:
    """Durations with the second pass of each pair shortened by what overlaps."""
    first = np.flatnonzero((order.pair[:-1] >= 0) & (order.pair[:-1] == order.pair[1:]))
    if hidden and len(first):
        takes = takes.copy()
        takes[first + 1] -= hidden * np.minimum(takes[first], takes[first + 1])
    return takes
