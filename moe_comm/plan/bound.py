"""How fast a mapping can be at best, without replaying it: what a search goes by.

Rank r of a pipeline starts when its first micro-batch has gone forward through the r stages before it, runs all of its
own passes, and then its last micro-batch goes back through those stages. So

    step  >=  max over r (stages before r, forward and back  +  micro-batches x passes of r)  +  what follows

with stages of 1 / vpp of a rank's layers; for equal stages that is what 1f1b takes: m + (pp - 1) / vpp passes. Where
ranks share cores it is less (``shared_cores``). What follows (sums of gradients, weights, the optimizer) is the step's
own. None of it is an estimate: a mapping whose bound is above another's replayed step is slower.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from moe_comm.plan.hardware import Cluster
from moe_comm.plan.mapping import Dispatcher, Mapping, Overlap, Place, Recompute
from moe_comm.plan.question import Question
from moe_comm.plan.replay import Floats
from moe_comm.plan.step import BLOCKS, StepModel
from moe_comm.topology import ParallelConfig
from moe_comm.train.pipeline.stages import plan_stages

ROUNDING = 1 - 1e-9
"""Sums of the same numbers in another order are the same but for less than that."""


class Bounded(StepModel):
    """A step's model that also says below which time it cannot come."""

    @classmethod
    def of(cls, question: Question, mapping: Mapping) -> Bounded:
        place = Place(mapping, question.cluster)
        return cls(question.shape, place, question.load, question.global_batch)

    def block_seconds(self) -> Floats:
        """Of a micro-batch in each of ``BLOCKS``, forward and backward together: [blocks]."""
        return np.array([sum(self._blocks[name].seconds) for name in BLOCKS])

    def span_bound(self) -> float:
        """Seconds below which the pipeline does not come."""
        pp, virtual = self.place.mapping.parallel.pp, self.place.mapping.virtual
        both, hop = self._both, self._hop.seconds
        before = np.cumsum(both[:pp]) - both[:pp] + 2 * hop * np.arange(pp)
        own = both.reshape(virtual, pp).sum(0)
        if self.place.mapping.overlap == "none" and pp > 1:  # ranks wait for what each pass takes from a neighbour
            waits = np.full(pp, 2.0 * virtual)
            waits[0] -= 1
            waits[-1] -= 1
            own = own + waits * hop
            before -= hop  # of the first pass: counted in both
        compute = self.micro_batches * both.sum() / pp
        return _least(before + self.micro_batches * own, compute, self.place.cluster) * ROUNDING

    def bound(self) -> float:
        """Seconds below which the step does not come."""
        pp, virtual = self.place.mapping.parallel.pp, self.place.mapping.virtual
        busy = self._both.reshape(virtual, pp).sum(0)
        busiest = np.flatnonzero(busy >= busy.max() * ROUNDING).tolist()
        return self.span_bound() + ROUNDING * min(self._behind(rank)[0] + self._updated(rank) for rank in busiest)

    @property
    def _both(self) -> Floats:
        both: Floats = (self._each + self._waits).sum(axis=1)
        return both


class Floor:
    """Bounds of mappings from their degrees, stages, micro-batch, recomputing, overlap and dispatcher alone: of the
    pipeline's passes, whatever the sharding, without what moves between stages. Cheap, for mappings share what a layer
    takes."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._seconds: dict[tuple[object, ...], Floats] = {}

    def of(
        self,
        p: ParallelConfig,
        virtual: int,
        micro_batch: int,
        recompute: Recompute,
        overlap: Overlap,
        dispatcher: Dispatcher = "all_to_all",
    ) -> float:
        """Seconds below which no step with such a mapping comes."""
        shape = self.question.shape
        key = (p.tp, p.cp, p.ep, p.etp, micro_batch, recompute, overlap, dispatcher)
        if (seconds := self._seconds.get(key)) is None:
            mapping = Mapping(p, 1, micro_batch, recompute=recompute, overlap=overlap, dispatcher=dispatcher)
            seconds = self._seconds[key] = Bounded.of(self.question, mapping).block_seconds()
        before, own = _held(shape.layers, shape.dense_layers, p.pp, virtual)
        micro_batches = self.question.global_batch // (p.dp * micro_batch)
        compute = float((micro_batches * own @ seconds).mean())
        return _least((before + micro_batches * own) @ seconds, compute, self.question.cluster) * ROUNDING


def _least(ranks: Floats, compute: float, cluster: Cluster) -> float:
    """The longest of ``ranks``' seconds; where they share cores, one is faster while others wait, but all together
    compute no faster than at their own rates: ``compute``, the mean of their passes."""
    longest = float(ranks.max())
    return longest if cluster.accelerator.shared <= 1 else max(longest / cluster.accelerator.shared, compute)


@lru_cache(maxsize=1 << 12)
def _held(layers: int, dense: int, pp: int, virtual: int) -> tuple[Floats, Floats]:
    """How often each rank of a pipeline has each of ``BLOCKS``, [pp, blocks]: in the stages before its first one, and
    in its own."""
    schedule = "interleaved_1f1b" if virtual > 1 else "1f1b"
    counts = np.array(plan_stages(layers, pp, schedule, virtual=virtual).counts, dtype=np.float64)
    early = np.clip(dense - (np.cumsum(counts) - counts), 0, counts)
    held = np.zeros((len(counts), len(BLOCKS)))
    held[0, 0] = held[-1, 3] = 1
    held[:, 1], held[:, 2] = early, counts - early
    return np.cumsum(held[:pp], axis=0) - held[:pp], held.reshape(virtual, pp, -1).sum(0)
