"""One training step on paper: what every pass takes, replayed as the pipeline's schedule runs it, and what follows.

    step  =  pipeline of passes (replayed)  +  sums of gradients, weights gathered  +  optimizer

A pass is the sum of its operators (``operators.py``). With "fsdp" a stage's weights are gathered before each forward
and each backward and its gradients scattered after each, beside what computes: of each pair the longer counts.
Otherwise gradients are summed once, in fp32, and with "zero1" the new weights are gathered, both behind the last pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moe_comm.plan.collectives import NOTHING, Moved
from moe_comm.plan.mapping import Place
from moe_comm.plan.model import LayerKind, ModelShape
from moe_comm.plan.operators import Load, Operation, Operators, Pass
from moe_comm.plan.replay import Floats, Plan, prepare, replay
from moe_comm.plan.schedules import PassOrder, PassSeconds, pass_order, pipeline_tasks
from moe_comm.train.pipeline.stages import StagePlan, plan_stages

WEIGHT_BYTES, GRADIENT_BYTES = 2, 4
LINKS = ("inside", "between", "across")
UPDATE_BYTES = 28
"""That AdamW reads and writes for an element: master, two moments and gradient in fp32, and the weight in bf16."""
RECOMPUTED = {"none": (), "selective": ("memory",), "full": ("product", "memory", "transfer")}
"""Kinds of operators that backward does again."""
CAUSES = {"product": "products", "memory": "memory passes"}


@dataclass(frozen=True)
class Step:
    """A step's cost. seconds: all of it. breakdown: seconds by cause, of the busiest pipeline rank; they add up.

    model_flops: that MFU counts, of the whole batch. sent: bytes that a rank sends in a step, by operator and then by
    kind of link ("inside", "between", "across" pods).
    """

    seconds: float
    tokens: int
    gpus: int
    model_flops: float
    peak: float
    breakdown: dict[str, float] = field(default_factory=dict)
    sent: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: a fraction."""
        return self.model_flops / (self.seconds * self.gpus * self.peak)


