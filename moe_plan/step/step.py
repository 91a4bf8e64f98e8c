"""Cost model of one training step.

    step  =  pipeline of passes (replayed)  +  gradient and weight collectives (tail)  +  optimizer

The time of a pass is the sum of its operators (``operators``) minus their hidden time (``Operation.hidden``). With
"fsdp" it includes an equal share of the collectives of the weights (``weights``). Some schedules split a backward pass
into an input half and a weight half (``split_backward``).

Without "fsdp", the tail reduces gradients and gathers weights after the last pass. With replicas of "fsdp", it sums the
shards of gradients over the replicas. Unless overlap is "none" or "chunks", the gradient collectives overlap with the
backward of the last micro-batch (with its weight half if backward is split), and the weight collectives overlap with
the forward of the first micro-batch. With ``Workload.overlap_gradients`` they always do, except between CPU ranks of
one host. The collectives of one layer stay exposed, and so does the part of a transfer that occupies the cores that
compute (``Link.processor``).

With ``Workload.lengths``, all ranks wait in each micro-batch for the one with the most work (``lengths``).

With overlap "none" or "chunks", ranks wait for transfers between pipeline stages. With "outer", only the transfers
between virtual stages overlap with passes. With the other modes, all of them do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial

import numpy as np

from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.topology.pipeline import StagePlan, find_schedule, plan_stages
from moe_plan.arrays import Floats
from moe_plan.machine.collectives import NO_COST, CollectiveCost, GroupSpan
from moe_plan.model.load import Workload
from moe_plan.model.mapping import PlacedMapping
from moe_plan.model.memory import DEFAULT_POLICY, MemoryPolicy, activations_moved
from moe_plan.orders import PassKind, PassOrder, pass_order
from moe_plan.step.blocks import (
    BLOCKS,
    FREE,
    LINKS,
    BlockCost,
    PassCost,
    block_costs,
    exposed_seconds,
    links,
    seconds_of,
)
from moe_plan.step.lengths import LAUNCHES, UNEVEN, DocumentCost, document_cost
from moe_plan.step.operators import BlockOperations, Operators
from moe_plan.step.pipeline import pipeline_tasks, shared_span
from moe_plan.step.replay import ReplayPlan, prepare, replay
from moe_plan.step.weights import FAMILIES, StageWeights

BACK = (PassKind.BACKWARD, PassKind.INPUT, PassKind.WEIGHT)
"""Passes that run the blocks of a stage in reverse order."""
FULL = 5
"""Number of groups of ``pp`` micro-batches in a shortened replay. It usually includes the steady state."""


@dataclass(frozen=True)
class StepPrediction:
    """The cost of a step on the busiest pipeline rank.

    seconds: total time. tokens: tokens of the batch. gpus: number of ranks. model_flops: model FLOPs of the batch, for
    MFU. peak: FLOP/s of one GPU. breakdown: exposed seconds by cause; their sum is the total. sent: bytes that the rank
    sends in a step, by operator and kind of link ("inside" or "between" hosts, "across" pods). hidden: seconds of
    transfers that overlap with other work, by operator; they are not part of the total.
    """

    seconds: float
    tokens: int
    gpus: int
    model_flops: float
    peak: float
    breakdown: dict[str, float] = field(default_factory=dict)
    sent: dict[str, dict[str, float]] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, as a fraction."""
        return self.model_flops / (self.seconds * self.gpus * self.peak)


