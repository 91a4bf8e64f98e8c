"""Cost of the blocks of a stage (dense layer, MoE layer, embedding, head), cached for all mappings that share them.

Split backward. The input half computes input gradients at once, the weight half weight gradients when a rank is idle,
as in torch (``stage_backward_input`` and ``stage_backward_weight`` of ``torch.distributed.pipelining``) for the layers
of the bundled trainer:

    input     the backward pass without the weight gradients of matrix products (``Operation.weight_grad_s``)
    weight    these weight gradients, and what they need that the input half did not save. Work that recompute
              "selective" repeats is repeated in both halves. Experts that are one autograd function (not fused with
              their transfers) compute the gradient of their first product's output a second time.
    neither   the first stage, which has no input gradient: its complete backward is the weight half. The head, whose
              gradients are computed with the loss. Layers with recompute "full", whose weight gradients are computed
              with the input gradients. None of these backward passes is split.

Overlap. With "inter", a transfer overlaps with independent operators (MegaScale-MoE, arXiv 2505.11432):

    forward    combine, dispatch             overlap with shared experts
    backward   the same                      overlap with shared experts
               any, including recomputed     overlap with weight gradients, which no operator waits for, and with
                                             recomputed memory passes

With "all", the rest of a transfer next to a GEMM is fused with it and is hidden as far as ``moe_plan.machine.fused``
computes (``Operation.fused_share``). With "chunks", only the part is hidden that overlaps with the adjacent GEMM in
chunks. A transfer uses units of the accelerator, which slows the overlapping computation. This slowdown counts as
exposed time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from moe_comm.layers.transformer.shape import ModelShape
from moe_plan.arrays import Floats
from moe_plan.machine.collectives import CollectiveCost
from moe_plan.machine.hardware import Cluster
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Mapping, OverlapMode, PlacedMapping
from moe_plan.step.operators import BlockOperations, Operation, Operators

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
    """Hide transfers behind computation: ``shared`` seconds for transfers in ``EXPERTS``, ``any_transfer`` seconds for
    all."""
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


_REPEATED = ("experts down", "experts act")
"""Operators of unfused experts that both halves run, except for weight gradients."""


def halves(
    backward: Sequence[Operation], recomputed: int, fused: bool
) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Return the input half and the weight half of a layer's backward.

    Args:
        backward: operations without hidden time.
        recomputed: number of leading operations that recompute forward operations.
        fused: experts are fused with their transfers, and save the inputs of their weight gradients.
    """
    first = tuple(
        _half(operation, operation.seconds - operation.weight_grad_s) if operation.weight_grad_s else operation
        for operation in backward
    )
    second = list(backward[:recomputed])
    for operation, input_half in zip(backward[recomputed:], first[recomputed:], strict=True):
        if recomputed and operation.kind == "transfer" and operation.name.endswith(" again"):
            second.append(operation)  # the gather of recomputed inputs
        if operation.name in _REPEATED and not fused:
            second.append(input_half)
        if operation.weight_grad_s:
            second.append(_half(operation, operation.weight_grad_s))
    return first, tuple(second)


def _half(operation: Operation, seconds: float) -> Operation:
    return replace(operation, seconds=seconds, flops=operation.flops / 2, bytes=operation.bytes / 2, weight_grad_s=0.0)


LINKS = ("inside", "between", "across")
RECOMPUTED = {"none": (), "selective": ("memory",), "full": ("product", "memory", "transfer")}
"""Kinds of operators that backward recomputes."""
CAUSES = {"product": "products", "memory": "memory passes"}
BLOCKS = ("embedding", "dense", "moe", "head")
"""The blocks of stages. Only the first stage has the embedding, only the last one the head."""


@dataclass(frozen=True)
class PassCost:
    """Cost of one of ``BLOCKS`` in one kind of pass of one micro-batch, by operator.

    seconds: exposed time. causes, hidden: exposed and hidden seconds by name. sent: bytes by name and kind of link.
    """

    seconds: float
    causes: dict[str, float]
    hidden: dict[str, float]
    sent: dict[str, dict[str, float]]


