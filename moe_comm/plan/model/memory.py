"""Bytes on each rank of a pipeline's positions, for a model, a mapping and a load: cheap enough for a search.

    weights      in the dtype that computes; with fsdp the gathered ones: the root's and of the two largest layers
    gradients    fp32; with fsdp a rank's own, if nothing accumulates them
    optimizer    fp32 masters and state, cut over tp x cp x dp (experts: edp) as zero1 and fsdp do
    activations  what micro-batches in flight keep, what the largest layer computes again, and the loss
    buffers      of one layer, there while it runs: see ``_Buffers``; and what a split backward keeps beside activations
                 between its halves: see ``split_memory``

The first four are those of ``moe_comm.train.memory`` (its tables say what is kept of what), of the fullest rank of a
position. They differ from it where it takes routing to be even: here rows that experts keep are those of the busiest
rank (``Load.busiest``), and etp ranks each have all rows of the experts that they share. Of a schedule they take what
is in flight when all of a rank's stages together hold the most passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

from moe_comm.layers.config import AttentionConfig, TransformerConfig
from moe_comm.layers.moe_config import MoEConfig, ZeroExperts
from moe_comm.layers.router import RouterConfig
from moe_comm.plan.model.fixed_memory import Keeping, Parts, fixed_of, fixed_parts
from moe_comm.plan.model.load import Load
from moe_comm.plan.model.mapping import Mapping, Recompute
from moe_comm.plan.model.shape import ModelShape
from moe_comm.plan.model.split_memory import Moment, gradients_between, moments
from moe_comm.plan.step.dispatching import SUM_BYTES, copies, sends_sums
from moe_comm.plan.step.split_backward import splits
from moe_comm.train.memory import MASTER, Activations, Fixed, in_flight
from moe_comm.train.optim import OptimizerOptions
from moe_comm.train.pipeline.schedules import check_micro_batches
from moe_comm.train.pipeline.stages import plan_stages

_ADAMW = OptimizerOptions("adamw")
_TOKENS = 1 << 16  # what bytes per token are worked out for, so that rounding to whole bytes does not show


@dataclass(frozen=True)
class Policy:
    """What a run decides beside its mapping.

    reshard: fsdp gives weights back and scatters gradients after each pass (ZeRO-3, as other trainers do), where ours
    keeps the gradients of several micro-batches, and the weights of a pipeline's stages, until the step's last pass.
    cut_shared: tensor-parallel ranks share the shared experts (as in Megatron), where in ours each has all of them, for
    its own tokens.
    """

    optimizer: OptimizerOptions = _ADAMW
    reshard: bool = False
    cut_shared: bool = False


POLICY = Policy()


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the fullest rank of a pipeline position; parameters: elements.

    at_update: sums of gradients, only while weights are updated, when activations and buffers are gone.
    """

    position: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    at_update: int

    @property
    def total(self) -> int:
        """At its highest."""
        return self.weights + self.gradients + self.optimizer + max(self.activations + self.buffers, self.at_update)

    @property
    def largest(self) -> str:
        """The term with the most bytes."""
        terms = {name: getattr(self, name) for name in ("weights", "gradients", "optimizer", "activations", "buffers")}
        if self.at_update > self.activations + self.buffers:
            terms["at_update"] = self.at_update
        return max(terms, key=lambda name: terms[name])


