"""The fastest mappings that fit, of all that can run; and where none fits, the nearest and what would make them fit.

A search keeps a queue of what it has, least bound first (``bound``), and takes one off it at a time:

    degrees, schedule, stages,     leave if not even the leanest mapping with them fits; else, with the least
    micro-batch                    recomputing, the shardings that fit go back, with the bound of the whole step
                                   and the others with more recomputing, which is never faster; where a schedule
                                   splits passes it can be, and all of them do
    a mapping that fits            is replayed, and goes back with its seconds
    a mapping that was replayed    is faster than all that is left: the next of the answer

So the answer is that of replaying everything, after replaying a few dozen.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from moe_comm.errors import ConfigError
from moe_comm.plan.model.mapping import Dispatcher, Mapping, Overlap, Sharding
from moe_comm.plan.pipeline.schedules import can_split
from moe_comm.plan.search.bound import Bounded, Floor
from moe_comm.plan.search.fit import Change, Fit, changes_that_fit
from moe_comm.plan.search.question import Candidate, Question
from moe_comm.plan.search.space import Shape, Space, host_of
from moe_comm.topology import ParallelConfig

KEPT = 10
"""Mappings of an answer."""
NEAREST = 3
"""Of those that do not fit, if none does."""
LIMIT_S = 25.0
TOO_LARGE, SLOWER = "do not fit", "cannot be among the best"
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""How many times as many accelerators are tried where none fits."""


@dataclass(frozen=True)
class Near:
    """A mapping that does not fit. changes: with which it would, beyond what the search could choose."""

    mapping: Mapping
    fit: Fit
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Found:
    """What a search found.

    best: the fastest that fit, in order; of mappings that differ in recomputing, sharding, overlap or dispatcher
    alone the fastest.
    tried: mappings that can run, all of which were considered. pruned: how many of them were not replayed, by reason.
    replayed: how many were. nearest: if none fits, those that lack least. gpus: if none fits, a number of the same
    accelerators with which some would, or None. complete: nothing faster was overlooked for lack of time.
    space: what was searched: with ``wide`` where nothing else can run or fits.
    """

    best: tuple[Candidate, ...]
    tried: int
    pruned: dict[str, int]
    nearest: tuple[Near, ...]
    seconds: float
    replayed: int = 0
    gpus: int | None = None
    complete: bool = True
    space: Space = field(default_factory=Space)


def search(question: Question, space: Space | None = None, *, keep: int = KEPT, limit_s: float = LIMIT_S) -> Found:
    """The ``keep`` fastest mappings of ``space`` that fit.

    Args:
        limit_s: after which the best so far are the answer (``Found.complete`` says so), if there are any.

    Raises:
        ConfigError: no mapping can run: says what the degrees fail at.
    """
    space, started = space or Space(), time.perf_counter()
    refused: Counter[str] = Counter()
    found = None
    for each in (space, replace(space, wide=True)) if not space.wide else (space,):
        run = _Search(question, each, keep, started + limit_s, refused)
        if run.tried:
            found = replace(run.found(), seconds=time.perf_counter() - started)
            if found.best:
                return found
    if found is None:
        raise ConfigError(_nothing_runs(question, replace(space, wide=True), refused))
    nearest = tuple(replace(one, changes=changes(question, one.mapping)) for one in found.nearest)
    gpus = gpus_that_fit(question, found.space)
    return replace(found, nearest=nearest, gpus=gpus, seconds=time.perf_counter() - started)


def changes(question: Question, mapping: Mapping) -> tuple[Change, ...]:
    """What would make ``mapping`` fit: single changes, or if none does two together; see ``fit.changes_that_fit``."""
    return changes_that_fit(
        question.shape,
        mapping,
        question.load,
        question.global_batch,
        question.cluster.accelerator,
        policy=question.policy,
        reserve=question.reserve,
        host=host_of(question),
    )


def gpus_that_fit(question: Question, space: Space | None = None, limit_s: float = 5.0) -> int | None:
    """A number of the same accelerators, a multiple of those there are, on which some mapping fits; None: none found,
    or hosts in pods, which do not multiply."""
    space, ends = space or Space(), time.perf_counter() + limit_s
    for times in SIZES if not question.cluster.pods else ():
        more = replace(question, cluster=replace(question.cluster, gpus=times * question.cluster.gpus))
        for p in space.degrees(more):
            every = _leanest(space, list(space.shapes(more, p)), space.dispatchers(more, p), p, None)
            if any(_fit(more, mapping) for mapping in every):
                return more.cluster.gpus
            if time.perf_counter() > ends:
                return None
    return None