class StepModel:
    """Predict the time of a training step with batches of ``global_batch`` sequences.

    ``policy``: how weights are gathered, and what is offloaded.
    """

    def __init__(
        self,
        shape: ModelShape,
        placed: PlacedMapping,
        load: Workload,
        global_batch: int,
        policy: MemoryPolicy = DEFAULT_POLICY,
    ) -> None:
        self.shape, self.placed, self.load, self.global_batch = shape, placed, load, global_batch
        self._policy = policy
        self.micro_batches = placed.mapping.micro_batches(global_batch)

    @cached_property
    def operators(self) -> Operators:
        return Operators(self.shape, self.placed, self.load)

    @cached_property
    def stages(self) -> StagePlan:
        """The layers of each stage, divided evenly, and the rank of each stage."""
        mapping = self.placed.mapping
        return _stages(self.shape.layers, mapping.parallel.pp, mapping.schedule, virtual=mapping.virtual)

    @cached_property
    def weights(self) -> StageWeights:
        return StageWeights(self.shape, self.placed, self.stages, self.load, self.micro_batches, self._policy)

    @cached_property
    def stage_passes(self) -> tuple[BlockOperations, ...]:
        """The operations of a micro-batch in each stage, including recomputation."""
        by_counts: dict[tuple[int, ...], BlockOperations] = {}
        result = []
        for counts in map(tuple, self._counts.astype(int).tolist()):
            if counts not in by_counts:
                named = zip(BLOCKS, counts, strict=True)
                kinds_of_blocks = [self._blocks[name].operations.kinds for name, times in named for _ in range(times)]
                forward = tuple(operation for kinds in kinds_of_blocks for operation in kinds[PassKind.FORWARD])
                reversed_kinds = (
                    tuple(operation for kinds in reversed(kinds_of_blocks) for operation in kinds[kind])
                    for kind in BACK
                )
                by_counts[counts] = BlockOperations(forward, *reversed_kinds)
            result.append(by_counts[counts])
        if self.split:
            result[0] = replace(result[0], input=(), weight=result[0].backward)
        return tuple(result)

    @cached_property
    def split(self) -> bool:
        """Whether some backward passes are split into halves."""
        return self.placed.mapping.splits

    def predict(self) -> StepPrediction:
        """Replay the step and return its cost."""
        rank = int(self.busy.argmax())
        hidden = self._summed(rank, "hidden")
        causes = self._summed(rank, "causes")
        stages = _position_stages(self.stages)[rank]
        for totals, array in ((causes, self._exposed_weights), (hidden, self._hidden_weights)):
            if seconds := float((array * self.passes)[stages].sum()):
                totals["sharded weights"] = seconds
        causes["pipeline"] = self.span - float(self.busy[rank])
        if (documents := self.documents) is not None:
            rounds = self.micro_batches / self.stages.pp
            causes[LAUNCHES] = rounds * documents.launch_s
            causes[UNEVEN] = rounds * documents.uneven_s
            causes["document keys"] = rounds * documents.keys_s
        causes["gradients and weights"], hidden_tail = self._exposed_tail(rank)
        causes["optimizer"] = self.weights.optimizer_seconds(rank)
        mapping, policy = self.placed.mapping, self._policy
        activations = activations_moved(self.shape, mapping, self.load, self.global_batch, policy, rank)
        left = self.span  # seconds of the passes, with which transfers overlap
        for cause, moved, alone in (
            ("offloaded activations", activations, 0.0),
            ("offloaded weights", *self.weights.host_copies(rank)),
        ):
            during = min(moved / policy.offload_rate, left)
            left -= during
            if waits := (moved + alone) / policy.offload_rate - during:
                causes[cause] = waits
        tokens = self.global_batch * self.load.seq_len
        return StepPrediction(
            seconds=sum(causes.values()),
            tokens=tokens,
            gpus=self.placed.mapping.parallel.world,
            model_flops=self.load.per_token(partial(_model_flops, self.shape)) * tokens,
            peak=self.placed.cluster.accelerator.peak(self.load.dtype),
            breakdown=causes,
            sent=self._sent(rank),
            hidden={**hidden, **hidden_tail},
        )

    @cached_property
    def documents(self) -> DocumentCost | None:
        """What the lengths of documents add to a micro-batch."""
        return None if self.load.lengths is None else document_cost(self.shape, self.placed, self.load)

    # --- the pipeline ---

    def pipeline(self) -> tuple[PassOrder, ReplayPlan, Floats]:
        """Return the order of the passes, the replay plan, and the seconds of its tasks: passes, then transfers."""
        return self._replayed(self.micro_batches)

    @cached_property
    def span(self) -> float:
        """Seconds from the first pass to the end of the last.

        In the steady state, every additional ``pp`` micro-batches add the same time on all ranks. If a shortened
        replay reaches the steady state, the time of the remaining micro-batches is extrapolated.
        """
        pp = self.placed.mapping.parallel.pp
        if pp == 1:
            return float(self.busy[0])
        if (shared := self.placed.cluster.accelerator.shared) > 1:
            order, plan, seconds = self.pipeline()
            return shared_span(plan.tasks, seconds, len(order), pp, shared)
        sample = FULL * pp
        if self.micro_batches > sample + pp and not (self.micro_batches - sample) % pp:
            order, plan, seconds = self._replayed(sample)
            times = replay(plan, seconds)
            if (period := _period(order, times.end[: len(order)], float(times.span))) is not None:
                return float(times.span) + (self.micro_batches - sample) // pp * period
        _, plan, seconds = self.pipeline()
        return float(replay(plan, seconds).span)

    def _replayed(self, micro_batches: int) -> tuple[PassOrder, ReplayPlan, Floats]:
        mapping = self.placed.mapping
        order, plan = _graph(
            mapping.schedule, mapping.parallel.pp, micro_batches, mapping.virtual, mapping.waits_for_stages
        )
        pass_seconds = (self._pass_seconds + self._exposed_weights)[order.stage, order.kind]
        transfer_seconds = np.full(len(plan.tasks) - len(order), self._hop.seconds)
        return order, plan, np.concatenate([pass_seconds, transfer_seconds])

    @cached_property
    def passes(self) -> Floats:
        """Number of passes of each kind in a step, [stages, kinds of passes]."""
        mapping = self.placed.mapping
        return _passes(mapping.schedule, mapping.parallel.pp, self.micro_batches, mapping.virtual)

    @cached_property
    def busy(self) -> Floats:
        """Seconds of all passes of each pipeline position, [pp]."""
        pass_seconds = ((self._pass_seconds + self._exposed_weights) * self.passes).sum(axis=1)
        return np.array([pass_seconds[stages].sum() for stages in _position_stages(self.stages)])

    @cached_property
    def _hop(self) -> CollectiveCost:
        if self.placed.mapping.parallel.pp == 1:
            return NO_COST
        rows = self.operators.tokens * self.operators.row_bytes
        return self.placed.cluster.send(rows, self.placed.spans["pp"])

    @cached_property
    def _counts(self) -> Floats:
        """Number of blocks of each kind (``BLOCKS``) in each stage, [stages, blocks]."""
        return _counts(self.stages, self.shape.dense_layers)

    @cached_property
    def _blocks(self) -> dict[str, BlockCost]:
        return block_costs(self.shape, self.placed, self.load)

    @cached_property
    def _pass_seconds(self) -> Floats:
        """Seconds of passes without weight collectives, [stages, kinds of passes]."""
        return self._by_stage(self._counts @ seconds_of(self._blocks))

    def _by_stage(self, result: Floats) -> Floats:
        """If backward is split, count the complete backward of the first stage as its weight half.

        The first stage has no input gradient, so its backward is not split.
        """
        if self.split:
            result[0, PassKind.INPUT], result[0, PassKind.WEIGHT] = 0.0, result[0, PassKind.BACKWARD]
        return result

    # --- weights ---

    @cached_property
    def _hidden_share(self) -> float:
        """Share of the collectives of "fsdp" that is hidden if the computation of the pass is long enough."""
        mapping = self.placed.mapping
        overlaps = mapping.overlap not in ("none", "chunks") or any(map(self._overlaps_gradients, self.weights.spans))
        return FREE * min(map(self.placed.cluster.free_share, self.weights.shard_spans)) if overlaps else 0.0

    @cached_property
    def _hidden_weights(self) -> Floats:
        """The part of ``weight_seconds`` that overlaps with the computation of passes, [stages, kinds of passes]."""
        if self.placed.mapping.sharding != "fsdp":
            return np.zeros_like(self._pass_seconds)
        one, others = (np.minimum(seconds, self._pass_seconds) for seconds in self._weight_passes)
        return self._mean_pass(one, others) * self._hidden_share

    def _overlaps_gradients(self, span: GroupSpan) -> bool:
        """Return whether gradients that are summed over ``span`` overlap with passes for every overlap mode."""
        return self.load.overlap_gradients and (span.hosts > 1 or not self.placed.cluster.direct)

    @cached_property
    def _exposed_weights(self) -> Floats:
        """The part of ``weight_seconds`` that is exposed, [stages, kinds of passes]."""
        return self.weight_seconds - self._hidden_weights

    @cached_property
    def weight_seconds(self) -> Floats:
        """Mean seconds of the weight and gradient collectives of a pass with "fsdp", [stages, kinds of passes]."""
        return self._mean_pass(*self._weight_passes)

    def _mean_pass(self, one: Floats, others: Floats) -> Floats:
        """Return the mean over the micro-batches: ``one`` for one of them, ``others`` for each other."""
        return np.asarray((one + (self.micro_batches - 1) * others) / self.micro_batches)

    @cached_property
    def _weight_passes(self) -> tuple[Floats, Floats]:
        """Seconds of the collectives of "fsdp" in one pass of a kind, and in each other, [stages, kinds of passes].

        With ``reshard``, all passes are equal. Without it, the trainer scatters gradients in the last backward pass
        only, and gathers the weights of pipeline stages in the first forward pass only. If backward is split, the
        input half gathers the weights and the weight half scatters the gradients.
        """
        if self.placed.mapping.sharding != "fsdp":
            return np.zeros_like(self._pass_seconds), np.zeros_like(self._pass_seconds)
        gathers, scatters = self.weights.fsdp_seconds().T
        none, frees = np.zeros_like(gathers), self._frees_weights
        one = self._by_kind(gathers, gathers if frees else none, scatters)
        if self._policy.reshard:
            return one, one
        return one, self._by_kind(gathers, gathers, none) if frees else np.zeros_like(one)

    @property
    def _frees_weights(self) -> bool:
        """Whether "fsdp" frees gathered weights after each pass."""
        return self._policy.reshard or self.placed.mapping.parallel.pp == 1

    def _by_kind(self, forward: Floats, again: Floats, scatters: Floats) -> Floats:
        """Return [stages, kinds of passes] from the seconds of weight gathers before forward and backward, and of
        gradient scatters after."""
        halves = (again, scatters) if self.split else (again + scatters, np.zeros_like(scatters))
        return self._by_stage(np.stack([forward, again + scatters, *halves], axis=1))

    def _exposed_tail(self, rank: int) -> tuple[float, dict[str, float]]:
        """Return the exposed seconds of the collectives after the last pass, and the hidden seconds of each collective.

        The gradient reduction of a layer overlaps with the backward of the layers before it. The weight gather of a
        layer overlaps with the forward of the layers before it.
        """
        collectives = self.weights.tail(rank)
        total = sum(one.cost.seconds for one in collectives)
        hidden: dict[str, float] = {}
        available: dict[str, float] = {}
        overlaps = self.placed.mapping.overlap not in ("none", "chunks")
        spans = dict(zip(FAMILIES, self.weights.spans, strict=True))
        if overlaps or self.load.overlap_gradients:
            stages = _position_stages(self.stages)[rank]
            layers = self._counts[stages][:, 1:3].sum()
            fraction = FREE * (1 - 1 / layers) if layers else 0.0
            seconds = self._pass_seconds[stages].sum(axis=0) * fraction
            last = PassKind.WEIGHT if self.split else PassKind.BACKWARD
            available = {"gradients": float(seconds[last])}
            if self.placed.mapping.sharding == "fsdp":  # the scatters of the pass run before the sums over replicas
                scatters = np.minimum(self.weights.fsdp_seconds()[stages, 1], self._pass_seconds[stages, last])
                hidden_scatters = self._hidden_share * float(scatters.sum())
                available["gradients"] = max(0.0, available["gradients"] - hidden_scatters)
            available["weights"] = float(seconds[PassKind.FORWARD])
        for family, kind, cost in collectives:
            if not overlaps and not self._overlaps_gradients(spans[family]):
                continue
            if overlapped := cost.seconds - exposed_seconds(cost.seconds, available.get(kind, 0.0)):
                hidden[f"{family} {kind}"] = overlapped * self.placed.cluster.free_share(spans[family])
                available[kind] -= overlapped
        return total - sum(hidden.values()), hidden

    # --- sums over the stages of a pipeline position ---

    def _pass_counts(self, rank: int) -> Iterator[tuple[PassCost, float]]:
        """Yield the cost of each block in each kind of pass, and how often a pipeline position runs it in a step."""
        for name, counts in zip(BLOCKS, self._block_passes[rank].tolist(), strict=True):
            for cost, count in zip(self._blocks[name].passes, counts, strict=True):
                if count:
                    yield cost, count

    @cached_property
    def _block_passes(self) -> Floats:
        """How often each pipeline position runs each block in each kind of pass, [pp, blocks, kinds of passes]."""
        passes = self.passes.copy()
        if self.split:  # the first stage runs complete backward passes
            passes[0, PassKind.BACKWARD] += passes[0, PassKind.WEIGHT]
            passes[0, PassKind.INPUT] = passes[0, PassKind.WEIGHT] = 0
        return np.array([self._counts[stages].T @ passes[stages] for stages in _position_stages(self.stages)])

    def _summed(self, rank: int, field_name: str) -> dict[str, float]:
        """Return the exposed ("causes") or hidden ("hidden") seconds of a pipeline position, by cause."""
        result: dict[str, float] = {}
        for cost, count in self._pass_counts(rank):
            for name, seconds in getattr(cost, field_name).items():
                result[name] = result.get(name, 0.0) + count * seconds
        return result

    def _sent(self, rank: int) -> dict[str, dict[str, float]]:
        """Return the bytes that a pipeline position sends in a step, by operator and kind of link."""
        result: dict[str, dict[str, float]] = {}

        def add(name: str, sent: dict[str, float], times: float) -> None:
            totals = result.setdefault(name, dict.fromkeys(LINKS, 0.0))
            for link in LINKS:
                totals[link] += times * sent[link]

        for cost, times in self._pass_counts(rank):
            for name, sent in cost.sent.items():
                add(name, sent, times)
        add("stages", links(self._hop), self.micro_batches * float(neighbours(self.stages)[rank]))
        if self.documents is not None:
            add("document keys", self.documents.sent, self.micro_batches / self.stages.pp)
        for collective in self.weights.tail(rank):
            add(collective.name, links(collective.cost), 1)
        if self.placed.mapping.sharding == "fsdp":
            passes = self.micro_batches if self._policy.reshard else 1
            for name, sent in self.weights.fsdp_sent(rank).items():
                gathers = 2 * self.micro_batches if self._frees_weights else 1
                add(name, sent, gathers if name.endswith("weights") else passes)
        return {name: sent for name, sent in result.items() if any(sent.values())}