def memory(
    shape: ModelShape,
    mapping: Mapping,
    load: Load,
    global_batch: int,
    policy: Policy = POLICY,
    host: int | None = None,
) -> tuple[RankMemory, ...]:
    """What the ranks of each pipeline position hold, in order of positions.

    Args:
        global_batch: sequences of a step.
        host: accelerators of one host; None: all are on one.

    Raises:
        ConfigError: the batch cannot be cut so, or the schedule cannot run with these stages or micro-batches.
    """
    parallel, micro_batches = mapping.parallel, mapping.micro_batches(global_batch)
    schedule = mapping.schedule
    check_micro_batches(schedule, parallel.pp, micro_batches)
    stages_of = _layout(shape.layers, shape.dense_layers, parallel.pp, schedule, mapping.virtual)
    split = splits(mapping)
    moments_of = (moments if split else _one_moment)(schedule, parallel.pp, mapping.virtual, micro_batches)
    size = load.size
    sharding = mapping.sharding if parallel.world > 1 else "replicate"  # on one rank there is nobody to share with
    partial = sharding == "fsdp" and (policy.reshard or (parallel.pp == 1 and micro_batches == 1))
    gathered = sharding != "fsdp" or (parallel.pp > 1 and (split or not policy.reshard))
    fixed = fixed_parts(shape, Keeping(parallel, sharding, size, policy.optimizer, partial, policy.cut_shared))
    kept, whole, head, loss = _kept(shape, mapping, load, size)
    halfway = (0.0, 0.0)
    if split:
        tokens = _tokens(mapping, load)
        halfway = gradients_between(shape, mapping, load, tokens, size)
    losses = loss * (micro_batches if schedule == "gpipe" and parallel.pp > 1 else 1)
    buffers = _Buffers.of(shape, mapping, load, size, host)
    every: dict[tuple[Parts, int], tuple[Fixed, float, int]] = {}
    found = []
    for position, ((parts, stages), some) in enumerate(zip(stages_of, moments_of, strict=True)):
        if (parts, len(stages)) not in every:
            has = (parts.dense, parts.moe)
            again = max((w - k for w, k, layers in zip(whole, kept, has, strict=True) if layers), default=0.0)
            largest = max((one.params for one, layers in zip(fixed, has, strict=False) if layers), default=0)
            every[parts, len(stages)] = (
                fixed_of(parts, fixed, gathered),
                parts.last * losses + again,
                round(buffers.at(parts, len(stages)) + (MASTER * largest if partial else 0)),
            )
        held, beside, passing = every[parts, len(stages)]
        flying = [dense * kept[0] + moe * kept[1] + last * head for dense, moe, _, last in stages]
        between = [dense * halfway[0] + moe * halfway[1] for dense, moe, _, _ in stages]
        activations, waiting = max(
            ((sum(map(mul, n, flying)), sum(map(mul, late, between))) for n, late in some), key=sum
        )
        found.append(
            RankMemory(
                position,
                held.params,
                held.weights,
                held.gradients,
                held.optimizer,
                round(beside + activations),
                passing + round(waiting),
                held.at_update,
            )
        )
    return tuple(found)


def worst(memories: Sequence[RankMemory]) -> RankMemory:
    """The position whose ranks hold the most."""
    return max(memories, key=lambda one: one.total)


@lru_cache(maxsize=4096)
def _layout(
    layers: int, dense: int, pp: int, schedule: str, virtual: int
) -> tuple[tuple[Parts, tuple[Parts, ...]], ...]:
    """By position, what all of its stages hold, and each of them."""
    plan = plan_stages(layers, pp, schedule, virtual=virtual)
    found = []
    for rank in range(pp):
        stages = []
        for stage in plan.stages_of(rank):
            ids = plan.layers_of(stage)
            early = sum(layer < dense for layer in ids)
            stages.append(Parts(early, len(ids) - early, int(plan.is_first(stage)), int(plan.is_last(stage))))
        found.append((Parts(*map(sum, zip(*stages, strict=True))), tuple(stages)))
    return tuple(found)


@lru_cache(maxsize=4096)
def _one_moment(schedule: str, pp: int, virtual: int, micro_batches: int) -> tuple[tuple[Moment, ...], ...]:
    nothing = (0,) * virtual
    return tuple(((in_flight(schedule, pp, virtual, rank, micro_batches), nothing),) for rank in range(pp))


# ---- activations and buffers


def _kept(
    shape: ModelShape, mapping: Mapping, load: Load, size: int
) -> tuple[tuple[float, float], tuple[float, float], float, int]:
    """Bytes for a micro-batch: (kept of a dense, an MoE layer), (the same without recompute), head, loss."""
    p = mapping.parallel
    tokens = _tokens(mapping, load)
    dense, moe, head = _per_token(shape, size, p.tp, mapping.recompute)
    all_dense, all_moe, _ = _per_token(shape, size, p.tp, "none")
    # Rows in and out of D elements, and 2 F between them, are counted once each; beyond that:
    busiest = load.busiest(p.ep)
    more = 2 * shape.chosen * size * ((busiest * p.etp - 1) * shape.hidden + (busiest - 1) * shape.ffn)
    all_moe += more
    moe += more if mapping.recompute != "full" else 0
    loss = Activations(_config(shape), math.ceil(tokens), size, p.tp).loss()
    return (dense * tokens, moe * tokens), (all_dense * tokens, all_moe * tokens), head * tokens, loss


def _tokens(mapping: Mapping, load: Load) -> float:
    """A rank's own of a micro-batch."""
    return mapping.micro_batch * load.seq_len / (mapping.parallel.cp * mapping.parallel.tp)


