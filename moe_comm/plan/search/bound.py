"""A lower bound of the time of a step, without a replay. A search uses it to order mappings.

Rank r of a pipeline starts when its first micro-batch has been forwarded through the r preceding stages, and then runs
all its passes. Its last backward pass that sends a gradient runs after all its passes except weight passes, because its
other stages depend on them. The gradient then goes back through the r preceding stages. Therefore

    step  >=  max over r (stages before r, forward  +  all passes of r)
    step  >=  max over r (stages before r, forward and back  +  passes of r without weight halves)  +  tail

("back" is the input half if backward is split) with stages of 1 / vpp of a rank's layers, for any order of passes. For
equal stages this is the time of 1f1b: m + (pp - 1) / vpp passes. Where ranks share cores the bound is lower
(``shared_cores``). The tail (gradient sums, weights, optimizer) is that of the step. The bound is strict: a mapping
whose bound is above another mapping's replayed step is slower.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from moe_comm.plan.arrays import Floats
from moe_comm.plan.machine.hardware import Cluster
from moe_comm.plan.model.mapping import Mapping, PlacedMapping
from moe_comm.plan.pipeline.orders import PassKind
from moe_comm.plan.pipeline.stages import plan_stages
from moe_comm.plan.search.request import PlanRequest
from moe_comm.plan.step.blocks import BLOCKS, seconds_of
from moe_comm.plan.step.step import StepModel, neighbours

ROUNDING = 1 - 1e-9
"""Tolerance for sums of the same numbers in a different order."""


class BoundedStepModel(StepModel):
    """A step model with a lower bound of its time."""

    @classmethod
    def of(cls, request: PlanRequest, mapping: Mapping) -> BoundedStepModel:
        placed = PlacedMapping(mapping, request.cluster)
        return cls(request.shape, placed, request.load, request.global_batch)

    def block_seconds(self) -> Floats:
        """Return the seconds of a micro-batch in each of ``BLOCKS``, [blocks, kinds of passes]."""
        return seconds_of(self._blocks)

    def span_bound(self) -> float:
        """Return a lower bound of the seconds of the pipeline."""
        stages, hop = self.stages, self._hop.seconds
        pp, takes = stages.pp, self._pass_seconds + self._exposed_weights
        back = _back(takes, self.placed.mapping)
        back[0] = takes[0, PassKind.BACKWARD]  # a complete backward, of the last micro-batch
        most = (takes * self.passes)[:, : PassKind.WEIGHT].sum(axis=1)
        least = np.array([most[list(stages.stages_of(rank))].sum() for rank in range(pp)])
        own, hops = self.busy, hop * np.arange(pp)
        forward = _before(takes[:pp, PassKind.FORWARD]) + hops
        both = forward + _before(back[:pp]) + hops
        if self.placed.mapping.waits_for_stages:  # ranks wait for the transfers of each pass
            waits = self.micro_batches * neighbours(stages) * hop
            own, least = own + waits, least + waits
            first = hop * (np.arange(pp) > 0)  # the transfer of the first pass is included in both terms
            forward, both = forward - first, both - first
        longest = np.maximum(forward + own, both + least)
        return _least(longest, float(self.busy.mean()), self.placed.cluster) * ROUNDING

    def bound(self) -> float:
        """Return a lower bound of the seconds of the step."""
        busiest = np.flatnonzero(self.busy >= self.busy.max() * ROUNDING).tolist()
        return self.span_bound() + ROUNDING * min(
            self._exposed_tail(rank)[0] + self.weights.optimizer_seconds(rank) for rank in busiest
        )


class PassBounds:
    """Lower bounds from a mapping's degrees, stages, micro-batch, recomputation, overlap and dispatcher alone.

    They cover the passes of the pipeline without transfers between stages, and hold for every sharding. They are cheap,
    because many mappings share the time of a layer.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self._seconds: dict[tuple[object, ...], Floats] = {}

    def of(self, mapping: Mapping) -> float:
        """Return a lower bound of the seconds of a step with ``mapping``, for any sharding."""
        shape, p = self.request.shape, mapping.parallel
        split = mapping.splits
        settings = (mapping.micro_batch, mapping.recompute, mapping.overlap, mapping.dispatcher, split)
        key = (p.tp, p.cp, p.ep, p.etp, *settings)
        if (seconds := self._seconds.get(key)) is None:
            seconds = self._seconds[key] = BoundedStepModel.of(self.request, mapping).block_seconds()
        once, each = _held(shape.layers, shape.dense_layers, p.pp, mapping.schedule, mapping.virtual, split)
        whole = seconds[:, PassKind.BACKWARD]
        later = seconds[:, PassKind.INPUT] + seconds[:, PassKind.WEIGHT]
        shorter = np.minimum(whole, later) if mapping.schedule == "dualpipev" else later if split else whole
        work = np.concatenate([seconds[:, PassKind.FORWARD], whole, _back(seconds, mapping), shorter])
        micro_batches = self.request.global_batch // (p.dp * mapping.micro_batch)
        compute = micro_batches * float((each[: p.pp] @ work).mean())
        return _least((once + micro_batches * each) @ work, compute, self.request.cluster) * ROUNDING