# ---- cached results that are equal for many mappings


_stages = lru_cache(maxsize=1024)(plan_stages)
_model_flops = lru_cache(maxsize=1024)(ModelShape.model_flops)


@lru_cache(maxsize=1024)
def _counts(stages: StagePlan, dense_layers: int) -> Floats:
    result = np.zeros((stages.num_stages, len(BLOCKS)))
    for stage in range(stages.num_stages):
        layers = stages.layers_of(stage)
        early = sum(layer < dense_layers for layer in layers)
        result[stage, 1:3] = early, len(layers) - early
    result[0, 0] = result[-1, 3] = 1
    result.setflags(write=False)
    return result


@lru_cache(maxsize=1024)
def neighbours(stages: StagePlan) -> Floats:
    """Return the number of stage boundaries between each pipeline position and other positions, [pp].

    At each boundary, a position sends one message per micro-batch: activations or gradients.
    """
    result = np.zeros(stages.pp)
    for stage in range(1, stages.num_stages):
        below, above = stages.rank_of(stage - 1), stages.rank_of(stage)
        if below != above:
            result[[below, above]] += 1
    return result


@lru_cache(maxsize=1024)
def _position_stages(stages: StagePlan) -> tuple[list[int], ...]:
    return tuple(list(stages.stages_of(rank)) for rank in range(stages.pp))