class StepModel:
    """Predicts a step of ``shape`` with batches of ``global_batch`` sequences."""

    def __init__(self, shape: ModelShape, place: Place, load: Load, global_batch: int) -> None:
        self.shape, self.place, self.load, self.global_batch = shape, place, load, global_batch
        self.micro_batches = place.mapping.micro_batches(global_batch)
        self.operators = Operators(shape, place, load)

    @cached_property
    def stages(self) -> StagePlan:
        """Which layers are in which stage, and which rank has it: as even as they go."""
        mapping = self.place.mapping
        return plan_stages(self.shape.layers, mapping.parallel.pp, mapping.schedule, virtual=mapping.virtual)

    @cached_property
    def stage_passes(self) -> tuple[Pass, ...]:
        """What a micro-batch runs in each stage; with what is computed again in backward."""
        layers = {kind: self._again(self.operators.layer(kind)) for kind in self._kinds}
        found = []
        for stage in range(self.stages.num_stages):
            passes = [self.operators.embedding()] if stage == 0 else []
            passes += [layers[self.shape.kind(layer)] for layer in self.stages.layers_of(stage)]
            passes += [self.operators.head()] if stage == self.stages.num_stages - 1 else []
            forward = tuple(one for part in passes for one in part.forward)
            found.append(Pass(forward, tuple(one for part in reversed(passes) for one in part.backward)))
        return tuple(found)

    def predict(self) -> Step:
        """The step, replayed."""
        order, plan, seconds = self._pipeline()
        times = replay(plan, seconds)
        busy = np.bincount(order.rank, seconds[: len(order)], minlength=order.pp)
        rank = int(busy.argmax())
        parts = self._causes(rank)
        parts["pipeline"] = float(times.span - busy[rank])
        parts["gradients and weights"] = sum(one.seconds for one in self._after(rank).values())
        parts["optimizer"] = self._updated(rank)
        tokens = self.global_batch * self.load.seq_len
        return Step(
            seconds=sum(parts.values()),
            tokens=tokens,
            gpus=self.place.mapping.parallel.world,
            model_flops=self.shape.model_flops(self.load.seq_len) * tokens,
            peak=self.place.cluster.accelerator.peak(self.load.dtype),
            breakdown=parts,
            sent=self._sent(rank),
        )

    # --- the pipeline ---

    def _pipeline(self) -> tuple[PassOrder, Plan, Floats]:
        """Passes in order, what to replay, and the seconds of every task: passes first, then transfers."""
        mapping = self.place.mapping
        order = pass_order(mapping.schedule, mapping.parallel.pp, self.micro_batches, mapping.virtual)
        seconds = np.array([one.seconds() for one in self.stage_passes]) + self._waits
        passes = PassSeconds(seconds[:, 0], seconds[:, 1] / 2, seconds[:, 1] / 2)
        tasks = pipeline_tasks(order, passes, self._hop.seconds)
        return order, prepare(tasks.tasks), tasks.tasks.duration

    @cached_property
    def _hop(self) -> Moved:
        """A micro-batch from a stage to the next."""
        if self.place.mapping.parallel.pp == 1:
            return NOTHING
        rows = self.operators.tokens * self.operators.row_bytes
        return self.place.cluster.send(rows, self.place.spans["pp"])

    @property
    def _kinds(self) -> tuple[LayerKind, ...]:
        kinds: tuple[LayerKind, ...] = ("dense", "moe")
        counts = (self.shape.dense_layers, self.shape.moe_layers)
        return tuple(kind for kind, count in zip(kinds, counts, strict=True) if count)

    def _again(self, layer: Pass) -> Pass:
        kinds = RECOMPUTED[self.place.mapping.recompute]
        return Pass(layer.forward, tuple(one for one in layer.forward if one.kind in kinds) + layer.backward)

    # --- parameters ---

    @cached_property
    def _held(self) -> tuple[tuple[float, float], ...]:
        """Elements of each stage on a rank: dense ones, and experts'."""
        shape, p = self.shape, self.place.mapping.parallel
        experts = {kind: shape.parameters(kind).get("experts", 0) for kind in self._kinds}
        every = {kind: sum(shape.parameters(kind).values()) for kind in self._kinds}
        found = []
        for stage in range(self.stages.num_stages):
            kinds = [shape.kind(layer) for layer in self.stages.layers_of(stage)]
            own = sum(experts[kind] for kind in kinds)
            dense = sum(every[kind] for kind in kinds) - own
            dense += shape.embedding_block.params if stage == 0 else 0
            dense += shape.head_block.params if stage == self.stages.num_stages - 1 else 0
            found.append((dense / p.tp, own / (p.ep * p.etp)))
        return tuple(found)

    @cached_property
    def _waits(self) -> Floats:
        """With "fsdp", seconds that forward and backward of each stage wait for weights and gradients, [stages, 2]."""
        if self.place.mapping.sharding != "fsdp":
            return np.zeros((len(self._held), 2))
        computes = np.array([one.seconds() for one in self.stage_passes])
        waits: Floats = np.maximum(self._fsdp() - computes, 0.0)
        return waits

    def _fsdp(self) -> Floats:
        """Seconds of the transfers of weights and gradients of a micro-batch, [stages, 2]."""
        cluster, spans = self.place.cluster, self.place.spans
        found = []
        for held in self._held:
            gather = scatter = 0.0
            for count, span in zip(held, (spans["dp_cp"], spans["edp"]), strict=True):
                gather += cluster.all_gather_s(count * WEIGHT_BYTES, span)
                scatter += cluster.reduce_scatter_s(count * GRADIENT_BYTES, span)
            found.append((gather, gather + scatter))
        return np.array(found)

    def _rank_held(self, rank: int) -> tuple[float, float]:
        dense, experts = np.sum([self._held[stage] for stage in self.stages.stages_of(rank)], axis=0)
        return float(dense), float(experts)

    def _after(self, rank: int) -> dict[str, Moved]:
        """What is summed and gathered behind the last pass."""
        mapping, cluster, spans = self.place.mapping, self.place.cluster, self.place.spans
        found: dict[str, Moved] = {}
        if mapping.sharding == "fsdp":
            return found
        for name, count, axis in zip(("dense", "expert"), self._rank_held(rank), ("dp_cp", "edp"), strict=True):
            if mapping.sharding == "zero1":
                found[f"{name} gradients"] = cluster.reduce_scatter(count * GRADIENT_BYTES, spans[axis])
                found[f"{name} weights"] = cluster.all_gather(count * WEIGHT_BYTES, spans[axis])
            else:
                found[f"{name} gradients"] = cluster.all_reduce(count * GRADIENT_BYTES, spans[axis])
        return found

    def _updated(self, rank: int) -> float:
        """Seconds of the optimizer."""
        shares = (1, 1)
        if self.place.mapping.sharding != "replicate":
            shares = (self.place.spans["dp_cp"].ranks, self.place.spans["edp"].ranks)
        owned = sum(count / share for count, share in zip(self._rank_held(rank), shares, strict=True))
        return self.place.cluster.accelerator.memory_seconds(owned * UPDATE_BYTES)

    # --- what is told ---

    def _operations(self, rank: int) -> Iterator[Operation]:
        """Of one micro-batch through a rank's stages."""
        for stage in self.stages.stages_of(rank):
            yield from self.stage_passes[stage].forward
            yield from self.stage_passes[stage].backward

    def _causes(self, rank: int) -> dict[str, float]:
        """Seconds of a rank's passes by cause: products, memory passes, and each transfer by name."""
        found: dict[str, float] = {}
        for one in self._operations(rank):
            cause = one.name.removesuffix(" again") if one.kind == "transfer" else CAUSES[one.kind]
            found[cause] = found.get(cause, 0.0) + self.micro_batches * one.seconds
        waits = float(self._waits[list(self.stages.stages_of(rank))].sum())
        return {**found, "sharded weights": self.micro_batches * waits} if waits else found

    def _sent(self, rank: int) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}

        def add(name: str, moved: Moved, times: int) -> None:
            into = found.setdefault(name, dict.fromkeys(LINKS, 0.0))
            for link in LINKS:
                into[link] += times * getattr(moved, link)

        for one in self._operations(rank):
            if one.kind == "transfer":
                add(one.name.removesuffix(" again"), one.moved, self.micro_batches)
        add("stages", self._hop, 2 * self.micro_batches * self.place.mapping.virtual)
        for name, moved in self._after(rank).items():
            add(name, moved, 1)
        return {name: links for name, links in found.items() if any(links.values())}
