"""A lower bound of the time of a step, without a replay. A search uses it to order mappings.

Rank r of a pipeline starts when its first micro-batch has been forwarded through the r preceding stages, and then runs
all its passes. Its last backward pass that sends a gradient runs after all its passes except weight passes, because its
other stages depend on them. The gradient then goes back through the r preceding stages. Therefore

    step  >=  max over r (stages before r, forward  +  all passes of r)
    step  >=  max over r (stages before r, forward and back  +  passes of r without weight halves)  +  tail

("back" is the input half if backward is split) with stages of 1 / vpp of a rank's layers, for any order of passes. For
equal stages this is the time of 1f1b: m + (pp - 1) / vpp passes. Where ranks share cores the bound is lower
(``_longest_rank_seconds``). The tail (gradient sums, weights, optimizer) is that of the step. The bound is strict: a
mapping whose bound is above another mapping's replayed step is slower.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from moe_comm.topology.pipeline import plan_stages
from moe_plan.arrays import Floats
from moe_plan.machine.hardware import Cluster
from moe_plan.model.mapping import Mapping, PlacedMapping
from moe_plan.orders import PassKind
from moe_plan.search.request import PlanRequest
from moe_plan.step.blocks import BLOCKS, seconds_of
from moe_plan.step.step import StepModel, neighbours

ROUNDING = 1 - 1e-9
"""Tolerance for sums of the same numbers in a different order."""


class BoundedStepModel(StepModel):
    """A step model with a lower bound of its time."""

    @classmethod
    def of(cls, request: PlanRequest, mapping: Mapping) -> BoundedStepModel:
        placed = PlacedMapping(mapping, request.cluster)
        return cls(request.shape, placed, request.load, request.global_batch, request.policy)

    def block_seconds(self) -> Floats:
        """Return the seconds of a micro-batch in each of ``BLOCKS``, [blocks, kinds of passes]."""
        return seconds_of(self._blocks)

    def span_bound(self) -> float:
        """Return a lower bound of the seconds of the pipeline."""
        stages, hop = self.stages, self._hop.seconds
        pp, pass_s = stages.pp, self._pass_seconds + self._exposed_weights
        gradient_s = _seconds_until_gradient(pass_s, self.placed.mapping)
        gradient_s[0] = pass_s[0, PassKind.BACKWARD]  # a complete backward, of the last micro-batch
        until_last_gradient = (pass_s * self.passes)[:, : PassKind.WEIGHT].sum(axis=1)
        own_until_gradient = np.array([until_last_gradient[list(stages.stages_of(rank))].sum() for rank in range(pp)])
        own, hops = self.busy, hop * np.arange(pp)
        forward = _seconds_of_earlier(pass_s[:pp, PassKind.FORWARD]) + hops
        round_trip = forward + _seconds_of_earlier(gradient_s[:pp]) + hops
        if self.placed.mapping.waits_for_stages:  # ranks wait for the transfers of each pass
            waits = self.micro_batches * neighbours(stages) * hop
            own, own_until_gradient = own + waits, own_until_gradient + waits
            first = hop * (np.arange(pp) > 0)  # the transfer of the first pass is included in both terms
            forward, round_trip = forward - first, round_trip - first
        longest = np.maximum(forward + own, round_trip + own_until_gradient)
        return _longest_rank_seconds(longest, float(self.busy.mean()), self.placed.cluster) * ROUNDING

    def bound(self) -> float:
        """Return a lower bound of the seconds of the step."""
        busiest = np.flatnonzero(self.busy >= self.busy.max() * ROUNDING).tolist()
        return self.span_bound() + ROUNDING * min(
            self._exposed_tail(rank)[0] + self.weights.optimizer_seconds(rank) for rank in busiest
        )


class PassBounds:
    """Lower bounds from a mapping's degrees, stages, micro-batch, recomputation, overlap and dispatcher alone.

    They cover the passes of the pipeline without transfers between stages, and hold for every sharding. They are cheap,
    because the time of a layer is computed once for all mappings with equal settings.
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
        per_step, per_micro_batch = _block_counts(
            shape.layers, shape.dense_layers, p.pp, mapping.schedule, mapping.virtual, split
        )
        whole = seconds[:, PassKind.BACKWARD]
        later = seconds[:, PassKind.INPUT] + seconds[:, PassKind.WEIGHT]
        shorter = np.minimum(whole, later) if mapping.schedule == "dualpipev" else later if split else whole
        until_gradient = _seconds_until_gradient(seconds, mapping)
        work = np.concatenate([seconds[:, PassKind.FORWARD], whole, until_gradient, shorter])
        micro_batches = self.request.global_batch // (p.dp * mapping.micro_batch)
        compute = micro_batches * float((per_micro_batch[: p.pp] @ work).mean())
        rank_seconds = (per_step + micro_batches * per_micro_batch) @ work
        return _longest_rank_seconds(rank_seconds, compute, self.request.cluster) * ROUNDING


