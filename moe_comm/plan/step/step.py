"""One training step on paper: what every pass takes, replayed as the pipeline's schedule runs it, and what follows.

    step  =  pipeline of passes (replayed)  +  sums of gradients, weights gathered  +  optimizer

A pass is the sum of its operators (``operators``) less what is hidden of them (``overlap_model``), and with "fsdp" the
transfers of its weights (``weights``). Schedules that split the backward run halves of it (``split_backward``).
Otherwise gradients are summed and weights gathered behind the last pass; with any overlap but "none" beside the
last micro-batch's backward (of a split one, the weights' half) and the first one's forward: all but a layer's.
With overlap "none" ranks wait for what a neighbour stage sends, else transfers between stages run beside passes
("outer": of virtual stages only).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from moe_comm.plan.arrays import Floats
from moe_comm.plan.machine.collectives import NOTHING, Moved
from moe_comm.plan.model.load import Load
from moe_comm.plan.model.mapping import Place
from moe_comm.plan.model.shape import ModelShape
from moe_comm.plan.pipeline.orders import PassKind, PassOrder, pass_order
from moe_comm.plan.pipeline.schedules import find_schedule
from moe_comm.plan.pipeline.stages import StagePlan, plan_stages
from moe_comm.plan.step.blocks import BLOCKS, LINKS, Priced, Work, links, priced, seconds_of
from moe_comm.plan.step.operators import Operators, Pass
from moe_comm.plan.step.overlap_model import FREE
from moe_comm.plan.step.replay import Plan, prepare, replay
from moe_comm.plan.step.schedules import PassSeconds, pipeline_tasks
from moe_comm.plan.step.shared_cores import shared_span
from moe_comm.plan.step.weights import Weights

BACK = (PassKind.BACKWARD, PassKind.INPUT, PassKind.WEIGHT)
"""Passes that go through a stage's blocks the other way round."""
FULL = 5
"""Groups of ``pp`` micro-batches after which a pipeline has long been full, as a rule."""


