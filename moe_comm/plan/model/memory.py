"""Bytes on each rank of a pipeline's positions, for a model, a mapping and a load: cheap enough for a search.

    weights      in the dtype that computes; with fsdp the gathered ones: the root's and of the two largest layers
    gradients    fp32; with fsdp a rank's own, if nothing accumulates them
    optimizer    fp32 masters and state, cut over tp x cp x dp (experts: edp) as zero1 and fsdp do
    activations  what micro-batches in flight keep, what the largest layer computes again, and the loss
    buffers      of one layer, there while it runs: see ``_Buffers``; and what a split backward keeps beside activations
                 between its halves: see ``split_memory``

The first three are those of ``fixed_memory``, activations those of ``activations``, of the fullest rank of a position:
rows that experts keep are those of the busiest rank (``Load.busiest``). Of a schedule they take what is in flight when
all of a rank's stages together hold the most passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

from moe_comm.plan.model.activations import Activations
from moe_comm.plan.model.fixed_memory import Fixed, Keeping, Optimizer, Parts, fixed_of, fixed_parts
from moe_comm.plan.model.load import Load
from moe_comm.plan.model.mapping import Mapping, Recompute
from moe_comm.plan.model.matrices import MASTER
from moe_comm.plan.model.routing import SUM_BYTES, copies, sends_sums
from moe_comm.plan.model.shape import ModelShape
from moe_comm.plan.model.split_memory import gradients_between
from moe_comm.plan.pipeline.in_flight import Moment, moments
from moe_comm.plan.pipeline.stages import plan_stages


@dataclass(frozen=True)
class Policy:
    """What a run decides beside its mapping.

    reshard: fsdp gives weights back and scatters gradients after each pass (ZeRO-3, as other trainers do), where ours
    keeps the gradients of several micro-batches, and the weights of a pipeline's stages, until the step's last pass.
    cut_shared: tensor-parallel ranks share the shared experts (as in Megatron), where in ours each has all of them, for
    its own tokens.
    """

    optimizer: Optimizer = "adamw"
    momentum: bool = False
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
    stages_of = _layout(shape.layers, shape.dense_layers, parallel.pp, schedule, mapping.virtual)
    split = mapping.splits
    moments_of = moments(schedule, parallel.pp, mapping.virtual, micro_batches)
    size = load.size
    sharding = mapping.sharding if parallel.world > 1 else "replicate"  # on one rank there is nobody to share with
    partial = sharding == "fsdp" and (policy.reshard or (parallel.pp == 1 and micro_batches == 1))
    gathered = sharding != "fsdp" or (parallel.pp > 1 and (split or not policy.reshard))
    keeping = Keeping(parallel, sharding, size, policy.optimizer, policy.momentum, partial, policy.cut_shared)
    fixed = fixed_parts(shape, keeping)
    tokens = _tokens(mapping, load)
    estimate = _estimate(shape, size, parallel.tp, mapping.recompute, load.busiest(parallel.ep), parallel.etp)
    halfway = gradients_between(estimate, mapping.fuses) if split else (0.0, 0.0)
    losses = estimate.loss(math.ceil(tokens)) * (micro_batches if schedule == "gpipe" and parallel.pp > 1 else 1)
    buffers = _Buffers.of(shape, mapping, load, size, host)
    every: dict[tuple[Parts, int], tuple[Fixed, float, int]] = {}
    found = []
    for position, ((parts, stages), some) in enumerate(zip(stages_of, moments_of, strict=True)):
        if (parts, len(stages)) not in every:
            has = (parts.dense, parts.moe)
            largest = max((one.params for one, layers in zip(fixed, has, strict=False) if layers), default=0)
            every[parts, len(stages)] = (
                fixed_of(parts, fixed, gathered),
                parts.last * losses + tokens * estimate.again(*has),
                round(buffers.at(parts, len(stages)) + (MASTER * largest if partial else 0)),
            )
        held, beside, passing = every[parts, len(stages)]
        activations, waiting = most_kept(estimate, stages, some, halfway)
        found.append(
            RankMemory(
                position,
                held.params,
                held.weights,
                held.gradients,
                held.optimizer,
                round(beside + tokens * activations),
                passing + round(tokens * waiting),
                held.at_update,
            )
        )
    return tuple(found)


def most_kept(
    estimate: Activations, stages: Sequence[Parts], moments: Sequence[Moment], halfway: tuple[float, float]
) -> tuple[float, float]:
    """Bytes per token on a rank with these stages when it holds the most: what forward left, and what the first halves
    of split backward passes left (``halfway``, of a dense and of an MoE layer)."""
    flying = [estimate.kept(dense, moe, last) for dense, moe, _, last in stages]
    between = [dense * halfway[0] + moe * halfway[1] for dense, moe, _, _ in stages]
    return max(((sum(map(mul, n, flying)), sum(map(mul, late, between))) for n, late in moments), key=sum)


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


# ---- activations and buffers


def _tokens(mapping: Mapping, load: Load) -> float:
    """A rank's own of a micro-batch."""
    return mapping.micro_batch * load.seq_len / (mapping.parallel.cp * mapping.parallel.tp)


@lru_cache(maxsize=4096)
def _estimate(shape: ModelShape, size: int, tp: int, recompute: Recompute, rows: float, etp: int) -> Activations:
    return Activations(shape, size, tp, recompute, rows=rows, etp=etp)


@dataclass(frozen=True)
class _Buffers:
    """Bytes that are there while one layer runs, beside what is kept.

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
