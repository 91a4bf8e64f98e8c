"""Cost of the blocks of a stage (dense layer, MoE layer, embedding, head), cached for all mappings that share them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from moe_comm.layers.transformer.shape import ModelShape
from moe_plan.arrays import Floats
from moe_plan.machine.collectives import CollectiveCost
from moe_plan.machine.hardware import Cluster
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Mapping, PlacedMapping
from moe_plan.step.operators import BlockOperations, Operation, Operators
from moe_plan.step.overlap_model import hide
from moe_plan.step.split_backward import halves

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