@dataclass(frozen=True)
class Step:
    """A step's cost. seconds: all of it. breakdown: seconds by cause, of the busiest pipeline rank; they add up.

    model_flops: that MFU counts, of the whole batch. sent: bytes that a rank sends in a step, by operator and then by
    kind of link ("inside", "between", "across" pods). hidden: seconds of the same rank's transfers that are no part of
    the step because something else goes on meanwhile, by operator.
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
        """Model FLOPs utilisation: a fraction."""
        return self.model_flops / (self.seconds * self.gpus * self.peak)


class StepModel:
    """Predicts a step of ``shape`` with batches of ``global_batch`` sequences."""

    def __init__(self, shape: ModelShape, place: Place, load: Load, global_batch: int) -> None:
        self.shape, self.place, self.load, self.global_batch = shape, place, load, global_batch
        self.micro_batches = place.mapping.micro_batches(global_batch)
        self._afters: dict[int, dict[str, Moved]] = {}

    @cached_property
    def operators(self) -> Operators:
        return Operators(self.shape, self.place, self.load)

    @cached_property
    def stages(self) -> StagePlan:
        """Which layers are in which stage, and which rank has it: as even as they go."""
        mapping = self.place.mapping
        return _stages(self.shape.layers, mapping.parallel.pp, mapping.schedule, mapping.virtual)

    @cached_property
    def weights(self) -> Weights:
        return Weights(self.shape, self.place, self.stages, self.load.dtype)

    @cached_property
    def stage_passes(self) -> tuple[Pass, ...]:
        """What a micro-batch runs in each stage; with what is computed again in backward."""
        every: dict[tuple[int, ...], Pass] = {}
        found = []
        for counts in map(tuple, self._counts.astype(int).tolist()):
            if counts not in every:
                named = zip(BLOCKS, counts, strict=True)
                parts = [self._blocks[name].operations.kinds for name, times in named for _ in range(times)]
                forward = tuple(one for part in parts for one in part[PassKind.FORWARD])
                later = (tuple(one for part in reversed(parts) for one in part[kind]) for kind in BACK)
                every[counts] = Pass(forward, *later)
            found.append(every[counts])
        if self.split:
            found[0] = replace(found[0], input=(), weight=found[0].backward)
        return tuple(found)

    @cached_property
    def split(self) -> bool:
        """Whether backward passes, or some of them, are run in halves."""
        return self.place.mapping.splits

    def predict(self) -> Step:
        """The step, replayed."""
        rank = int(self.busy.argmax())
        hidden = self._summed(rank, "hidden")
        parts = self._summed(rank, "causes")
        stages = _own(self.stages)[rank]
        for into, array in ((parts, self._waits), (hidden, self._waited)):
            if waits := float((array * self.passes)[stages].sum()):
                into["sharded weights"] = waits
        parts["pipeline"] = self.span - float(self.busy[rank])
        after, beside = self._behind(rank)
        parts["gradients and weights"] = after
        parts["optimizer"] = self._updated(rank)
        tokens = self.global_batch * self.load.seq_len
        return Step(
            seconds=sum(parts.values()),
            tokens=tokens,
            gpus=self.place.mapping.parallel.world,
            model_flops=_model_flops(self.shape, self.load.seq_len) * tokens,
            peak=self.place.cluster.accelerator.peak(self.load.dtype),
            breakdown=parts,
            sent=self._sent(rank),
            hidden={**hidden, **beside},
        )

    # --- the pipeline ---

    def pipeline(self) -> tuple[PassOrder, Plan, Floats]:
        """Passes in order, what to replay, and the seconds of every task: passes first, then transfers."""
        return self._replayed(self.micro_batches)

    @cached_property
    def span(self) -> float:
        """Seconds from the first pass to the end of the last.

        Once a pipeline is full it goes on in periods: ``pp`` more micro-batches take as long as those before them, on
        every rank. If fewer of them show that, the others are not replayed.
        """
        pp = self.place.mapping.parallel.pp
        if pp == 1:
            return float(self.busy[0])
        if (shared := self.place.cluster.accelerator.shared) > 1:
            order, plan, seconds = self.pipeline()
            return shared_span(plan.tasks, seconds, len(order), pp, shared)
        few = FULL * pp
        if self.micro_batches > few + pp and not (self.micro_batches - few) % pp:
            order, plan, seconds = self._replayed(few)
            times = replay(plan, seconds)
            if (period := _period(order, times.end[: len(order)], float(times.span))) is not None:
                return float(times.span) + (self.micro_batches - few) // pp * period
        _, plan, seconds = self.pipeline()
        return float(replay(plan, seconds).span)

    def _replayed(self, micro_batches: int) -> tuple[PassOrder, Plan, Floats]:
        mapping = self.place.mapping
        order, plan = _graph(
            mapping.schedule, mapping.parallel.pp, micro_batches, mapping.virtual, mapping.waits_for_stages
        )
        takes = (self._each + self._waits)[order.stage, order.kind]
        hops = np.full(len(plan.tasks) - len(order), self._hop.seconds)
        return order, plan, np.concatenate([takes, hops])

    @cached_property
    def passes(self) -> Floats:
        """How many of each kind a step has of each stage, [stages, kinds of passes]."""
        mapping = self.place.mapping
        return _passes(mapping.schedule, mapping.parallel.pp, self.micro_batches, mapping.virtual)

    @cached_property
    def busy(self) -> Floats:
        """Seconds of all passes of each pipeline position, [pp]."""
        takes = ((self._each + self._waits) * self.passes).sum(axis=1)
        return np.array([takes[stages].sum() for stages in _own(self.stages)])

    @cached_property
    def _hop(self) -> Moved:
        """A micro-batch from a stage to the next."""
        if self.place.mapping.parallel.pp == 1:
            return NOTHING
        rows = self.operators.tokens * self.operators.row_bytes
        return self.place.cluster.send(rows, self.place.spans["pp"])

    @cached_property
    def _counts(self) -> Floats:
        """How often each stage has each of ``BLOCKS``, [stages, blocks]."""
        return _counts(self.stages, self.shape.dense_layers)

    @cached_property
    def _blocks(self) -> dict[str, Priced]:
        return priced(self.shape, self.place, self.load)

    @cached_property
    def _each(self) -> Floats:
        """Seconds of each stage's passes, without waiting for weights, [stages, kinds of passes]."""
        return self._by_stage(self._counts @ seconds_of(self._blocks))

    def _by_stage(self, found: Floats) -> Floats:
        """[stages, kinds], with the first stage's halves as they are: the weights' has all."""
        if self.split:
            found[0, PassKind.INPUT], found[0, PassKind.WEIGHT] = 0.0, found[0, PassKind.BACKWARD]
        return found

    # --- weights ---

    @cached_property
    def _waited(self) -> Floats:
        """Of ``moves``, what passes hide, [stages, kinds of passes]."""
        mapping = self.place.mapping
        if mapping.sharding != "fsdp" or mapping.overlap == "none":
            return np.zeros_like(self._each)
        return np.asarray(np.minimum(self.moves, self._each) * FREE)

    @cached_property
    def _waits(self) -> Floats:
        """Of ``moves``, what passes wait for, [stages, kinds of passes]."""
        return self.moves - self._waited

    @cached_property
    def moves(self) -> Floats:
        """With "fsdp", seconds of the transfers of weights and gradients of a micro-batch, [stages, kinds of passes]:
        of halves, the input's gathers weights and the weights' scatters their gradients."""
        found = np.zeros_like(self._each)
        if self.place.mapping.sharding == "fsdp":
            gathers, both = self.weights.sharded().T
            found.T[:] = (gathers, both, gathers, both - gathers) if self.split else (gathers, both, both, 0 * both)
        return self._by_stage(found)

    def _after(self, rank: int) -> dict[str, Moved]:
        """What is summed and gathered behind the last pass."""
        if rank not in self._afters:
            self._afters[rank] = self.weights.after(rank)
        return self._afters[rank]

    def _updated(self, rank: int) -> float:
        """Seconds of the optimizer."""
        return self.weights.updated(rank)

    def _behind(self, rank: int) -> tuple[float, dict[str, float]]:
        """Seconds of ``_after`` that the step sees, and what of each is hidden: gradients of a layer are summed while
        those of the ones before it are computed, weights are gathered while the layers before them run."""
        every = self._after(rank)
        total = sum(one.seconds for one in every.values())
        hidden: dict[str, float] = {}
        if self.place.mapping.overlap != "none":
            stages = _own(self.stages)[rank]
            layers = self._counts[stages][:, 1:3].sum()
            share = FREE * (1 - 1 / layers) if layers else 0.0
            each = self._each[stages].sum(axis=0) * share
            last = PassKind.WEIGHT if self.split else PassKind.BACKWARD
            left = {"gradients": float(each[last]), "weights": float(each[PassKind.FORWARD])}
            for name, one in every.items():
                kind = name.split()[-1]
                if took := min(one.seconds, left[kind]):
                    hidden[name] = took
                    left[kind] -= took
        return total - sum(hidden.values()), hidden

    # --- what is told ---

    def _times(self, rank: int) -> Iterator[tuple[Work, float]]:
        """What a position does, by block and kind of pass, and how often in a step."""
        for name, times in zip(BLOCKS, self._work[rank].tolist(), strict=True):
            for work, count in zip(self._blocks[name].work, times, strict=True):
                if count:
                    yield work, count

    @cached_property
    def _work(self) -> Floats:
        """How often each position does each block's work of each kind, [pp, blocks, kinds of passes]."""
        passes = self.passes.copy()
        if self.split:  # the first stage's are whole
            passes[0, PassKind.BACKWARD] += passes[0, PassKind.WEIGHT]
            passes[0, PassKind.INPUT] = passes[0, PassKind.WEIGHT] = 0
        return np.array([self._counts[stages].T @ passes[stages] for stages in _own(self.stages)])

    def _summed(self, rank: int, what: str) -> dict[str, float]:
        """Seconds of a position by cause: products, memory passes, and each transfer by name; or those hidden."""
        found: dict[str, float] = {}
        for work, times in self._times(rank):
            for name, seconds in getattr(work, what).items():
                found[name] = found.get(name, 0.0) + times * seconds
        return found

    def _sent(self, rank: int) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}

        def add(name: str, sent: dict[str, float], times: float) -> None:
            into = found.setdefault(name, dict.fromkeys(LINKS, 0.0))
            for link in LINKS:
                into[link] += times * sent[link]

        for work, times in self._times(rank):
            for name, sent in work.sent.items():
                add(name, sent, times)
        add("stages", links(self._hop), self.micro_batches * float(neighbours(self.stages)[rank]))
        for name, moved in self._after(rank).items():
            add(name, links(moved), 1)
        return {name: sent for name, sent in found.items() if any(sent.values())}