def _least(ranks: Floats, compute: float, cluster: Cluster) -> float:
    """Return the longest of the ranks' seconds.

    Where ranks share cores, a rank is faster while others wait. All ranks together need at least ``compute``, the mean
    of their passes.
    """
    longest = float(ranks.max())
    return longest if cluster.accelerator.shared <= 1 else max(longest / cluster.accelerator.shared, compute)


def _before(takes: Floats) -> Floats:
    """Return the time of the stages before each of the given first stages of ranks, [pp]."""
    return np.asarray(np.cumsum(takes) - takes)


def _back(takes: Floats, mapping: Mapping) -> Floats:
    """Return the seconds of a backward pass until it sends its gradient, [...], from [..., kinds of passes]."""
    whole, half = takes[..., PassKind.BACKWARD], takes[..., PassKind.INPUT]
    return np.minimum(whole, half) if mapping.splits else whole.copy()


@lru_cache(maxsize=1 << 12)
def _held(layers: int, dense: int, pp: int, schedule: str, virtual: int, split: bool) -> tuple[Floats, Floats]:
    """Return the two bounds of each rank as counts of the time of ``BLOCKS``: once per step, and per micro-batch.

    Both arrays are [2 * pp bounds, 4 * blocks]: counts of forward passes, of complete backward passes, of backward
    passes until they send their gradient, and of the shorter of complete and split backward passes. The first stage's
    are complete, or all in the weight half.
    """
    plan = plan_stages(layers, pp, schedule, virtual=virtual)
    counts = np.array(plan.counts, dtype=np.float64)
    early = np.clip(dense - (np.cumsum(counts) - counts), 0, counts)
    held = np.zeros((len(counts), len(BLOCKS)))
    held[0, 0] = held[-1, 3] = 1
    held[:, 1], held[:, 2] = early, counts - early
    own = np.array([held[list(plan.stages_of(rank))].sum(0) for rank in range(pp)])
    before = np.cumsum(held[:pp], axis=0) - held[:pp]
    rest, first = own.copy(), np.zeros_like(own)
    rest[0] -= held[0]
    first[0] = held[0]
    nothing, behind = np.zeros_like(own), np.zeros_like(own)
    behind[1:] = held[0]
    once = [[before, nothing, nothing, nothing], [before, behind, before - behind, nothing]]
    each = [[own, first, nothing, rest], [own, nothing if split else first, rest, nothing]]
    both = tuple(np.concatenate([np.concatenate(bound, axis=1) for bound in of]) for of in (once, each))
    for array in both:
        array.setflags(write=False)
    return both[0], both[1]
