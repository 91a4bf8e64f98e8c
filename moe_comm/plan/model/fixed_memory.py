"""Parameters, gradients and optimizer on one rank; ``memory`` adds the rest.

What a parameter of N elements on a rank (after tp, ep and etp have cut it), of which M are the rank's to update, takes
in bytes; c is the size of the dtype that it computes in, state that of the optimizer's state per element:

                weights   gradients   masters and state      at the update
    replicate   c N       4 N         4 N if c < 4, state N  4 N if c < 4 (their sum over ranks)
    zero1       c N       4 N         4 M + state M          4 M
    fsdp        c N *     4 N **      4 M + state M          4 M

    *  gathered: all with a pipeline, else those of the root and of the two largest layers
    ** until the last micro-batch's backward; with one micro-batch and no pipeline 4 M

M is N over the ranks that hold the same, rounded up as ``deal`` does; where no other rank does, zero1 is replicate.

``Part.fixed`` applies this table to one parameter. ``fixed_parts`` applies it to a model's matrices, for the ranks that
hold the most. A dry run of the trainer applies it to the parameters of the model that it has built, for every rank. A
rank's parameters are those of

    dense layer   MoE layer   embedding (first stage)   head and final norm (last stage)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from moe_comm.plan.model.mapping import Sharding
from moe_comm.plan.model.matrices import MASTER, Block, Weight
from moe_comm.plan.model.shape import ModelShape
from moe_comm.topology import ParallelConfig, deal

Optimizer = Literal["adamw", "sgd", "lamb", "muon"]


@dataclass(frozen=True)
class Fixed:
    """Bytes that one rank holds whatever its tokens are; params counts elements. at_update: only at the update."""

    params: int = 0
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    at_update: int = 0

    def __add__(self, other: Fixed) -> Fixed:
        return Fixed(
            self.params + other.params,
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.at_update + other.at_update,
        )


@dataclass(frozen=True)
class Part:
    """One rank's part of a parameter.

    size: bytes of an element in the dtype that computes. state: bytes of optimizer state per element.
    summing: ranks over which the gradient is summed. owners, index: ranks that share masters and state, and which of
    them this rank is.
    """

    shape: tuple[int, ...]
    size: int
    state: int
    summing: int
    owners: int
    index: int = 0

    def fixed(self, sharding: Sharding, partial: bool) -> Fixed:
        """Bytes; weights: gathered. partial: with fsdp, a rank only has its own part of the gradient."""
        number = math.prod(self.shape)
        whole = not self.shape or not number or (sharding == "zero1" and self.owners == 1)
        if sharding == "replicate" or whole:
            apart = MASTER * number if self.size < MASTER else 0
            summed = apart if self.summing > 1 else 0
            return Fixed(number, self.size * number, MASTER * number, apart + self.state * number, summed)
        dealt, own = (
            math.prod(deal(self.shape, at, self.owners, sharding == "fsdp").shape(self.shape)) for at in (0, self.index)
        )
        gradients = MASTER * (dealt if partial else number)
        masters = MASTER * dealt
        return Fixed(number, self.size * number, gradients, masters + self.state * own, 0 if partial else masters)


def state_bytes(optimizer: Optimizer, momentum: bool, matrix: bool) -> int:
    """Bytes of optimizer state per element. matrix: Muon updates it; it leaves the others to AdamW."""
    if optimizer == "sgd":
        return MASTER if momentum else 0
    return MASTER if optimizer == "muon" and matrix else 2 * MASTER


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
    optimizer: Optimizer
    momentum: bool
    partial: bool
    cut_shared: bool

    def block(self, block: Block) -> Fixed:
        return sum((self.weight(weight) for weight in block.weights if weight.owned), Fixed())

    def weight(self, weight: Weight) -> Fixed:
        p, fsdp = self.parallel, self.sharding == "fsdp"
        size = MASTER if weight.operator == "router" and weight.product else self.size
        matrix = weight.product and weight.operator not in ("router", "head")
        # Tensor-parallel ranks sum gradients too, where each has all of a parameter and its own tokens.
        whole = not _is_expert(weight) and not self._is_cut(weight)
        summing = p.edp if _is_expert(weight) else p.cp * p.dp * (p.tp if whole else 1)
        owners = p.cp * p.dp if fsdp and whole else summing
        state = state_bytes(self.optimizer, self.momentum, matrix)
        return Part(self._local(weight), size, state, summing, owners).fixed(self.sharding, self.partial)

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