# ---- what many mappings share


@lru_cache(maxsize=1024)
def _stages(layers: int, pp: int, schedule: str, virtual: int) -> StagePlan:
    return plan_stages(layers, pp, schedule, virtual=virtual)


@lru_cache(maxsize=1024)
def _counts(stages: StagePlan, dense_layers: int) -> Floats:
    found = np.zeros((stages.num_stages, len(BLOCKS)))
    for stage in range(stages.num_stages):
        layers = stages.layers_of(stage)
        early = sum(layer < dense_layers for layer in layers)
        found[stage, 1:3] = early, len(layers) - early
    found[0, 0] = found[-1, 3] = 1
    found.setflags(write=False)
    return found


@lru_cache(maxsize=1024)
def neighbours(stages: StagePlan) -> Floats:
    """How many passes of a micro-batch take something from another rank, and how many send something to one, [pp]."""
    found = np.zeros(stages.pp)
    for stage in range(1, stages.num_stages):
        below, above = stages.rank_of(stage - 1), stages.rank_of(stage)
        if below != above:
            found[[below, above]] += 1
    return found


@lru_cache(maxsize=1024)
def _own(stages: StagePlan) -> tuple[list[int], ...]:
    """The stages of each pipeline position."""
    return tuple(list(stages.stages_of(rank)) for rank in range(stages.pp))


