"""What of a pass' transfers goes on beside computing, and inside it: of each pair the longer counts, not the shorter.

With overlap "inter" a transfer runs beside operators that do not need it, nor it them (MegaScale-MoE, 2505.11432):

    forward    combine, dispatch                        beside shared experts
    backward   the same                                 beside shared experts
               any, also those that are done again      beside weights' gradients, which nothing waits for, and memory
                                                        passes that are done again, which need nothing of it

With "all", the rest of a transfer next to a product is fused with it and hides as ``moe_comm.plan.machine.fused``
describes (``Operation.inside``). A transfer takes units from what computes beside it: that much of the pair is visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_comm.plan.model.mapping import Overlap
from moe_comm.plan.step.operators import Operation, Pass

EXPERTS = ("dispatch", "combine", "expert gather", "expert scatter")
"""Transfers that shared experts need nothing of."""
SHARED = "shared"
"""What operators of shared experts begin with."""


FREE = 1 - 20 / 132
"""Of an accelerator's rate, what computing keeps while a collective runs beside it: DeepSeek-V3 (arXiv 2412.19437) sets
20 of an H800's 132 units apart for that."""


def hide(one: Pass, again: int, overlap: Overlap) -> Pass:
    """A layer's operations with what of each transfer is hidden.

    Args:
        again: how many of the first operations of backward are forward's done again.
    """
    if overlap in ("none", "outer"):
        return one
    forward = _beside(one.forward, _shared(one.forward, 0.0), 0.0)
    later = sum(each.later for each in one.backward[again:])
    redone = sum(each.seconds for each in one.backward[:again] if each.kind == "memory")
    backward = _beside(one.backward, _shared(one.backward[again:], 1.0), later + redone)
    return Pass(forward, backward) if overlap == "inter" else Pass(_within(forward), _within(backward))


def _shared(operations: Sequence[Operation], backward: float) -> float:
    """Seconds of the shared experts; in backward without weights' gradients, which are counted with the others."""
    computed = (one for one in operations if one.name.startswith(SHARED) and one.kind != "transfer")
    return sum(one.seconds - backward * one.later for one in computed)


def _beside(operations: Sequence[Operation], shared: float, anything: float) -> tuple[Operation, ...]:
    """shared, anything: seconds of computing that experts' transfers, and that any transfer, can run beside."""
    found = []
    for one in operations:
        if one.kind == "transfer":
            first = min(one.seconds, shared) if one.name.removesuffix(" again") in EXPERTS else 0.0
            then = min(one.seconds - first, anything)
            shared, anything = shared - first, anything - then
            one = replace(one, hidden=(first + then) * FREE)
        found.append(one)
    return tuple(found)


def _within(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """What is left of a transfer that is fused with a product."""
    return tuple(replace(one, hidden=one.hidden + one.inside * one.shown) if one.inside else one for one in operations)
