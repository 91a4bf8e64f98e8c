"""One training step on paper: what every pass takes, replayed as the pipeline's schedule runs it, and what follows.

    step  =  pipeline of passes (replayed)  +  sums of gradients, weights gathered  +  optimizer

A pass is the sum of its operators (``operators.py``) less what is hidden of them (``beside.py``), and with "fsdp" the
transfers of its weights (``weights.py``). Otherwise gradients are summed and weights gathered behind the last pass;
with overlap "inter" or "all" beside the last micro-batch's backward and the first one's forward: all but a layer's.
With overlap "none" ranks wait for what a neighbour stage sends, else transfers between stages run beside passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from moe_comm.plan.beside import FREE, hide
from moe_comm.plan.collectives import NOTHING, Moved
from moe_comm.plan.hardware import Cluster
from moe_comm.plan.mapping import Mapping, Place
from moe_comm.plan.model import ModelShape
from moe_comm.plan.operators import Load, Operators, Pass
from moe_comm.plan.replay import Floats, Plan, prepare, replay
from moe_comm.plan.schedules import PassKind, PassOrder, PassSeconds, pass_order, pipeline_tasks
from moe_comm.plan.shared_cores import shared_span
from moe_comm.plan.weights import Weights
from moe_comm.train.pipeline.stages import StagePlan, plan_stages

LINKS = ("inside", "between", "across")
RECOMPUTED = {"none": (), "selective": ("memory",), "full": ("product", "memory", "transfer")}
"""Kinds of operators that backward does again."""
CAUSES = {"product": "products", "memory": "memory passes"}
FULL = 5
"""Groups of ``pp`` micro-batches after which a pipeline has long been full, as a rule."""
BLOCKS = ("embedding", "dense", "moe", "head")
"""What stages are made of: layers of two kinds, and what the first and the last have more."""


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


@dataclass(frozen=True)
class _Block:
    """One of ``BLOCKS`` for one micro-batch, summed up by operator. seconds: forward and backward."""

    operations: Pass
    seconds: tuple[float, float]
    causes: dict[str, float]
    hidden: dict[str, float]
    sent: dict[str, dict[str, float]]


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
                parts = [self._blocks[name].operations for name, times in named for _ in range(times)]
                forward = tuple(one for part in parts for one in part.forward)
                every[counts] = Pass(forward, tuple(one for part in reversed(parts) for one in part.backward))
            found.append(every[counts])
        return tuple(found)

    def predict(self) -> Step:
        """The step, replayed."""
        own = _own(self.stages)
        takes = (self._each + self._waits).sum(axis=1)
        busy = np.array([takes[stages].sum() for stages in own]) * self.micro_batches
        rank = int(busy.argmax())
        hidden = self._summed(rank, "hidden")
        parts = self._summed(rank, "causes")
        stages = own[rank]
        for into, array in ((parts, self._waits), (hidden, self._waited)):
            if waits := float(array[stages].sum()):
                into["sharded weights"] = self.micro_batches * waits
        parts["pipeline"] = self.span - float(busy[rank])
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
            return float((self._each + self._waits).sum()) * self.micro_batches
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
            mapping.schedule, mapping.parallel.pp, micro_batches, mapping.virtual, mapping.overlap == "none"
        )
        each = self._each + self._waits
        takes = PassSeconds(each[:, 0], each[:, 1] / 2, each[:, 1] / 2).of(order)
        hops = np.full(len(plan.tasks) - len(order), self._hop.seconds)
        return order, plan, np.concatenate([takes, hops])

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
    def _blocks(self) -> dict[str, _Block]:
        return _blocks(_Blocks.of(self.shape, self.place, self.load))

    @cached_property
    def _each(self) -> Floats:
        """Seconds of each stage's forward and backward, without waiting for weights, [stages, 2]."""
        return np.asarray(self._counts @ np.array([self._blocks[name].seconds for name in BLOCKS]))

    # --- weights ---

    @cached_property
    def _waited(self) -> Floats:
        """Of ``_moves``, what passes hide, [stages, 2]."""
        mapping = self.place.mapping
        if mapping.sharding != "fsdp" or mapping.overlap == "none":
            return np.zeros_like(self._each)
        return np.asarray(np.minimum(self._moves, self._each) * FREE)

    @cached_property
    def _waits(self) -> Floats:
        """Of ``_moves``, what passes wait for, [stages, 2]."""
        return self._moves - self._waited

    @cached_property
    def _moves(self) -> Floats:
        """With "fsdp", seconds of the transfers of weights and gradients of a micro-batch, [stages, 2]."""
        return self.weights.sharded() if self.place.mapping.sharding == "fsdp" else np.zeros_like(self._each)

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
            forward, backward = self._each[stages].sum(axis=0) * share
            left = {"gradients": float(backward), "weights": float(forward)}
            for name, one in every.items():
                kind = name.split()[-1]
                if took := min(one.seconds, left[kind]):
                    hidden[name] = took
                    left[kind] -= took
        return total - sum(hidden.values()), hidden

    # --- what is told ---

    def _times(self, rank: int) -> Iterator[tuple[_Block, float]]:
        """The blocks of a position, and how often a step runs each."""
        counts = self._counts[_own(self.stages)[rank]].sum(axis=0) * self.micro_batches
        for name, times in zip(BLOCKS, counts.tolist(), strict=True):
            if times:
                yield self._blocks[name], times

    def _summed(self, rank: int, what: str) -> dict[str, float]:
        """Seconds of a position by cause: products, memory passes, and each transfer by name; or those hidden."""
        found: dict[str, float] = {}
        for block, times in self._times(rank):
            for name, seconds in getattr(block, what).items():
                found[name] = found.get(name, 0.0) + times * seconds
        return found

    def _sent(self, rank: int) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}

        def add(name: str, links: dict[str, float], times: float) -> None:
            into = found.setdefault(name, dict.fromkeys(LINKS, 0.0))
            for link in LINKS:
                into[link] += times * links[link]

        for block, times in self._times(rank):
            for name, links in block.sent.items():
                add(name, links, times)
        add("stages", _links(self._hop), 2 * self.micro_batches * self.place.mapping.virtual)
        for name, moved in self._after(rank).items():
            add(name, _links(moved), 1)
        return {name: links for name, links in found.items() if any(links.values())}