@lru_cache(maxsize=1024)
def _model_flops(shape: ModelShape, seq_len: int) -> float:
    return shape.model_flops(seq_len)


@lru_cache(maxsize=1024)
def _passes(schedule: str, pp: int, micro_batches: int, virtual: int) -> Floats:
    """How many of each kind there are of each stage, [stages, kinds of passes]."""
    found = np.zeros((pp * virtual, len(PassKind)))
    if pp == 1 or not find_schedule(schedule).splits_backward:
        found[:, [PassKind.FORWARD, PassKind.BACKWARD]] = micro_batches
    elif schedule != "dualpipev":
        found[:, [PassKind.FORWARD, PassKind.INPUT, PassKind.WEIGHT]] = micro_batches
    else:  # what fills the pipeline and empties it has halves; each micro-batch more is whole
        order = pass_order(schedule, pp, 2 * pp, virtual)
        np.add.at(found, (order.stage, order.kind), 1)
        found[:, [PassKind.FORWARD, PassKind.BACKWARD]] += micro_batches - 2 * pp
    found.setflags(write=False)
    return found


def _period(order: PassOrder, end: Floats, span: float) -> float | None:
    """Seconds that ``pp`` more micro-batches add, if passes show that it is always the same: those of the middle of
    ``FULL`` groups of ``pp`` all end as much later than the ones a group before. None: they do not."""
    at = np.full((len(PassKind), order.stages, order.micro_batches), -1, dtype=np.int64)
    at[order.kind, order.stage, order.micro] = np.arange(len(order))
    later = []
    for kind, found in zip(PassKind, at, strict=True):
        groups = slice(2, FULL) if kind == PassKind.FORWARD else slice(1, FULL - 2)
        ends = np.where(found < 0, np.nan, end[found]).reshape(order.stages, FULL, order.pp)[:, groups]
        later.append(np.diff(ends, axis=1).ravel())
    every = np.concatenate(later)
    every = every[~np.isnan(every)]
    return float(every[0]) if np.ptp(every) <= 1e-9 * span else None


@lru_cache(maxsize=128)
def _graph(schedule: str, pp: int, micro_batches: int, virtual: int, exposed: bool) -> tuple[PassOrder, Plan]:
    """A pipeline's tasks, sorted; how long they take is no part of it."""
    order = pass_order(schedule, pp, micro_batches, virtual)
    nothing = np.zeros(order.stages)
    return order, prepare(pipeline_tasks(order, PassSeconds(nothing, nothing, nothing), exposed=exposed).tasks)
