"""Weights of a pipeline's stages on one rank: how many, what moves them and their gradients, and the optimizer.

With "fsdp" a stage's weights are gathered before each forward and each backward pass and its gradients are scattered
after each. Otherwise gradients are summed once, in fp32, and with "zero1" the new weights are gathered.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from moe_comm.plan.arrays import Floats
from moe_comm.plan.machine.collectives import Moved, Span
from moe_comm.plan.machine.hardware import BYTES, item_bytes
from moe_comm.plan.model.mapping import Place
from moe_comm.plan.model.shape import LayerKind, ModelShape
from moe_comm.plan.pipeline.stages import StagePlan

MASTER = BYTES["fp32"]
GRADIENT_BYTES = MASTER
STATE_BYTES = 2 * MASTER * 3 + GRADIENT_BYTES
"""That AdamW reads and writes for an element: master and two moments both ways, and the gradient."""
SLOW_RING = 169.8
"""Ranks with which a ring that gathers sharded experts takes twice as long as its links would: gigabytes for each
layer, so that nothing is fetched ahead, and every step waits for the slowest of them all. Of rings through several
ranks of each host; those of one rank a host, as with expert parallelism within hosts, reach their links' rate. Fitted
on FSDP's Mixtral 8x22B in MoE Parallel Folding's table 3 (arXiv 2504.14960). Of experts only: published FSDP runs of
dense models on many hosts (torchtitan, NeMo AutoModel, llm-foundry) get what all NICs give."""


class Weights:
    """Of the stages of ``stages``, that ranks at ``place`` hold. dtype: of products."""

    def __init__(self, shape: ModelShape, place: Place, stages: StagePlan, dtype: str) -> None:
        self.shape, self.place, self.stages = shape, place, stages
        self.size = item_bytes(dtype)
        self._of: dict[int, tuple[float, float]] = {}

    @cached_property
    def held(self) -> Floats:
        """Elements on a rank of each stage, [stages, 2]: dense ones, and experts'."""
        shape, p = self.shape, self.place.mapping.parallel
        each: dict[LayerKind, tuple[int, int]] = {}
        for kind, count in (("dense", shape.dense_layers), ("moe", shape.moe_layers)):
            every = shape.parameters(kind) if count else {}  # type: ignore[arg-type]
            experts = every.get("experts", 0)
            each[kind] = (sum(every.values()) - experts, experts)  # type: ignore[index]
        found = np.zeros((self.stages.num_stages, 2))
        for stage in range(self.stages.num_stages):
            for layer in self.stages.layers_of(stage):
                found[stage] += each[shape.kind(layer)]
        found[0, 0] += shape.embedding_block.params
        found[-1, 0] += shape.head_block.params
        return found / np.array([p.tp, p.ep * p.etp], dtype=np.float64)

    @property
    def spans(self) -> tuple[Span, Span]:
        """Of ranks with the same dense weights, and with the same experts."""
        return self.place.spans["dp_cp"], self.place.spans["edp"]

    def of(self, rank: int) -> tuple[float, float]:
        """Elements of all stages of a pipeline position: dense ones, and experts'."""
        if rank not in self._of:
            dense, experts = self.held[list(self.stages.stages_of(rank))].sum(axis=0).tolist()
            self._of[rank] = dense, experts
        return self._of[rank]

    def sharded(self) -> Floats:
        """With "fsdp", seconds of the transfers of a micro-batch in forward and backward, [stages, 2]."""
        found = np.zeros((self.stages.num_stages, 2))
        known: dict[tuple[float, float], tuple[float, float]] = {}
        for stage, (dense, experts) in enumerate(self.held.tolist()):
            if (dense, experts) not in known:
                gather = scatter = 0.0
                for count, span, moves in zip((dense, experts), self.spans, (self._rings, self._one_ring), strict=True):
                    gather += moves(count * self.size, span, "all_gather")
                    scatter += moves(count * GRADIENT_BYTES, span, "reduce_scatter")
                known[dense, experts] = (gather, gather + scatter)
            found[stage] = known[dense, experts]
        return found

    def _rings(self, num_bytes: float, span: Span, way: str) -> float:
        """Seconds of a collective, which leaves each host by all NICs of the group's ranks there."""
        moved: Moved = getattr(self.place.cluster, way)(num_bytes, span)
        return moved.seconds

    def _one_ring(self, num_bytes: float, span: Span, way: str) -> float:
        """Seconds of a collective of sharded experts: one ring, which leaves each host by one NIC, and slower the more
        ranks it has (``SLOW_RING``)."""
        one = replace(span, parts=tuple(replace(part, fewest=1) for part in span.parts))
        moved: Moved = getattr(self.place.cluster, way)(num_bytes, one)
        times = 1 + span.ranks / SLOW_RING if span.hosts > 1 and span.fewest > 1 else 1.0
        return moved.latency_s + (moved.seconds - moved.latency_s) * times

    def after(self, rank: int) -> dict[str, Moved]:
        """What is summed and gathered behind the last pass of a pipeline position."""
        sharding, cluster = self.place.mapping.sharding, self.place.cluster
        found: dict[str, Moved] = {}
        if sharding == "fsdp":
            return found
        for name, count, span in zip(("dense", "expert"), self.of(rank), self.spans, strict=True):
            if sharding == "zero1":
                found[f"{name} gradients"] = cluster.reduce_scatter(count * GRADIENT_BYTES, span)
                found[f"{name} weights"] = cluster.all_gather(count * self.size, span)
            else:
                found[f"{name} gradients"] = cluster.all_reduce(count * GRADIENT_BYTES, span)
        return found

    def updated(self, rank: int) -> float:
        """Seconds of the optimizer of a pipeline position. In fp32 weights are their own masters."""
        shares = (1, 1)
        if self.place.mapping.sharding != "replicate":
            shares = (self.spans[0].ranks, self.spans[1].ranks)
        owned = sum(count / share for count, share in zip(self.of(rank), shares, strict=True))
        each = STATE_BYTES + (self.size if self.size < MASTER else 0)
        return self.place.cluster.accelerator.memory_seconds(owned * each)
