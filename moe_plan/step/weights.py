"""Weights of pipeline stages on one rank: their size, weight and gradient collectives, and the optimizer.

With "fsdp", the weights of a stage are all-gathered before passes, and its gradients are reduce-scattered after
backward passes. With replicas, both are within a block, and the shards of the gradients are summed over the blocks once
per step. Otherwise gradients are summed once per step, and with "zero1" the new weights are all-gathered.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from moe_comm.layers.transformer.shape import LayerKind, ModelShape
from moe_comm.topology.pipeline import StagePlan
from moe_plan.arrays import Floats
from moe_plan.machine.collectives import CollectiveCost, GroupSpan
from moe_plan.machine.hardware import BYTES
from moe_plan.model.fixed_memory import moved_bytes
from moe_plan.model.load import Workload
from moe_plan.model.mapping import PlacedMapping
from moe_plan.model.memory import DEFAULT_POLICY, MemoryPolicy
from moe_plan.step.blocks import links

MASTER = BYTES["fp32"]
Family = Literal["dense", "expert"]
FAMILIES: tuple[Family, Family] = ("dense", "expert")
STATE_BYTES = 2 * MASTER * 3 + MASTER
"""Memory traffic of AdamW per element: master and two moments, read and written, and the gradient."""
SLOW_RING = 169.8
"""Number of ranks at which a ring that gathers sharded experts is twice as slow as its links: each layer has gigabytes,
so nothing is prefetched, and every step of the ring waits for its slowest rank. This applies to rings through several
ranks of each host. Rings with one rank per host, as with expert parallelism inside hosts, reach the rate of the links.
Fitted on FSDP's Mixtral 8x22B in MoE Parallel Folding's table 3 (arXiv 2504.14960). It is used only for experts:
published FSDP runs of dense models on many hosts (torchtitan, NeMo AutoModel, llm-foundry) reach the rate of all NICs.
"""


class TailCollective(NamedTuple):
    """A collective after the last pass of a pipeline position."""

    family: Family
    kind: Literal["gradients", "weights", "moves", "lending"]
    cost: CollectiveCost

    @property
    def name(self) -> str:
        return f"{self.family} {self.kind}"


class StageWeights:
    """Weights of the stages of ``stages`` on the ranks of a placed mapping.

    micro_batches: of a step. policy: offloaded state.
    """

    def __init__(
        self,
        shape: ModelShape,
        placed: PlacedMapping,
        stages: StagePlan,
        load: Workload,
        micro_batches: int,
        policy: MemoryPolicy = DEFAULT_POLICY,
    ) -> None:
        self.policy = policy
        self.shape, self.placed, self.stages, self.micro_batches = shape, placed, stages, micro_batches
        self.size, self.gradient_bytes, self.loads = load.size, load.gradient_bytes, load.loads
        self._elements: dict[int, tuple[float, float]] = {}

    @cached_property
    def stage_elements(self) -> Floats:
        """Elements of each stage on a rank, [stages, 2]: dense ones, and those of experts."""
        shape, p = self.shape, self.placed.mapping.parallel
        per_layer: dict[LayerKind, tuple[int, int]] = {}
        for kind, count in (("dense", shape.dense_layers), ("moe", shape.moe_layers)):
            elements = shape.parameters(kind) if count else {}  # type: ignore[arg-type]
            experts = elements.get("experts", 0)
            per_layer[kind] = (sum(elements.values()) - experts, experts)  # type: ignore[index]
        result = np.zeros((self.stages.num_stages, 2))
        for stage in range(self.stages.num_stages):
            for layer in self.stages.layers_of(stage):
                result[stage] += per_layer[shape.kind(layer)]
        result[0, 0] += shape.embedding_block.params
        result[-1, 0] += shape.head_block.params
        return result / np.array([p.tp, p.ep * p.etp], dtype=np.float64)

    @property
    def spans(self) -> tuple[GroupSpan, GroupSpan]:
        """Ranks with the same dense weights, and ranks with the same experts."""
        return self.placed.spans["dp_cp"], self.placed.spans["edp"]

    def elements(self, rank: int) -> tuple[float, float]:
        """Return the elements of all stages of a pipeline position: dense ones, and those of experts."""
        if rank not in self._elements:
            dense, experts = self.stage_elements[list(self.stages.stages_of(rank))].sum(axis=0).tolist()
            self._elements[rank] = dense, experts
        return self._elements[rank]

    @property
    def shard_spans(self) -> tuple[GroupSpan, GroupSpan]:
        """Ranks over which "fsdp" shards dense weights, and experts."""
        dense, experts = self.placed.unit_spans
        return dense.shards, experts.shards

    def fsdp_seconds(self) -> Floats:
        """Return the seconds of gathering the weights of a stage once, and of scattering its gradients, [stages, 2]."""
        result = np.zeros((self.stages.num_stages, 2))
        seconds_of: dict[tuple[float, float], tuple[float, float]] = {}
        for stage, (dense, experts) in enumerate(self.stage_elements.tolist()):
            if (dense, experts) not in seconds_of:
                gather, scatter = (sum(cost.seconds for cost in costs) for costs in self._fsdp_costs(dense, experts))
                seconds_of[dense, experts] = (gather, scatter)
            result[stage] = seconds_of[dense, experts]
        return result

    def fsdp_sent(self, rank: int) -> dict[str, dict[str, float]]:
        """Return the bytes that each "fsdp" collective sends, by collective and kind of link."""
        gathers, scatters = self._fsdp_costs(*self.elements(rank))
        result = {}
        for family, gather, scatter in zip(FAMILIES, gathers, scatters, strict=True):
            result[f"{family} weights"] = links(gather)
            result[f"{family} gradients"] = links(scatter)
        return result

    def _fsdp_costs(
        self, dense: float, experts: float
    ) -> tuple[tuple[CollectiveCost, ...], tuple[CollectiveCost, ...]]:
        """Return the cost of gathering weights once, and of scattering gradients: dense ones, and those of experts."""
        cluster, spans = self.placed.cluster, self.shard_spans
        gathers = (
            cluster.all_gather(dense * self.size, spans[0]),
            self._one_ring(experts * self.size, spans[1], "all_gather"),
        )
        scatters = (
            cluster.reduce_scatter(dense * self.gradient_bytes, spans[0]),
            self._one_ring(experts * self.gradient_bytes, spans[1], "reduce_scatter"),
        )
        return gathers, scatters

    def _one_ring(self, num_bytes: float, span: GroupSpan, collective: str) -> CollectiveCost:
        """Return the cost of a collective of sharded experts: a ring with one NIC per host (``SLOW_RING``)."""
        single_nic = replace(span, parts=tuple(replace(part, fewest=1) for part in span.parts))
        cost: CollectiveCost = getattr(self.placed.cluster, collective)(num_bytes, single_nic)
        slowdown = 1 + span.ranks / SLOW_RING if span.hosts > 1 and span.fewest > 1 else 1.0
        return replace(cost, seconds=cost.latency_s + (cost.seconds - cost.latency_s) * slowdown)

    def tail(self, rank: int) -> list[TailCollective]:
        """Return the gradient and weight collectives after the last pass of a pipeline position."""
        sharding, cluster = self.placed.mapping.sharding, self.placed.cluster
        result = self._placement(rank)
        if sharding == "fsdp":
            units = self.placed.unit_spans if self.placed.mapping.replicas > 1 else ()
            for family, count, unit in zip(FAMILIES, self.elements(rank), units, strict=False):
                shard = count * self.gradient_bytes / unit.shards.ranks
                result.append(TailCollective(family, "gradients", cluster.all_reduce(shard, unit.replicas)))
            return result
        for family, count, span in zip(FAMILIES, self.elements(rank), self.spans, strict=True):
            reduce = cluster.reduce_scatter if sharding == "zero1" else cluster.all_reduce
            result.append(TailCollective(family, "gradients", reduce(count * self.gradient_bytes, span)))
            if sharding == "zero1":
                result.append(TailCollective(family, "weights", cluster.all_gather(count * self.size, span)))
        return result

    def _placement(self, rank: int) -> list[TailCollective]:
        """Return the cost of switches of the placement of experts, or of lending them, per step."""
        ep = self.placed.mapping.parallel.ep
        placed = None if self.loads is None or ep == 1 else self.loads.placed(ep)
        if placed is None or placed.kind == "fixed":
            return []
        assert self.loads is not None
        expert = self.elements(rank)[1] * ep / self.shape.experts
        moved = placed.moved * expert * moved_bytes("adamw") / self.loads.every
        if self.loads.lending is not None:
            copies = placed.moved, placed.published, placed.fresh
            moved = expert * self.loads.lending.bytes_of_step(*copies, ep, self.micro_batches)
        # An all-to-all of n ranks sends (n - 1) / n of its bytes to others.
        cost = self.placed.cluster.all_to_all(moved * ep / (ep - 1), self.placed.spans["ep"])
        return [TailCollective("expert", "moves" if self.loads.lending is None else "lending", cost)] if moved else []

    def host_copies(self, rank: int) -> tuple[float, float]:
        """Return the bytes of offloaded weights and gradients that a rank copies in a step: during passes, and alone.

        fp32 shards are copied before each gather, and gradients once. Layers are gathered before each pass, the
        embedding and the head once for each micro-batch, and the stages of a pipeline once. FSDP does not prefetch a
        unit of one rank.
        """
        if not self.policy.weights:
            return 0.0, 0.0
        p, passes = self.placed.mapping.parallel, 2 * self.micro_batches
        spans = [span.ranks for span in self.shard_spans]
        shards = [count / span for count, span in zip(self.elements(rank), spans, strict=True)]
        gathered = [shard * (1 if p.pp > 1 else passes) for shard in shards]
        if p.pp == 1:
            root = self.shape.embedding_block.params + self.shape.head_block.params
            gathered[0] -= root / p.tp / spans[0] * self.micro_batches
        alone = sum(count for count, span in zip(gathered, spans, strict=True) if span == 1)
        return MASTER * (sum(gathered) - alone + sum(shards)), MASTER * alone

    def optimizer_seconds(self, rank: int) -> float:
        """Return the seconds of the optimizer of a pipeline position. fp32 weights are their own masters.

        Offloaded state that does not fit in its memory is read and written, which overlaps with computation. FSDP
        gathers masters, so these are not offloaded. Offloaded weights are updated by the CPU, which is assumed to read
        and write its memory at the rate of offloaded data.
        """
        owned = sum(self.elements(rank))
        if self.placed.mapping.sharding != "replicate":
            owned = sum(count / span.ranks for count, span in zip(self.elements(rank), self.shard_spans, strict=True))
        traffic = STATE_BYTES + (self.size if self.size < MASTER else 0)
        seconds = self.placed.cluster.accelerator.memory_seconds(owned * traffic)
        if self.policy.weights:
            seconds = owned * STATE_BYTES / self.policy.offload_rate
        if self.policy.offload is None:
            return seconds
        sharding = self.placed.mapping.sharding
        masters = sharding == "zero1" or (sharding == "replicate" and self.size < MASTER)
        stored = owned * (2 + masters) * MASTER
        return max(seconds, 2 * max(0.0, stored - self.policy.offload) / self.policy.offload_rate)
