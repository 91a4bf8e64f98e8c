"""Parameters, gradients and optimizer on one rank, matrix by matrix; ``memory`` adds the rest.

The formulas are those at the head of ``moe_comm.train.memory``. A part is what ranks of one position have several of:

    dense layer   MoE layer   embedding (first stage)   head and final norm (last stage)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from moe_comm.plan.model.mapping import Sharding
from moe_comm.plan.model.matrices import Block, Weight
from moe_comm.plan.model.shape import ModelShape
from moe_comm.topology import ParallelConfig, deal
from moe_comm.train.memory import MASTER, Fixed
from moe_comm.train.optim import OptimizerOptions


class Parts(NamedTuple):
    """Layers of each kind, and whether the embedding (first) and the head (last) are there."""

    dense: int
    moe: int
    first: int
    last: int


@dataclass(frozen=True)
class Keeping:
    """What ranks keep of a matrix.

    size: bytes of an element in the dtype that computes. partial: with fsdp, of gradients they only have their own
    part. cut_shared: tensor-parallel ranks share the shared experts.
    """

    parallel: ParallelConfig
    sharding: Sharding
    size: int
    optimizer: OptimizerOptions
    partial: bool
    cut_shared: bool

    def block(self, block: Block) -> Fixed:
        return sum((self.weight(weight) for weight in block.weights if weight.owned), Fixed())

    def weight(self, weight: Weight) -> Fixed:
        p, fsdp = self.parallel, self.sharding == "fsdp"
        local = self._local(weight)
        number = math.prod(local)
        size = MASTER if weight.operator == "router" and weight.product else self.size
        state = self._state(weight)
        # Who sums: tensor-parallel ranks too, where each has all of it and its own tokens.
        whole = not _is_expert(weight) and not self._is_cut(weight)
        summing = p.edp if _is_expert(weight) else p.cp * p.dp * (p.tp if whole else 1)
        parts = p.cp * p.dp if fsdp and whole else summing
        if self.sharding == "replicate" or (not fsdp and parts == 1):
            apart = MASTER * number if size < MASTER else 0
            return Fixed(number, size * number, MASTER * number, apart + state * number, apart if summing > 1 else 0)
        own = math.prod(deal(local, 0, parts, fsdp).shape(local))
        gradients = MASTER * (own if self.partial else number)
        return Fixed(number, size * number, gradients, (MASTER + state) * own, 0 if self.partial else MASTER * own)

    def _local(self, weight: Weight) -> tuple[int, ...]:
        """Shape of a rank's part, outputs first."""
        p = self.parallel
        if _is_expert(weight):
            wide = _up(weight.n, p.etp) if weight.name != "down" else weight.n
            return (_up(weight.copies, p.ep), wide, _up(weight.k, p.etp) if weight.name == "down" else weight.k)
        if weight.operator == "embedding":
            return (_up(weight.k, p.tp), weight.n)
        if not self._is_cut(weight):
            return (weight.n, weight.k) if weight.k > 1 else (weight.n,)
        if weight.operator == "out" or weight.name == "down":
            return (weight.n, _up(weight.k, p.tp))
        return (_up(weight.n, p.tp), weight.k)

    def _is_cut(self, weight: Weight) -> bool:
        """Whether tensor-parallel ranks share it: all matrices but the router, what leads to latents, and (unless
        they are to) the shared experts."""
        if weight.operator == "embedding":
            return True
        whole = weight.operator == "router" or weight.name.endswith("_down") or weight.n == 1
        return weight.product and not whole and (self.cut_shared or weight.operator != "shared")

    def _state(self, weight: Weight) -> int:
        """Bytes per element."""
        o = self.optimizer
        if o.kind == "sgd":
            return MASTER if o.momentum else 0
        matrix = weight.product and weight.operator not in ("router", "head")
        return MASTER if o.kind == "muon" and matrix else 2 * MASTER


@lru_cache(maxsize=4096)
def fixed_parts(shape: ModelShape, keeping: Keeping) -> tuple[Fixed, Fixed, Fixed, Fixed]:
    """Of a dense layer, an MoE layer, the embedding and the head; weights: gathered."""
    head = shape.head_block
    if shape.tie and keeping.parallel.pp > 1:  # the last stage has a copy of its own
        head = replace(head, weights=tuple(replace(weight, owned=True) for weight in head.weights))
    dense = shape.layer_blocks("dense") if shape.dense_layers else ()
    moe = shape.layer_blocks("moe") if shape.moe_layers else ()
    every = (dense, moe, ((shape.embedding_block, 1),), ((head, 1),))
    first, second, third, last = (
        sum((keeping.block(block) for block, times in blocks for _ in range(times)), Fixed()) for blocks in every
    )
    return first, second, third, last


def fixed_of(parts: Parts, each: Sequence[Fixed], gathered: bool) -> Fixed:
    """Of all parts of a position; with ``gathered`` the weights of all layers are there, else of the two largest."""
    totals = [0, 0, 0, 0, 0]
    for count, one in zip(parts, each, strict=True):
        for at, value in enumerate((one.params, one.weights, one.gradients, one.optimizer, one.at_update)):
            totals[at] += count * value
    if not gathered:
        dense, moe, first, last = each
        largest = sorted([dense.weights] * min(parts.dense, 2) + [moe.weights] * min(parts.moe, 2))[-2:]
        totals[1] = parts.first * first.weights + parts.last * last.weights + sum(largest)
    return Fixed(*totals)


def _is_expert(weight: Weight) -> bool:
    return weight.operator == "experts"


def _up(number: int, parts: int) -> int:
    return -(-number // parts)