# ---- what many mappings share


@dataclass(frozen=True)
class _Blocks:
    """What blocks depend on; ``place`` is one of those that they are the same for."""

    shape: ModelShape
    cluster: Cluster
    load: Load
    degrees: tuple[int, int, int, int]
    settings: tuple[int, str, str, str]
    place: Place = field(compare=False)

    @classmethod
    def of(cls, shape: ModelShape, place: Place, load: Load) -> _Blocks:
        mapping, p = place.mapping, place.mapping.parallel
        settings = (mapping.micro_batch, mapping.recompute, mapping.overlap, mapping.dispatcher)
        return cls(shape, place.cluster, load, (p.tp, p.cp, p.ep, p.etp), settings, place)


@lru_cache(maxsize=2048)
def _blocks(key: _Blocks) -> dict[str, _Block]:
    shape, operators = key.shape, Operators(key.shape, key.place, key.load)
    mapping, empty = key.place.mapping, Pass((), ())
    every = {
        "embedding": operators.embedding(),
        "dense": _again(operators.layer("dense"), mapping) if shape.dense_layers else empty,
        "moe": _again(operators.layer("moe"), mapping) if shape.moe_layers else empty,
        "head": hide(operators.head(), 0, mapping.overlap),
    }
    return {name: _summed_up(one) for name, one in every.items()}


def _again(layer: Pass, mapping: Mapping) -> Pass:
    """With what is done again before backward, and what is hidden."""
    kinds = RECOMPUTED[mapping.recompute]
    again = tuple(one for one in layer.forward if one.kind in kinds)
    return hide(Pass(layer.forward, again + layer.backward), len(again), mapping.overlap)


def _summed_up(one: Pass) -> _Block:
    causes: dict[str, float] = {}
    hidden: dict[str, float] = {}
    sent: dict[str, dict[str, float]] = {}
    for each in (*one.forward, *one.backward):
        moves = each.kind == "transfer"
        name = each.name.removesuffix(" again") if moves else CAUSES[each.kind]
        causes[name] = causes.get(name, 0.0) + each.shown
        if each.hidden:
            hidden[name] = hidden.get(name, 0.0) + each.hidden
        if moves:
            links = sent.setdefault(name, dict.fromkeys(LINKS, 0.0))
            for link, count in _links(each.moved).items():
                links[link] += count
    return _Block(one, one.seconds(), causes, hidden, sent)


def _links(moved: Moved) -> dict[str, float]:
    return {link: getattr(moved, link) for link in LINKS}


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
def _own(stages: StagePlan) -> tuple[list[int], ...]:
    """The stages of each pipeline position."""
    return tuple(list(stages.stages_of(rank)) for rank in range(stages.pp))


@lru_cache(maxsize=1024)
def _model_flops(shape: ModelShape, seq_len: int) -> float:
    return shape.model_flops(seq_len)


def _period(order: PassOrder, end: Floats, span: float) -> float | None:
    """Seconds that ``pp`` more micro-batches add, if passes show that it is always the same: those of the middle of
    ``FULL`` groups of ``pp`` all end as much later than the ones a group before. None: they do not."""
    at = np.full((2, order.stages, order.micro_batches), -1, dtype=np.int64)
    at[(order.kind != PassKind.FORWARD).astype(np.int64), order.stage, order.micro] = np.arange(len(order))
    forward, backward = end[at].reshape(2, order.stages, FULL, order.pp)
    later = np.concatenate(
        [np.diff(forward[:, 2:], axis=1).ravel(), np.diff(backward[:, 1 : FULL - 2], axis=1).ravel()]
    )
    return float(later[0]) if np.ptp(later) <= 1e-9 * span else None


@lru_cache(maxsize=128)
def _graph(schedule: str, pp: int, micro_batches: int, virtual: int, exposed: bool) -> tuple[PassOrder, Plan]:
    """A pipeline's tasks, sorted; how long they take is no part of it."""
    order = pass_order(schedule, pp, micro_batches, virtual)
    nothing = np.zeros(order.stages)
    return order, prepare(pipeline_tasks(order, PassSeconds(nothing, nothing, nothing), exposed=exposed).tasks)
