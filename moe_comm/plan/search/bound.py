"""How fast a mapping can be at best, without replaying it: what a search goes by.

Rank r of a pipeline starts when its first micro-batch has gone forward through the r stages before it, and runs all of
its own passes. Its last backward that gives a gradient to the stage before comes behind all of its passes but those
of weights, since whatever its other stages do is needed for that; then it goes back through the r stages. So

    step  >=  max over r (stages before r, forward  +  all passes of r)
    step  >=  max over r (stages before r, forward and back  +  passes of r but for weights' halves)  +  what follows

(back: the input's half where a backward is split) with stages of 1 / vpp of a rank's layers, whatever the order of
passes; for equal stages that is what 1f1b takes: m + (pp - 1) / vpp passes. Where ranks share cores it is less
(``shared_cores``). What follows (sums of gradients, weights, the optimizer) is the step's own. None of it is an
estimate: a mapping whose bound is above another's replayed step is slower.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from moe_comm.plan.arrays import Floats
from moe_comm.plan.machine.hardware import Cluster
from moe_comm.plan.model.mapping import Mapping, Place
from moe_comm.plan.pipeline.orders import PassKind
from moe_comm.plan.pipeline.stages import plan_stages
from moe_comm.plan.search.question import Question
from moe_comm.plan.step.blocks import BLOCKS, seconds_of
from moe_comm.plan.step.step import StepModel, neighbours

ROUNDING = 1 - 1e-9
"""Sums of the same numbers in another order are the same but for less than that."""


class Bounded(StepModel):
    """A step's model that also says below which time it cannot come."""

    @classmethod
    def of(cls, question: Question, mapping: Mapping) -> Bounded:
        place = Place(mapping, question.cluster)
        return cls(question.shape, place, question.load, question.global_batch)

    def block_seconds(self) -> Floats:
        """Of a micro-batch in each of ``BLOCKS``: [blocks, kinds of passes]."""
        return seconds_of(self._blocks)

    def span_bound(self) -> float:
        """Seconds below which the pipeline does not come."""
        stages, hop = self.stages, self._hop.seconds
        pp, takes = stages.pp, self._each + self._waits
        back = _back(takes, self.place.mapping)
        back[0] = takes[0, PassKind.BACKWARD]  # both halves together, of the last micro-batch
        most = (takes * self.passes)[:, : PassKind.WEIGHT].sum(axis=1)
        least = np.array([most[list(stages.stages_of(rank))].sum() for rank in range(pp)])
        own, hops = self.busy, hop * np.arange(pp)
        forward = _before(takes[:pp, PassKind.FORWARD]) + hops
        both = forward + _before(back[:pp]) + hops
        if self.place.mapping.waits_for_stages:  # ranks wait for what each pass takes from a neighbour
            waits = self.micro_batches * neighbours(stages) * hop
            own, least = own + waits, least + waits
            first = hop * (np.arange(pp) > 0)  # of the first pass: counted in both
            forward, both = forward - first, both - first
        longest = np.maximum(forward + own, both + least)
        return _least(longest, float(self.busy.mean()), self.place.cluster) * ROUNDING

    def bound(self) -> float:
        """Seconds below which the step does not come."""
        busiest = np.flatnonzero(self.busy >= self.busy.max() * ROUNDING).tolist()
        return self.span_bound() + ROUNDING * min(self._behind(rank)[0] + self._updated(rank) for rank in busiest)


class Floor:
    """Bounds of mappings from their degrees, stages, micro-batch, recomputing, overlap and dispatcher alone: of the
    pipeline's passes, whatever the sharding, without what moves between stages. Cheap, for mappings share what a layer
    takes."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._seconds: dict[tuple[object, ...], Floats] = {}

    def of(self, mapping: Mapping) -> float:
        """Seconds below which no step with ``mapping`` comes, nor with the same and another sharding."""
        shape, p = self.question.shape, mapping.parallel
        split = mapping.splits
        settings = (mapping.micro_batch, mapping.recompute, mapping.overlap, mapping.dispatcher, split)
        key = (p.tp, p.cp, p.ep, p.etp, *settings)
        if (seconds := self._seconds.get(key)) is None:
            seconds = self._seconds[key] = Bounded.of(self.question, mapping).block_seconds()
        once, each = _held(shape.layers, shape.dense_layers, p.pp, mapping.schedule, mapping.virtual, split)
        whole = seconds[:, PassKind.BACKWARD]
        later = seconds[:, PassKind.INPUT] + seconds[:, PassKind.WEIGHT]
        all_of_it = np.minimum(whole, later) if mapping.schedule == "dualpipev" else later if split else whole
        work = np.concatenate([seconds[:, PassKind.FORWARD], whole, _back(seconds, mapping), all_of_it])
        micro_batches = self.question.global_batch // (p.dp * mapping.micro_batch)
        compute = micro_batches * float((each[: p.pp] @ work).mean())
        return _least((once + micro_batches * each) @ work, compute, self.question.cluster) * ROUNDING


def _least(ranks: Floats, compute: float, cluster: Cluster) -> float:
    """The longest of ``ranks``' seconds; where they share cores, one is faster while others wait, but all together
    compute no faster than at their own rates: ``compute``, the mean of their passes."""
    longest = float(ranks.max())
    return longest if cluster.accelerator.shared <= 1 else max(longest / cluster.accelerator.shared, compute)


def _before(takes: Floats) -> Floats:
    """Of the first stages of ranks, what those before each take together: [pp]."""
    found: Floats = np.cumsum(takes) - takes
    return found


def _back(takes: Floats, mapping: Mapping) -> Floats:
    """What a backward takes until the stage before has its gradient: [...], of [..., kinds of passes]."""
    whole, half = takes[..., PassKind.BACKWARD], takes[..., PassKind.INPUT]
    if not mapping.splits:
        return whole.copy()
    found: Floats = np.minimum(whole, half)
    return found


@lru_cache(maxsize=1 << 12)
def _held(layers: int, dense: int, pp: int, schedule: str, virtual: int, split: bool) -> tuple[Floats, Floats]:
    """The two bounds of each rank as counts of what ``BLOCKS`` take: once in a step, and for each micro-batch.

    Both [2 * pp bounds, 4 * blocks], of forward passes, whole backward ones, those until a gradient is there, and those
    in one piece or in two. The first stage's are whole, or all in the weights' half.
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