@dataclass(frozen=True)
class BlockCost:
    """Cost of one of ``BLOCKS`` for one micro-batch. passes: by ``PassKind``; halves are empty if there are none."""

    operations: BlockOperations
    passes: tuple[PassCost, ...]


@dataclass(frozen=True)
class _Key:
    """Cache key: all that the cost of blocks depends on. ``placed`` is any mapping with these settings."""

    shape: ModelShape
    cluster: Cluster
    load: Workload
    degrees: tuple[int, int, int, int]
    settings: tuple[int, str, str, str, bool]
    placed: PlacedMapping = field(compare=False)


def block_costs(shape: ModelShape, placed: PlacedMapping, load: Workload) -> dict[str, BlockCost]:
    """Return the costs of all ``BLOCKS``, by name."""
    mapping, p = placed.mapping, placed.mapping.parallel
    settings = (mapping.micro_batch, mapping.recompute, mapping.overlap, mapping.dispatcher, mapping.splits)
    return _block_costs(_Key(shape, placed.cluster, load, (p.tp, p.cp, p.ep, p.etp), settings, placed))


def seconds_of(blocks: dict[str, BlockCost]) -> Floats:
    """Return the seconds of each block and kind of pass, [blocks, kinds of passes]."""
    return np.array([[cost.seconds for cost in blocks[name].passes] for name in BLOCKS])


def links(cost: CollectiveCost) -> dict[str, float]:
    """Return the sent bytes by kind of link."""
    return {link: getattr(cost, link) for link in LINKS}


@lru_cache(maxsize=2048)
def _block_costs(key: _Key) -> dict[str, BlockCost]:
    shape, operators = key.shape, Operators(key.shape, key.placed, key.load)
    mapping, empty = key.placed.mapping, BlockOperations((), ())
    operations_of = {
        "embedding": _unsplit(operators.embedding()),
        "dense": _with_recompute(operators.layer("dense"), mapping) if shape.dense_layers else empty,
        "moe": _with_recompute(operators.layer("moe"), mapping) if shape.moe_layers else empty,
        "head": _unsplit(hide(operators.head(), 0, mapping.overlap)),
    }
    return {
        name: BlockCost(operations, tuple(map(_pass_cost, operations.kinds)))
        for name, operations in operations_of.items()
    }


def _unsplit(operations: BlockOperations) -> BlockOperations:
    """Run the complete backward in the input half."""
    return replace(operations, input=operations.backward)


def _with_recompute(layer: BlockOperations, mapping: Mapping) -> BlockOperations:
    """Add recomputed operations to backward, hide transfers, and split backward."""
    kinds = RECOMPUTED[mapping.recompute]
    recomputed = tuple(operation for operation in layer.forward if operation.kind in kinds)
    backward = recomputed + layer.backward
    result = hide(BlockOperations(layer.forward, backward), len(recomputed), mapping.overlap)
    if not mapping.splits:
        return _unsplit(result)
    first, second = halves(backward, len(recomputed), mapping.fuses)
    hidden = hide(BlockOperations((), first), len(recomputed), mapping.overlap)
    return replace(result, input=hidden.backward, weight=second)


def _pass_cost(operations: tuple[Operation, ...]) -> PassCost:
    causes: dict[str, float] = {}
    hidden: dict[str, float] = {}
    sent: dict[str, dict[str, float]] = {}
    for operation in operations:
        is_transfer = operation.kind == "transfer"
        name = operation.name.removesuffix(" again") if is_transfer else CAUSES[operation.kind]
        causes[name] = causes.get(name, 0.0) + operation.exposed
        if operation.hidden:
            hidden[name] = hidden.get(name, 0.0) + operation.hidden
        if is_transfer:
            link_bytes = sent.setdefault(name, dict.fromkeys(LINKS, 0.0))
            for link, count in links(operation.cost).items():
                link_bytes[link] += count
    return PassCost(sum(one.exposed for one in operations), causes, hidden, sent)
