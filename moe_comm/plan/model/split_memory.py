"""What a pipeline that splits its backward passes keeps until the weights' halves have run.

All that forward left stays until then, and beside it the gradients that the input's half came by, one for the result of
each operator with weights, of which theirs are made. The first stage has none of these: its whole backward is there.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from moe_comm.plan.machine.hardware import BYTES
from moe_comm.plan.model.load import Load
from moe_comm.plan.model.mapping import Mapping
from moe_comm.plan.model.matrices import Weight
from moe_comm.plan.model.shape import ModelShape
from moe_comm.plan.pipeline.orders import pass_order
from moe_comm.plan.step.replay import Ints
from moe_comm.train.pipeline.stages import StagePlan

Moment = tuple[tuple[int, ...], tuple[int, ...]]
"""Of each of a rank's stages, how many micro-batches are in flight, and how many of them wait for the weights' half."""
_IN_FLIGHT, _WAITING = np.array([1, -1, 0, -1]), np.array([0, 0, 1, -1])
"""By ``PassKind``: of which there are so many more after a pass."""
_FULL = 4
"""Groups of ``pp`` micro-batches with which a pipeline holds as much as with more."""


@lru_cache(maxsize=4096)
def moments(schedule: str, pp: int, virtual: int, micro_batches: int) -> tuple[tuple[Moment, ...], ...]:
    """By rank, when it may hold the most: of several moments, none has both more in flight and more waiting.

    Raises:
        ConfigError: the schedule cannot run with these numbers.
    """
    few = _FULL * pp if micro_batches > _FULL * pp and not micro_batches % pp else micro_batches
    order = pass_order(schedule, pp, few, virtual)
    plan = StagePlan(pp, virtual, order.style, (0,) * order.stages)
    found = []
    for rank in range(pp):
        mine = order.rank == rank
        here = order.stage[mine] == np.array(plan.stages_of(rank))[:, None]
        flying = np.cumsum(here * _IN_FLIGHT[order.kind[mine]], axis=1)
        waiting = np.cumsum(here * _WAITING[order.kind[mine]], axis=1)
        if rank == 0:
            waiting[0] = 0
        found.append(_largest(flying, waiting))
    return tuple(found)


def _largest(flying: Ints, waiting: Ints) -> tuple[Moment, ...]:
    """Of [stages, passes]."""
    both = flying.sum(0), waiting.sum(0)
    best: list[Moment] = []
    most = -1
    for at in np.lexsort((-both[1], -both[0])).tolist():
        if both[1][at] > most:
            most = int(both[1][at])
            best.append((tuple(flying[:, at].tolist()), tuple(waiting[:, at].tolist())))
    return tuple(best)


def gradients_between(shape: ModelShape, mapping: Mapping, load: Load, tokens: float, size: int) -> tuple[float, float]:
    """Bytes for a micro-batch in a dense layer, and in an MoE layer, between the halves of its backward.

    Args:
        tokens: a rank's own of a micro-batch. size: bytes of an element.
    """
    dense, moe = (
        sum(times * _of(shape, mapping, load, weight, size) for block, times in blocks for weight in block.weights)
        for blocks in (
            shape.layer_blocks("dense") if shape.dense_layers else (),
            shape.layer_blocks("moe") if shape.moe_layers else (),
        )
    )
    return tokens * dense, tokens * moe


def _of(shape: ModelShape, mapping: Mapping, load: Load, weight: Weight, size: int) -> float:
    """Bytes per token of the gradient of one operator's result."""
    p = mapping.parallel
    if weight.operator == "experts":
        if not weight.product or (weight.name != "down" and not mapping.fuses):
            return 0.0  # a function of its own, in front of which the gradient of its result stands
        rows = shape.chosen * load.busiest(p.ep) * p.etp
        return rows * size * (weight.n if weight.name == "down" else weight.n / p.etp)
    if weight.operator == "router":
        return BYTES["fp32"] * weight.n if weight.product else 0.0
    if weight.product:
        # Where rows are scattered over tp behind it, they are those of the whole group.
        whole = weight.operator in ("out", "dense") and weight.name in ("out", "down")
        return float(size * weight.n * (p.tp if whole else 1))
    if weight.name == "norm" and weight.operator == "qkv" and shape.latent is None:
        return float(size * (shape.heads + shape.kv_heads) * shape.head_dim)
    return float(size * weight.n) if weight.name == "norm" or weight.operator == "norms" else 0.0