Key = tuple[ParallelConfig, Shape]
"""What mappings of an answer differ in."""


@dataclass(frozen=True)
class _Open:
    """Mappings that are not yet told apart. recompute: its place in the space. sharding: those left to try."""

    key: Key
    overlap: Overlap
    dispatcher: Dispatcher
    recompute: int
    sharding: tuple[Sharding, ...]


class _Search:
    """One run of it over one space."""

    def __init__(self, question: Question, space: Space, keep: int, ends: float, refused: Counter[str]) -> None:
        self.question, self.space, self.keep, self.ends = question, space, keep, ends
        self.replayed = self.too_large = 0
        self._fitting = False
        self._floor = Floor(question)
        self._queue: list[tuple[float, int, _Open | Bounded | Candidate]] = []
        self._pushed = 0
        self._lean: dict[tuple[ParallelConfig, int | None], bool] = {}
        self._nearest: dict[ParallelConfig, Near] = {}
        self._shapes: dict[ParallelConfig, list[Shape]] = {}
        self._ways: dict[ParallelConfig, tuple[Dispatcher, ...]] = {}
        for p in space.degrees(question, refused):
            ways, shapes = space.dispatchers(question, p), list(space.shapes(question, p))
            if ways and shapes:
                self._shapes[p], self._ways[p] = shapes, ways
            elif not ways:
                refused[f"nothing to do for the dispatcher {space.dispatcher[0]}"] += 1
            else:
                refused["micro-batches are too few or too many for the pipeline"] += 1
        self.tried = sum(map(self._mappings, self._shapes))

    def found(self) -> Found:
        for p, shapes in self._shapes.items():
            if self._can_fit(p, None):
                for shape, overlap, dispatcher in product(shapes, self.space.overlap, self._ways[p]):
                    self._push_open(_Open((p, shape), overlap, dispatcher, 0, self.space.sharding))
            else:
                self.too_large += self._mappings(p)
        best, complete = self._run()
        nearest = () if best else tuple(sorted(self._nearest.values(), key=lambda one: one.fit.missing)[:NEAREST])
        return Found(
            best,
            self.tried,
            {TOO_LARGE: self.too_large, SLOWER: self.tried - self.replayed - self.too_large},
            nearest,
            seconds=0.0,
            replayed=self.replayed,
            complete=complete,
            space=self.space,
        )

    def _mappings(self, p: ParallelConfig) -> int:
        return len(self._shapes[p]) * len(self.space.trades()) * len(self._ways[p])

    def _run(self) -> tuple[tuple[Candidate, ...], bool]:
        best: dict[Key, Candidate] = {}
        complete = True
        while self._queue and len(best) < self.keep:
            if self._fitting and time.perf_counter() > self.ends:
                self._hurry()
                best, complete = {**self._replayed(), **best}, False
                break
            one = heapq.heappop(self._queue)[2]
            if isinstance(one, Candidate):
                best.setdefault(_key(one.mapping), one)
            elif isinstance(one, Bounded):
                self._replay(one)
            elif one.key not in best:
                self._open(one)
        return tuple(sorted(best.values(), key=lambda one: one.step.seconds)[: self.keep]), complete

    def _open(self, one: _Open) -> None:
        p, (schedule, virtual, micro_batch) = one.key
        space, left = self.space, []
        if not one.recompute and not self._can_fit(p, micro_batch):
            self.too_large += len(space.recompute) * len(one.sharding)
            return
        for sharding in one.sharding:
            recompute = space.recompute[one.recompute]
            mapping = Mapping(p, virtual, micro_batch, sharding, recompute, one.overlap, schedule, one.dispatcher)
            fits = self._fits(mapping)
            if fits:
                bounded = Bounded.of(self.question, mapping)
                self._push(bounded.bound(), bounded)
                self._fitting = True
            else:
                self.too_large += 1
            if not fits or can_split(schedule, p.pp):
                left.append(sharding)
        if left and one.recompute + 1 < len(space.recompute):
            self._push_open(replace(one, recompute=one.recompute + 1, sharding=tuple(left)))

    def _replay(self, bounded: Bounded) -> None:
        mapping = bounded.place.mapping
        self.replayed += 1
        step = bounded.predict()
        self._push(step.seconds, Candidate(mapping, step, self.question.fit(mapping)))

    def _hurry(self) -> None:
        """Replay the most promising of those that fit."""
        waiting = [one[2] for one in sorted(self._queue) if isinstance(one[2], Bounded)]
        for one in waiting[: self.keep]:
            self._replay(one)

    def _replayed(self) -> dict[Key, Candidate]:
        """Those in the queue."""
        waiting = [one for _, _, one in self._queue if isinstance(one, Candidate)]
        return {_key(one.mapping): one for one in sorted(waiting, key=lambda one: -one.step.seconds)}

    def _can_fit(self, p: ParallelConfig, micro_batch: int | None) -> bool:
        if (p, micro_batch) not in self._lean:
            every = _leanest(self.space, self._shapes[p], self._ways[p], p, micro_batch)
            self._lean[p, micro_batch] = any(self._fits(mapping) for mapping in every)
        return self._lean[p, micro_batch]

    def _fits(self, mapping: Mapping) -> bool:
        fit, p = _fit(self.question, mapping), mapping.parallel
        if fit is not None and not fit and (p not in self._nearest or fit.missing < self._nearest[p].fit.missing):
            self._nearest[p] = Near(mapping, fit, ())
        return bool(fit)

    def _push_open(self, one: _Open) -> None:
        p, (schedule, virtual, micro_batch) = one.key
        levels = self.space.recompute[one.recompute :][: None if can_split(schedule, p.pp) else 1]
        sharding = self.space.sharding[0]  # a floor is the same for all of them
        every = (
            Mapping(p, virtual, micro_batch, sharding, level, one.overlap, schedule, one.dispatcher) for level in levels
        )
        self._push(min(map(self._floor.of, every)), one)

    def _push(self, bound: float, one: _Open | Bounded | Candidate) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (bound, self._pushed, one))