@lru_cache(maxsize=4096)
def _per_token(shape: ModelShape, size: int, tp: int, recompute: Recompute) -> tuple[float, float, float]:
    """Bytes kept of a dense layer, an MoE layer and the head per token of a rank's own, with even routing."""
    estimate = Activations(_config(shape), _TOKENS, size, tp, recompute)
    dense = estimate.kept([0], False) if shape.dense_layers else 0
    moe = estimate.kept([1], False) if shape.moe_layers else 0
    return dense / _TOKENS, moe / _TOKENS, estimate.kept([], True) / _TOKENS


@lru_cache(maxsize=256)
def _config(shape: ModelShape) -> TransformerConfig:
    """One layer of each kind, dense first, as ``moe_comm.layers`` describes it."""
    heads = shape.heads if shape.latent is not None else shape.kv_heads
    attention = AttentionConfig(
        shape.hidden, shape.heads, heads, max(1, shape.head_dim), qk_norm=shape.qk_norm, mla=shape.latent
    )
    zero = ZeroExperts(identity=shape.zero_experts)
    router = RouterConfig(max(1, shape.experts) + shape.zero_experts, max(1, shape.top_k))
    return TransformerConfig(
        vocab=shape.vocab,
        hidden=shape.hidden,
        layers=2,
        attention=attention,
        moe=MoEConfig(shape.hidden, max(1, shape.ffn), router, zero_experts=zero, shared_ffn=shape.shared_ffn),
        max_length=1,
        dense_layers=(0,) if shape.dense_ffn else (),
        dense_ffn=shape.dense_ffn,
        parallel_block=shape.parallel_block,
        shortcut=shape.shortcut,
    )


@dataclass(frozen=True)
class _Buffers:
    """Bytes that are there while one layer runs, beside what is kept; none of it is in ``moe_comm.train.memory``.

    dispatch: what goes out and what comes back (``_dispatched``); nothing if experts are all here.
    moe, dense: gradients of a layer's feed-forward block on their way back: of rows in and out, and of what lies
    between them. gathered: input of a block over tp, and its gradient. swapped: queries, keys and values over cp,
    before and after. hop: a micro-batch's activations for one neighbour in the pipeline, there and its gradients back.
    """

    dispatch: float
    moe: float
    dense: float
    gathered: float
    swapped: float
    hop: float

    @classmethod
    def of(cls, shape: ModelShape, mapping: Mapping, load: Load, size: int, host: int | None) -> _Buffers:
        p, tokens = mapping.parallel, _tokens(mapping, load)
        row = shape.hidden * size
        rows = tokens * shape.chosen * load.busiest(p.ep) * p.etp
        inner = 3 if shape.gated else 2
        dense = tokens * ((3 if shape.dense_gated else 2) * shape.dense_ffn * size + 2 * p.tp * row)
        return cls(
            dispatch=_dispatched(shape, mapping, load, size, host) * tokens * row if p.ep * p.etp > 1 else 0.0,
            moe=rows * (2 * row + inner * shape.ffn / p.etp * size),
            dense=dense if shape.dense_ffn else 0.0,
            gathered=2 * tokens * p.tp * row if p.tp > 1 else 0.0,
            swapped=2 * tokens * shape.qkv_width * size if p.cp > 1 else 0.0,
            hop=2 * tokens * row,
        )

    def at(self, parts: Parts, stages: int) -> float:
        """Of the largest layer at a position of so many stages, and between these and their neighbours."""
        layer = max(self.dispatch + self.moe if parts.moe else 0.0, self.dense if parts.dense else 0.0, self.swapped)
        return self.gathered + layer + self.hop * (2 * stages - parts.first - parts.last)


def _dispatched(shape: ModelShape, mapping: Mapping, load: Load, size: int, host: int | None) -> float:
    """Rows for each token of a rank that are there beside the experts' own, of dispatch and of combine together.

    all_to_all: rows sent and received, twice. all_gather: every rank's tokens and the rows picked from them; then rows
    there and here, or as sums both in fp32. hierarchical: twice rows sent and received inside the host, these in their
    places, and copies from other hosts.
    """
    p, kept = mapping.parallel, min(1.0, load.capacity or 1.0)
    ranks = p.ep * p.etp
    sent, rows = (shape.chosen * share * p.etp for share in (kept, load.busiest(p.ep)))
    if mapping.dispatcher == "all_gather":
        sums = sends_sums("all_gather", shape, p.ep, size)
        return ranks + rows + (SUM_BYTES / size * (ranks + rows) if sums else sent + rows)
    hosts = 1 if host is None else -(-ranks // host)
    if mapping.dispatcher == "hierarchical" and hosts > 1:
        return 2 * (sent + 2 * rows + copies(shape, hosts, kept))
    return 2 * (sent + rows)