def _longest_rank_seconds(ranks: Floats, compute: float, cluster: Cluster) -> float:
    """Return a lower bound of the step from the ranks' lower bounds: the longest of them.

    Where ranks share cores, a rank is faster while others wait. All ranks together need at least ``compute``, the mean
    of their passes.
    """
    longest = float(ranks.max())
    return longest if cluster.accelerator.shared <= 1 else max(longest / cluster.accelerator.shared, compute)


def _seconds_of_earlier(stage_s: Floats) -> Floats:
    """Return the seconds of the stages before each stage, given the seconds of the first stage of each rank, [pp]."""
    return np.asarray(np.cumsum(stage_s) - stage_s)


def _seconds_until_gradient(pass_s: Floats, mapping: Mapping) -> Floats:
    """Return the seconds of a backward pass until it sends its gradient, [...], from [..., kinds of passes]."""
    whole, input_half = pass_s[..., PassKind.BACKWARD], pass_s[..., PassKind.INPUT]
    return np.minimum(whole, input_half) if mapping.splits else whole.copy()


@lru_cache(maxsize=1 << 12)
def _block_counts(layers: int, dense: int, pp: int, schedule: str, virtual: int, split: bool) -> tuple[Floats, Floats]:
    """Return how often each rank's two bounds count the time of each of ``BLOCKS``: per step, and per micro-batch.

    Both arrays are [2 * pp bounds, 4 * blocks]. The four groups of columns count forward passes, complete backward
    passes, backward passes until they send their gradient, and the shorter of complete and split backward passes. The
    backward of the first stage is complete, or all in the weight half.
    """
    plan = plan_stages(layers, pp, schedule, virtual=virtual)
    counts = np.array(plan.counts, dtype=np.float64)
    dense_layers = np.clip(dense - (np.cumsum(counts) - counts), 0, counts)
    blocks_of_stage = np.zeros((len(counts), len(BLOCKS)))
    blocks_of_stage[0, 0] = blocks_of_stage[-1, 3] = 1
    blocks_of_stage[:, 1], blocks_of_stage[:, 2] = dense_layers, counts - dense_layers
    own = np.array([blocks_of_stage[list(plan.stages_of(rank))].sum(0) for rank in range(pp)])
    before = np.cumsum(blocks_of_stage[:pp], axis=0) - blocks_of_stage[:pp]
    # Blocks of a rank (own) in the first stage (first) and in its other stages (rest).
    rest, first = own.copy(), np.zeros_like(own)
    rest[0] -= blocks_of_stage[0]
    first[0] = blocks_of_stage[0]
    # Blocks before a rank (before), and those of them in the first stage (before_first).
    nothing, before_first = np.zeros_like(own), np.zeros_like(own)
    before_first[1:] = blocks_of_stage[0]
    per_step = [[before, nothing, nothing, nothing], [before, before_first, before - before_first, nothing]]
    per_micro_batch = [[own, first, nothing, rest], [own, nothing if split else first, rest, nothing]]
    bounds = tuple(
        np.concatenate([np.concatenate(columns, axis=1) for columns in counted])
        for counted in (per_step, per_micro_batch)
    )
    for array in bounds:
        array.setflags(write=False)
    return bounds[0], bounds[1]
