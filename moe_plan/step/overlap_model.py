"""How much of the transfers of a pass overlaps with its computation.

With overlap "inter", a transfer overlaps with independent operators (MegaScale-MoE, arXiv 2505.11432):

    forward    combine, dispatch             overlap with shared experts
    backward   the same                      overlap with shared experts
               any, including recomputed     overlap with weight gradients, which no operator waits for, and with
                                             recomputed memory passes

With "all", the rest of a transfer next to a GEMM is fused with it and is hidden as far as
``moe_plan.machine.fused`` computes (``Operation.fused_share``). With "chunks", only the part is hidden that
overlaps with the adjacent GEMM in chunks. A transfer uses units of the accelerator, which slows the overlapping
computation. This slowdown counts as exposed time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_plan.model.mapping import OverlapMode
from moe_plan.step.operators import BlockOperations, Operation

EXPERTS = ("dispatch", "combine", "expert gather", "expert scatter")
"""Transfers that are independent of the shared experts."""
FREE = 1 - 20 / 132
"""Relative rate of computation while a collective runs: DeepSeek-V3 (arXiv 2412.19437) dedicates 20 of an H800's 132
units to communication."""


def hide(one: BlockOperations, recomputed: int, overlap: OverlapMode) -> BlockOperations:
    """Return a layer's operations with the hidden time of each transfer.

    ``recomputed``: number of leading backward operations that recompute forward operations.
    """
    if overlap in ("none", "outer"):
        return one
    if overlap == "chunks":
        return BlockOperations(_fuse(one.forward), _fuse(one.backward))
    forward = _overlap(one.forward, _shared_seconds(one.forward, 0.0), 0.0)
    weight_grads = sum(each.weight_grad_s for each in one.backward[recomputed:])
    memory = sum(each.seconds for each in one.backward[:recomputed] if each.kind == "memory")
    backward = _overlap(one.backward, _shared_seconds(one.backward[recomputed:], 1.0), weight_grads + memory)
    if overlap == "inter":
        return BlockOperations(forward, backward)
    return BlockOperations(_fuse(forward), _fuse(backward))


def exposed_seconds(traffic_s: float, available_s: float) -> float:
    """Return the seconds of a collective that exceed the computation which it overlaps with.

    For gradient buckets that are sent during backward, ``traffic_s`` are the seconds of their collectives, and
    ``available_s`` those of the backward pass.
    """
    return max(0.0, traffic_s - available_s)


def _shared_seconds(operations: Sequence[Operation], backward: float) -> float:
    """Return the seconds of the shared experts. 1 for ``backward`` excludes weight gradients, which ``hide`` adds."""
    computed = (each for each in operations if each.name.startswith("shared") and each.kind != "transfer")
    return sum(each.seconds - backward * each.weight_grad_s for each in computed)


def _overlap(operations: Sequence[Operation], shared: float, any_transfer: float) -> tuple[Operation, ...]:
    """Hide transfers behind computation: ``shared`` s for transfers in ``EXPERTS``, ``any_transfer`` s for all."""
    result = []
    for operation in operations:
        if operation.kind == "transfer":
            is_expert = operation.name.removesuffix(" again") in EXPERTS
            behind_shared = min(operation.seconds, shared) if is_expert else 0.0
            behind_any = min(operation.seconds - behind_shared, any_transfer)
            shared, any_transfer = shared - behind_shared, any_transfer - behind_any
            operation = replace(operation, hidden=(behind_shared + behind_any) * FREE)
        result.append(operation)
    return tuple(result)


def _fuse(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Hide the part of each transfer that is fused with a GEMM."""
    return tuple(
        replace(each, hidden=each.hidden + each.fused_share * each.exposed) if each.fused_share else each
        for each in operations
    )
