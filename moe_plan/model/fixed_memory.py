"""Memory of parameters, gradients and optimizer state on one rank. ``memory`` adds activations and buffers.

A rank holds N elements of a parameter after sharding by tp, ep and etp, and updates M of them. The table gives bytes.
c is the element size of the compute dtype, and ``state`` the bytes of optimizer state per element:

                weights   gradients   masters and state      at the update
    replicate   c N       4 N         4 N if c < 4, state N  4 N if c < 4 (gradient sum over ranks)
    zero1       c N       4 N         4 M + state M          4 M
    fsdp        c N *     4 N **      4 M + state M          4 M

    *  gathered weights: all of them with a pipeline, else those of the root and of the two largest layers
    ** until the last micro-batch's backward; 4 M with one micro-batch and no pipeline

M is N divided by the number of ranks that hold the same parameter, rounded up as ``shard_slice`` does. If no other rank
holds it, zero1 equals replicate. With R replicas of FSDP's shards, M is N divided by the ranks of one of R blocks. If a
block has one rank, fsdp equals replicate.

``ParameterShard.fixed`` applies the table to one parameter. ``fixed_parts`` applies it to a model's matrices, on the
ranks that hold the most. The trainer's dry run applies it to the parameters of the built model, for every rank. A rank
holds some of these parts:

    dense layer   MoE layer   embedding (first stage)   head and final norm (last stage)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from moe_comm.layers.transformer.shape import MASTER, Block, ModelShape, Weight
from moe_comm.topology import ParallelConfig, shard_slice
from moe_comm.topology.parallel import ShardingMode

Optimizer = Literal["adamw", "sgd", "lamb", "muon"]


@dataclass(frozen=True)
class FixedMemory:
    """Bytes on one rank that do not depend on its tokens. ``params`` counts elements.

    ``at_update`` bytes are only allocated during the optimizer update. ``resident`` is the part of ``weights`` that is
    not sharded, and therefore never gathered or freed. ``stored`` is the part of ``optimizer`` that can be offloaded:
    all of it, except the masters of fsdp, which are gathered. ``host`` bytes are in the host's memory instead.
    """

    params: int = 0
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    at_update: int = 0
    resident: int = 0
    stored: int = 0
    host: int = 0

    def on_host(self, partial: bool) -> FixedMemory:
        """Return the memory of fsdp with its shards on the host. partial: gradients are those of the shards."""
        shards = self.gradients if partial else self.at_update
        gradients = 0 if partial else self.gradients
        return replace(self, gradients=gradients, optimizer=0, at_update=0, host=self.optimizer + shards)

    def offloaded(self, budget: int | None) -> FixedMemory:
        """Return the memory if ``stored`` bytes stream through a budget of memory; None: they are in memory."""
        if budget is None:
            return replace(self, stored=0)
        return replace(self, optimizer=self.optimizer - self.stored + min(self.stored, budget))

    def __add__(self, other: FixedMemory) -> FixedMemory:
        return FixedMemory(*(first + second for first, second in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class ParameterShard:
    """One rank's shard of a parameter.

    size: bytes of an element in the compute dtype. state: bytes of optimizer state per element. summing: number of
    ranks over which the gradient is summed. ranks, index: number of ranks over which masters and optimizer state are
    sharded, and index of this rank among them. replicas: blocks of these ranks that each store all shards.
    """

    shape: tuple[int, ...]
    size: int
    state: int
    summing: int
    ranks: int
    index: int = 0
    replicas: int = 1

    @property
    def owners(self) -> int:
        """Number of ranks of a block."""
        return self.ranks // self.replicas if self.ranks > 1 else 1

    def fixed(self, sharding: ShardingMode, partial: bool) -> FixedMemory:
        """Return the bytes, with gathered weights. ``partial``: with fsdp, the rank holds only its gradient shard."""
        number = math.prod(self.shape)
        # FSDP leaves parameters to plain replication if each block has only one rank.
        alone = self.owners == 1 and (sharding == "zero1" or self.ranks > 1)
        if sharding == "replicate" or not self.shape or not number or alone:
            masters = MASTER * number if self.size < MASTER else 0
            summed = masters if self.summing > 1 else 0
            weights = self.size * number
            optimizer = masters + self.state * number
            return FixedMemory(number, weights, MASTER * number, optimizer, summed, weights, optimizer)
        largest_shard, own_shard = (
            math.prod(shard_slice(self.shape, at, self.owners, sharding == "fsdp").shape(self.shape))
            for at in (0, self.index % self.owners)
        )
        gradients = MASTER * (largest_shard if partial else number)
        masters = MASTER * largest_shard
        weights = self.size * number
        at_update, resident = 0 if partial else masters, weights if sharding == "zero1" else 0
        stored = self.state * own_shard + (masters if sharding == "zero1" else 0)
        optimizer = masters + self.state * own_shard
        return FixedMemory(number, weights, gradients, optimizer, at_update, resident, stored)


def state_bytes(optimizer: Optimizer, momentum: bool, matrix: bool) -> int:
    """Return the bytes of optimizer state per element. Muon updates only matrices and leaves the rest to AdamW."""
    if optimizer == "sgd":
        return MASTER if momentum else 0
    return MASTER if optimizer == "muon" and matrix else 2 * MASTER


def moved_bytes(optimizer: Optimizer, momentum: bool = False) -> int:
    """Return the bytes per element that are sent with a moved expert: fp32 master weight and optimizer state."""
    return MASTER + state_bytes(optimizer, momentum, matrix=True)


class StageContents(NamedTuple):
    """Numbers of dense layers, MoE layers, embeddings (``first``) and heads (``last``) that a stage holds."""

    dense: int
    moe: int
    first: int
    last: int


@dataclass(frozen=True)
class FixedMemoryModel:
    """Fixed memory of a matrix under one sharding of parameters and optimizer state.

    size: bytes of an element in the compute dtype. partial: with fsdp, ranks hold only their shard of the gradients.
    cut_shared: tensor-parallel ranks shard the shared experts. replicas: as in ``Mapping``.
    """

    parallel: ParallelConfig
    sharding: ShardingMode
    size: int
    optimizer: Optimizer
    momentum: bool
    partial: bool
    cut_shared: bool
    replicas: int = 1

    def block(self, block: Block) -> FixedMemory:
        return sum((self.weight(weight) for weight in block.weights if weight.owned), FixedMemory())

    def weight(self, weight: Weight) -> FixedMemory:
        p = self.parallel
        fsdp = self.sharding == "fsdp"
        size = MASTER if weight.operator == "router" and weight.product else self.size
        matrix = weight.product and weight.operator not in ("router", "head")
        # If each tensor-parallel rank has the complete parameter and its own tokens, they sum gradients too.
        replicated = not _is_expert(weight) and not self._is_tp_sharded(weight)
        summing = p.edp if _is_expert(weight) else p.cp * p.dp * (p.tp if replicated else 1)
        ranks = p.cp * p.dp if fsdp and replicated else summing
        state = state_bytes(self.optimizer, self.momentum, matrix)
        shard = ParameterShard(self._local(weight), size, state, summing, ranks, replicas=self.replicas)
        return shard.fixed(self.sharding, self.partial)

    def _local(self, weight: Weight) -> tuple[int, ...]:
        """Return the shape of a rank's shard, output dimension first."""
        p = self.parallel
        if _is_expert(weight):
            columns = _ceil_div(weight.n, p.etp) if weight.name != "down" else weight.n
            rows = _ceil_div(weight.k, p.etp) if weight.name == "down" else weight.k
            return (_ceil_div(weight.copies, p.ep), columns, rows)
        if weight.operator == "embedding":
            return (_ceil_div(weight.k, p.tp), weight.n)
        if not self._is_tp_sharded(weight):
            return (weight.n, weight.k) if weight.k > 1 else (weight.n,)
        if weight.operator == "out" or weight.name == "down":
            return (weight.n, _ceil_div(weight.k, p.tp))
        return (_ceil_div(weight.n, p.tp), weight.k)

    def _is_tp_sharded(self, weight: Weight) -> bool:
        """Return whether the weight is sharded over tensor-parallel ranks.

        All matrices are, except the router, the down-projections to latents, and, without ``cut_shared``, the shared
        experts.
        """
        if weight.operator == "embedding":
            return True
        replicated = weight.operator == "router" or weight.name.endswith("_down") or weight.n == 1
        return weight.product and not replicated and (self.cut_shared or weight.operator != "shared")


