"""Memory of one rank, from descriptions alone: nothing is built or allocated.

What a parameter of N elements here (after tp, ep and etp have cut it), of which M are this rank's to update, takes in
bytes; c is the size of the dtype it computes in, state that of the optimizer's state per element (``state_bytes``):

                weights   gradients   masters and state      at the update
    replicate   c N       4 N         4 N if c < 4, state N  4 N if c < 4 (their sum over ranks)
    zero1       c N       4 N         4 M + state M          4 M
    fsdp        c N *     4 N **      4 M + state M          4 M

    *  gathered: all with a pipeline, else those of the root and of the two largest blocks
    ** until the last micro-batch's backward; with one micro-batch and no pipeline 4 M

M is N over the ranks that hold the same, rounded up as ``deal`` does; where nobody else does, zero1 is replicate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

import torch
from torch import nn

from moe_comm.layers.config import AttentionConfig, Recompute, TransformerConfig
from moe_comm.layers.cross_entropy import CHUNK_ELEMENTS
from moe_comm.topology import Sharding, deal
from moe_comm.train.optim.base import OptimizerOptions, is_matrix
from moe_comm.train.parallel.fsdp import DENSE_AXES, EXPERT_AXES
from moe_comm.train.parallel.owned import Owned
from moe_comm.train.parallel.strategy import Strategy

MASTER = 4
"""Bytes of an element in fp32."""
_NOTHING = nn.Parameter(torch.empty(0, device="meta"))

Place = Mapping[str, int]


@dataclass(frozen=True)
class Keeping:
    """How a run keeps its parameters.

    itemsize: bytes of an element in the dtype that computes. full_precision: parameters that compute in fp32 anyway.
    optimizer: its kind and options. accumulates: a step has several micro-batches. pipeline: there are several stages.
    """

    strategy: Strategy
    itemsize: int
    full_precision: tuple[str, ...]
    optimizer: OptimizerOptions
    accumulates: bool
    pipeline: bool

    def itemsize_of(self, name: str) -> int:
        return MASTER if any(fnmatchcase(name, pattern) for pattern in self.full_precision) else self.itemsize

    def state_bytes(self, name: str, sharding: Sharding) -> int:
        """Bytes of optimizer state per element."""
        o = self.optimizer
        if o.kind == "sgd":
            return MASTER if o.momentum else 0
        if o.kind == "muon" and not any(fnmatchcase(name, pattern) for pattern in o.muon_excludes):
            return MASTER if is_matrix(Owned(name, _NOTHING, sharding)) else 2 * MASTER
        return 2 * MASTER


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


def fixed_memory(shardings: Mapping[str, Sharding], place: Place, sizes: Place, keeping: Keeping) -> Fixed:
    """What the rank at ``place`` keeps of the parameters of its stages, which are named as in the whole model."""
    total = Fixed()
    gathered: dict[str, int] = {}
    for name, sharding in shardings.items():
        part = _parameter(name, sharding, place, sizes, keeping)
        total += part
        unit = ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""
        gathered[unit] = gathered.get(unit, 0) + part.weights
    if _spreads(keeping, sizes) == "fsdp" and not keeping.pipeline:
        root = gathered.pop("", 0)
        total = Fixed(
            total.params,
            root + sum(sorted(gathered.values())[-2:]),
            total.gradients,
            total.optimizer,
            total.at_update,
        )
    return total


def _spreads(keeping: Keeping, sizes: Place) -> Strategy:
    """FSDP needs a process group: on one rank everything is plain."""
    return "replicate" if math.prod(sizes[axis] for axis in ("tp", "cp", "dp", "pp")) == 1 else keeping.strategy


def _parameter(name: str, sharding: Sharding, place: Place, sizes: Place, keeping: Keeping) -> Fixed:
    strategy = _spreads(keeping, sizes)
    cut = tuple(sorted((split.axis, place[split.axis], sizes[split.axis]) for split in sharding.splits))
    shape = _local_shape(sharding, cut)
    size, c = math.prod(shape), keeping.itemsize_of(name)
    state = keeping.state_bytes(name, sharding)
    owners: Sequence[str] = sharding.sum_axes
    if strategy == "fsdp":
        owners = EXPERT_AXES if sharding.expert else DENSE_AXES
    parts = math.prod(sizes[axis] for axis in owners)
    if strategy == "replicate" or not shape or not size or (strategy == "zero1" and parts == 1):
        apart = size * MASTER if c < MASTER else 0
        summed = apart if math.prod(sizes[axis] for axis in sharding.sum_axes) > 1 else 0
        return Fixed(size, c * size, MASTER * size, apart + state * size, summed)
    index = 0
    for axis in reversed(owners):
        index = index * sizes[axis] + place[axis]
    dealt, own = (math.prod(deal(shape, at, parts, strategy == "fsdp").shape(shape)) for at in (0, index))
    partial = strategy == "fsdp" and not (keeping.accumulates or keeping.pipeline)
    gradients = MASTER * (dealt if partial else size)
    return Fixed(size, c * size, gradients, MASTER * dealt + state * own, 0 if partial else MASTER * dealt)


@lru_cache(maxsize=65536)
def _local_shape(sharding: Sharding, cut: tuple[tuple[str, int, int], ...]) -> tuple[int, ...]:
    return sharding.local_shape({axis: at for axis, at, _ in cut}, {axis: size for axis, _, size in cut})


def in_flight(schedule: str, pp: int, virtual: int, rank: int, micro_batches: int) -> tuple[int, ...]:
    """For each stage of pipeline rank ``rank``, how many micro-batches wait there for their backward.

    When the rank holds the most, as torch orders the schedules; a split backward is over with the weights' half.
    """
    if pp == 1:
        return (1,) * virtual
    # Rounds, in which each of a rank's stages in turn takes as many micro-batches.
    per_round = micro_batches // max(1, micro_batches // pp)
    behind = pp - 1 - rank
    held = {
        "gpipe": (micro_batches,),
        "1f1b": (behind + 1,),
        "interleaved_1f1b": _rounds(virtual, per_round, (virtual - 1) * per_round + 2 * behind + 1, 2 * behind + 1),
        "zero_bubble": _rounds(virtual, per_round, (virtual - 1) * per_round + pp, per_round),
        "zbv": (2 * pp - 1 - rank, rank + 1),
        "dualpipev": (2 * pp - rank, rank + 1),
    }[schedule]
    return tuple(min(micro_batches, count) for count in held)


def _rounds(virtual: int, per_round: int, total: int, last: int) -> tuple[int, ...]:
    """A round in each stage, up to ``last`` in the last one, and what is left of ``total`` in the first."""
    later = [per_round] * (virtual - 2) + [min(per_round, last)] * (virtual > 1)
    return (total - sum(later), *later)


@dataclass(frozen=True)
class Activations:
    """Estimates what a stage keeps for backward, by counting the tensors that autograd saves; balanced routing.

    Per token of a rank's own, in elements, with D hidden, K top_k, F ffn, E experts; * what recompute "selective" (and
    "full") does not keep, ** what an MoE layer with ``recompute`` does not:

        norm         D input, D* in fp32
        attention    tp D* normalised and gathered; q, k, v and output; log-sum-exp; where they have norms, q and k*
        latent       the same with q, k and v of all heads, and three times the latents
        MoE          D* normalised, 2 K D rows in and out, 2 K F**, the router's input* and 3 E scores in fp32
        dense        tp D* normalised and gathered, 2 F, F*
        shortcut     the MoE's, two attentions, two dense blocks and four norms
        shared       2 F, F*
        head         2 D, D in fp32

    With "full" a layer keeps its input, D. Beside what is in flight, one layer is held whole while its backward runs.

    tokens: of a rank's own in a micro-batch. itemsize: bytes of an element. tp: ranks that share heads.
    native_norms: norms run in the native core, as on the CPU, and keep no fp32 copy.
    """

    config: TransformerConfig
    tokens: int
    itemsize: int
    tp: int = 1
    recompute: Recompute = "none"
    native_norms: bool = False

    def kept(self, layers: Sequence[int], has_head: bool) -> int:
        """Bytes for one pass of one micro-batch through a stage, without ``loss``."""
        total = sum(self._layer(layer, self.recompute) for layer in layers)
        head = self.config.hidden * (2 * self.itemsize + self._wide) if has_head else 0
        return round(self.tokens * (total + head))

    def loss(self) -> int:
        """Bytes for a loss whose backward has not run: the gradient of the head's weight; and a chunk of logits."""
        rows = math.ceil(self.config.vocab / self.tp)
        logits = min(CHUNK_ELEMENTS, self.tokens * self.tp * rows)
        return MASTER * (rows * self.config.hidden + logits)

    def transient(self, layers: Sequence[int]) -> int:
        """Bytes that the backward of the stage's largest layer adds by computing again what was not kept."""
        again = (self._layer(layer, "none") - self._layer(layer, self.recompute) for layer in layers)
        return round(self.tokens * max(again, default=0.0))

    def _layer(self, layer: int, recompute: Recompute) -> float:
        """Bytes per token."""
        c, config = self.itemsize, self.config
        if recompute == "full":
            return c * config.hidden
        everything = recompute == "none"
        norms = 1 if config.parallel_block else 2
        has_experts = layer not in config.dense_layers
        if has_experts and config.shortcut:
            attentions, denses, norms = 2, 2, 4
        else:
            attentions, denses = 1, int(not has_experts)
        inputs = norms * c * config.hidden
        attention = _attention(config.attention, c, everything, self._wide)
        if everything:
            inputs += norms * self._wide * config.hidden
            inputs += attentions * c * config.hidden * (self.tp if config.attention.mla is None else 1)
        experts = self._moe(everything) if has_experts else 0.0
        return inputs + attentions * attention + denses * self._dense(everything) + experts

    @property
    def _wide(self) -> int:
        """Bytes of an element that a norm keeps in fp32."""
        return 0 if self.native_norms else MASTER

    def _dense(self, everything: bool) -> float:
        kept = 2 * self.config.dense_ffn
        if everything:
            kept += self.tp * self.config.hidden + self.config.dense_ffn
        return self.itemsize * kept

    def _moe(self, everything: bool) -> float:
        moe, c = self.config.moe, self.itemsize
        share = moe.num_experts / moe.router.num_experts
        if moe.capacity is not None:
            share *= min(1.0, moe.capacity.factor)
        kept = 2 * moe.router.top_k * share * moe.hidden + 2 * moe.shared_ffn
        if not moe.recompute:
            kept += 2 * moe.router.top_k * share * moe.ffn
        if everything:
            beside = self.config.parallel_block or self.config.shortcut  # others keep the same input
            kept += moe.shared_ffn + (0 if beside else moe.hidden)
        scores = 3 * MASTER * moe.router.num_experts
        return c * kept + scores + (MASTER * moe.hidden if everything and c < MASTER else 0)


def _attention(config: AttentionConfig, c: int, everything: bool, wide: int) -> float:
    """Bytes per token of what lies between the norm and the output projection."""
    heads, mla = config.heads, config.mla
    if mla is not None:
        width = mla.nope_dim + mla.rope_dim
        latents = 3 * ((mla.q_rank or 0) + mla.kv_rank) + 2 * mla.rope_dim
        latents += config.hidden if mla.q_rank is None else 0
        return c * (heads * (2 * width + 2 * mla.v_dim) + latents) + MASTER * heads
    queries, keys = heads * config.head_dim, config.kv_heads * config.head_dim
    kept = c * (2 * queries + 2 * keys) + MASTER * heads
    if config.qk_norm == "full":
        kept += (MASTER + wide) * (queries + keys)
    elif config.qk_norm == "head" and everything:
        kept += max(wide, c) * (queries + keys)
    return kept