def _leanest(
    space: Space, shapes: list[Shape], ways: tuple[Dispatcher, ...], p: ParallelConfig, micro_batch: int | None
) -> Iterator[Mapping]:
    """Of each sharding and dispatcher the mappings of which one takes least memory: the smallest micro-batch, with each
    schedule the fewest stages a rank, and as much recomputed as can be. Fsdp without pipeline keeps less in a step of
    one micro-batch: that one, too."""
    fitting = [one for one in shapes if micro_batch in (None, one[2])]
    firsts = {schedule: (schedule, virtual, size) for schedule, virtual, size in reversed(fitting)}
    lean = sorted(firsts.values(), key=fitting.index)
    # hierarchical takes more than all_to_all.
    ways = tuple(one for one in ways if one != "hierarchical" or "all_to_all" not in ways)
    for schedule, virtual, size in dict.fromkeys(lean + (fitting[-1:] if p.pp == 1 else [])):
        for sharding, way in product(reversed(space.sharding), ways):
            yield Mapping(p, virtual, size, sharding, space.recompute[-1], space.overlap[0], schedule, way)


def _fit(question: Question, mapping: Mapping) -> Fit | None:
    """None: it cannot run so."""
    try:
        return question.fit(mapping)
    except ConfigError:
        return None


def _key(mapping: Mapping) -> Key:
    schedule = mapping.schedule if mapping.parallel.pp > 1 else None
    return mapping.parallel, (schedule, mapping.virtual, mapping.micro_batch)


def _nothing_runs(question: Question, space: Space, refused: Counter[str]) -> str:
    shape, gpus = question.shape, question.cluster.gpus
    told = (
        f"no mapping of {shape.name} can run on {gpus:,} accelerators with {question.global_batch:,} sequences of "
        f"{question.load.seq_len:,} tokens a step"
    )
    # As many sequences as accelerators can be dealt over any number of them.
    dealt = replace(question, global_batch=gpus)
    least = min((p.dp for p in space.degrees(dealt) if space.dispatchers(dealt, p)), default=None)
    if least is None:
        reasons = "; ".join(why for why, _ in refused.most_common(3))
        return f"{told}: {reasons or 'nothing divides'}. Give another number of accelerators, or another seq_len"
    return (
        f"{told}: heads and layers can be cut so far that dp is {least:,} at least, which the sequences must be a "
        f"multiple of, with enough of them for the pipeline. Give another number of them, or of accelerators"
    )