@lru_cache(maxsize=4096)
def fixed_parts(
    shape: ModelShape, memory_model: FixedMemoryModel
) -> tuple[FixedMemory, FixedMemory, FixedMemory, FixedMemory]:
    """Return the memory of a dense layer, an MoE layer, the embedding and the head, with gathered weights."""
    head = shape.head_block
    if shape.tie and memory_model.parallel.pp > 1:  # the last stage holds its own copy
        head = replace(head, weights=tuple(replace(weight, owned=True) for weight in head.weights))
    dense = shape.layer_blocks("dense") if shape.dense_layers else ()
    moe = shape.layer_blocks("moe") if shape.moe_layers else ()
    blocks_by_part = (dense, moe, ((shape.embedding_block, 1),), ((head, 1),))
    first, second, third, last = (
        sum((memory_model.block(block) for block, times in blocks for _ in range(times)), FixedMemory())
        for blocks in blocks_by_part
    )
    return first, second, third, last


def fixed_of(parts: StageContents, memory_of_part: Sequence[FixedMemory], gathered: bool) -> FixedMemory:
    """Return the memory of a stage. Without ``gathered``, only its two largest layers hold complete weights."""
    totals = [0] * len(fields(FixedMemory))
    for count, part in zip(parts, memory_of_part, strict=True):
        values = astuple(part)
        for index, value in enumerate(values):
            totals[index] += count * value
    if not gathered:
        dense, moe, first, last = memory_of_part
        freed = [part.weights - part.resident for part in (dense, moe)]
        largest = sorted([freed[0]] * min(parts.dense, 2) + [freed[1]] * min(parts.moe, 2))[-2:]
        resident = parts.dense * dense.resident + parts.moe * moe.resident
        totals[1] = parts.first * first.weights + parts.last * last.weights + resident + sum(largest)
    return FixedMemory(*totals)


def _is_expert(weight: Weight) -> bool:
    return weight.operator == "experts"


def _ceil_div(number: int, parts: int) -> int:
    return -(-number // parts)