@lru_cache(maxsize=1024)
def _passes(schedule: str, pp: int, micro_batches: int, virtual: int) -> Floats:
    """Return the number of passes of each kind of each stage, [stages, kinds of passes]."""
    result = np.zeros((pp * virtual, len(PassKind)))
    if pp == 1 or not find_schedule(schedule).splits_backward:
        result[:, [PassKind.FORWARD, PassKind.BACKWARD]] = micro_batches
    elif schedule != "dualpipev":
        result[:, [PassKind.FORWARD, PassKind.INPUT, PassKind.WEIGHT]] = micro_batches
    else:  # DualPipeV splits backward only while the pipeline fills and drains
        order = pass_order(schedule, pp, 2 * pp, virtual)
        np.add.at(result, (order.stage, order.kind), 1)
        result[:, [PassKind.FORWARD, PassKind.BACKWARD]] += micro_batches - 2 * pp
    result.setflags(write=False)
    return result


def _period(order: PassOrder, end: Floats, span: float) -> float | None:
    """Return the seconds that ``pp`` more micro-batches add, or None if the pipeline is not periodic.

    The replay has ``FULL`` groups of ``pp`` micro-batches. In the middle groups of a periodic
    pipeline, each pass ends later than the same pass of the previous group, all by the same time.

    Args:
        end: end of each pass in seconds, in the order of ``order``.
        span: seconds of the replay, for the tolerance.
    """
    index = np.full((len(PassKind), order.stages, order.micro_batches), -1, dtype=np.int64)
    index[order.kind, order.stage, order.micro] = np.arange(len(order))
    increments = []
    for kind, passes in zip(PassKind, index, strict=True):
        groups = slice(2, FULL) if kind == PassKind.FORWARD else slice(1, FULL - 2)
        ends = np.where(passes < 0, np.nan, end[passes]).reshape(order.stages, FULL, order.pp)[:, groups]
        increments.append(np.diff(ends, axis=1).ravel())
    finite = np.concatenate(increments)
    finite = finite[~np.isnan(finite)]
    return float(finite[0]) if np.ptp(finite) <= 1e-9 * span else None


@lru_cache(maxsize=128)
def _graph(schedule: str, pp: int, micro_batches: int, virtual: int, exposed: bool) -> tuple[PassOrder, ReplayPlan]:
    """Return the order of the passes and the replay plan. They do not depend on durations, so they are cached.

    ``exposed``: whether ranks wait for transfers between stages.
    """
    order = pass_order(schedule, pp, micro_batches, virtual)
    return order, prepare(pipeline_tasks(order, exposed=exposed))
