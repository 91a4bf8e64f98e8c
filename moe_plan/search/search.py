"""Search for the fastest mappings that fit memory. If none fits, report the nearest ones and what would make them fit.

A search keeps a priority queue ordered by lower bound (``bound``) and takes one entry at a time:

    degrees, schedule, stages,     is dropped if its mapping with the least memory does not fit; else, with the least
    micro-batch                    recomputation, the shardings that fit are queued with the bound of the complete step,
                                   and the others with more recomputation (slower, unless a schedule splits backward)
    a mapping that fits            is replayed, and queued with its time
    a replayed mapping             is faster than all remaining entries: it is the next result

The result equals that of replaying all mappings, after replaying a few dozen.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from moe_comm.errors import ConfigError
from moe_comm.topology import ParallelConfig
from moe_comm.topology.pipeline import can_split
from moe_plan.model.mapping import Dispatcher, LengthMode, Mapping, OverlapMode
from moe_plan.search.bound import BoundedStepModel, PassBounds
from moe_plan.search.request import Fit, MappingChange, PlanCandidate, PlanRequest, changes_that_fit
from moe_plan.search.space import PipelineShape, SearchSpace, Storage

KEPT = 10
"""Default number of mappings in a result."""
NEAREST = 3
"""Number of reported mappings that do not fit, if none fits."""
LIMIT_S = 25.0
TOO_LARGE, SLOWER = "do not fit", "cannot be among the best"
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Multiples of the number of accelerators to try if no mapping fits."""


@dataclass(frozen=True)
class NearestMapping:
    """A mapping that does not fit. changes: changes that would make it fit, beyond the settings of the search."""

    mapping: Mapping
    fit: Fit
    changes: tuple[MappingChange, ...]


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    best: the fastest mappings that fit, in order. Of mappings that differ only in recomputation, sharding, replicas,
        overlap or dispatcher, only the fastest is included.
    tried: number of mappings that can run. All of them were considered. pruned: number that was not replayed, by
        reason. replayed: number that was.
    nearest: if none fits, those with the least missing memory. gpus: if none fits, a larger number of accelerators on
        which some mapping fits, or None.
    complete: False if the time limit was reached. common: mappings of published runs, from ``common_mappings``.
    space: the searched space, ``wide`` if nothing else runs or fits.
    """

    best: tuple[PlanCandidate, ...]
    tried: int
    pruned: dict[str, int]
    nearest: tuple[NearestMapping, ...]
    seconds: float
    replayed: int = 0
    gpus: int | None = None
    complete: bool = True
    common: tuple[PlanCandidate, ...] = ()
    space: SearchSpace = field(default_factory=SearchSpace)


def search(
    request: PlanRequest, space: SearchSpace | None = None, *, keep: int = KEPT, limit_s: float = LIMIT_S
) -> SearchResult:
    """Return the ``keep`` fastest mappings of ``space`` that fit.

    Args:
        space: mappings to search; None: the default space.
        keep: number of mappings to return.
        limit_s: time limit in seconds. The search then returns the best mappings so far, if any fits.

    Raises:
        ConfigError: no mapping can run. The message names the degrees and reasons.
    """
    space, started = space or SearchSpace(), time.perf_counter()
    rejected: Counter[str] = Counter()
    result = None
    for searched in (space, replace(space, wide=True)) if not space.wide else (space,):
        run = _Search(request, searched, keep, started + limit_s, rejected)
        if run.tried:
            result = replace(run.result(), seconds=time.perf_counter() - started)
            if result.best:
                return result
    if result is None:
        raise ConfigError(_nothing_runs(request, replace(space, wide=True), rejected))
    nearest = tuple(replace(near, changes=changes_that_fit(request, near.mapping)) for near in result.nearest)
    gpus = gpus_that_fit(request, result.space)
    return replace(result, nearest=nearest, gpus=gpus, seconds=time.perf_counter() - started)


def gpus_that_fit(request: PlanRequest, space: SearchSpace | None = None, limit_s: float = 5.0) -> int | None:
    """Return a multiple of the number of accelerators on which some mapping fits.

    The result is None if none was found in time, and for clusters with pods.
    """
    space, ends = space or SearchSpace(), time.perf_counter() + limit_s
    for times in SIZES if not request.cluster.pods else ():
        larger = replace(request, cluster=replace(request.cluster, gpus=times * request.cluster.gpus))
        for p in space.degrees(larger):
            trades = _Trades(list(space.shapes(larger, p)), space.dispatchers(larger, p), space.storages(larger, p))
            if any(_fit(larger, mapping) for mapping in trades.leanest(space, p, None)):
                return larger.cluster.gpus
            if time.perf_counter() > ends:
                return None
    return None


Key = tuple[ParallelConfig, PipelineShape]
"""A result has only the fastest mapping of each key."""


@dataclass(frozen=True)
class _OpenNode:
    """Mappings that share these settings. recompute: index in ``space.recompute``. storages: those left to try."""

    key: Key
    overlap: OverlapMode
    dispatcher: Dispatcher
    recompute: int
    storages: tuple[Storage, ...]
    lengths: LengthMode


@dataclass(frozen=True)
class _Trades:
    """The settings of mappings with the same degrees, besides recomputation and overlap."""

    shapes: list[PipelineShape]
    dispatchers: tuple[Dispatcher, ...]
    storages: tuple[Storage, ...]

    @property
    def count(self) -> int:
        return len(self.shapes) * len(self.dispatchers) * len(self.storages)

    def leanest(self, space: SearchSpace, p: ParallelConfig, micro_batch: int | None) -> Iterator[Mapping]:
        """Yield a few mappings for each storage and dispatcher. One of them takes the least memory.

        They have the smallest micro-batch, for each schedule the fewest stages per rank, and the most recomputation.
        Without a pipeline, the largest micro-batch is also tried, because fsdp takes less memory in a step with one
        micro-batch.
        """
        eligible = [shape for shape in self.shapes if micro_batch in (None, shape[2])]
        smallest = {schedule: (schedule, virtual, size) for schedule, virtual, size in reversed(eligible)}
        lean = sorted(smallest.values(), key=eligible.index)
        # hierarchical takes more memory than all_to_all.
        names = tuple(
            name for name in self.dispatchers if name != "hierarchical" or "all_to_all" not in self.dispatchers
        )
        recompute, overlap = space.recompute[-1], space.overlap[0]
        for schedule, virtual, size in dict.fromkeys(lean + (eligible[-1:] if p.pp == 1 else [])):
            for (sharding, replicas), name in product(reversed(self.storages), names):
                yield Mapping(p, virtual, size, sharding, recompute, overlap, schedule, name, replicas)


class _Search:
    def __init__(
        self, request: PlanRequest, space: SearchSpace, keep: int, deadline: float, rejected: Counter[str]
    ) -> None:
        self.request, self.space, self.keep, self.deadline = request, space, keep, deadline
        self.replayed = self.too_large = 0
        self._any_fits = False
        self._bounds = PassBounds(request)
        self._queue: list[tuple[float, int, _OpenNode | BoundedStepModel | PlanCandidate]] = []
        self._pushed = 0
        self._lean: dict[tuple[ParallelConfig, int | None], bool] = {}
        self._nearest: dict[ParallelConfig, NearestMapping] = {}
        self._trades: dict[ParallelConfig, _Trades] = {}
        for p in space.degrees(request, rejected):
            trades = _Trades(list(space.shapes(request, p)), space.dispatchers(request, p), space.storages(request, p))
            if not trades.dispatchers:
                rejected[f"dispatcher {space.dispatcher[0]} does not apply"] += 1
            elif not trades.shapes:
                rejected["micro-batches are too few or too many for the pipeline"] += 1
            elif not trades.storages:
                rejected[f"sharding and {space.replicas} replicas do not apply"] += 1
            else:
                self._trades[p] = trades
        self.tried = sum(map(self._mappings, self._trades))

    def result(self) -> SearchResult:
        # Drop degrees if even their mapping with the least memory does not fit. Queue the others by their lower bound.
        for p, trades in self._trades.items():
            if self._can_fit(p, None):
                for shape, overlap, dispatcher in product(trades.shapes, self.space.overlap, trades.dispatchers):
                    for lengths in self._length_modes(p, overlap):
                        self._push_open(_OpenNode((p, shape), overlap, dispatcher, 0, trades.storages, lengths))
            else:
                self.too_large += self._mappings(p)
        best, complete = self._run()
        nearest = () if best else tuple(sorted(self._nearest.values(), key=lambda near: near.fit.missing)[:NEAREST])
        return SearchResult(
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
        modes = sum(len(self._length_modes(p, overlap)) for overlap in self.space.overlap)
        return self._trades[p].count * len(self.space.recompute) * modes

    def _length_modes(self, p: ParallelConfig, overlap: OverlapMode) -> tuple[LengthMode, ...]:
        return self.space.length_modes(self.request, Mapping(p, overlap=overlap))

    def _run(self) -> tuple[tuple[PlanCandidate, ...], bool]:
        best: dict[Key, PlanCandidate] = {}
        complete = True
        while self._queue and len(best) < self.keep:
            if self._any_fits and time.perf_counter() > self.deadline:
                self._replay_most_promising()
                best, complete = {**self._replayed(), **best}, False
                break
            entry = heapq.heappop(self._queue)[2]
            if isinstance(entry, PlanCandidate):
                best.setdefault(_key(entry.mapping), entry)
            elif isinstance(entry, BoundedStepModel):
                self._replay(entry)
            elif entry.key not in best:
                self._open(entry)
        return tuple(sorted(best.values(), key=lambda entry: entry.step.seconds)[: self.keep]), complete

    def _open(self, node: _OpenNode) -> None:
        p, (schedule, virtual, micro_batch) = node.key
        space, unsettled = self.space, []
        if not node.recompute and not self._can_fit(p, micro_batch):
            self.too_large += len(space.recompute) * len(node.storages)
            return
        for storage in node.storages:
            recompute, (sharding, replicas) = space.recompute[node.recompute], storage
            mapping = Mapping(
                p, virtual, micro_batch, sharding, recompute, node.overlap, schedule, node.dispatcher, replicas
            )
            mapping = replace(mapping, lengths=node.lengths)
            fits = self._fits(mapping)
            if fits:
                bounded = BoundedStepModel.of(self.request, mapping)
                self._push(bounded.bound(), bounded)
                self._any_fits = True
            else:
                self.too_large += 1
            if not fits or can_split(schedule, p.pp):
                unsettled.append(storage)
        if unsettled and node.recompute + 1 < len(space.recompute):
            self._push_open(replace(node, recompute=node.recompute + 1, storages=tuple(unsettled)))

    def _replay(self, bounded: BoundedStepModel) -> None:
        mapping = bounded.placed.mapping
        self.replayed += 1
        step = bounded.predict()
        self._push(step.seconds, PlanCandidate(mapping, step, self.request.fit(mapping)))

    def _replay_most_promising(self) -> None:
        """Replay the mappings with the lowest bounds, when the time limit is reached."""
        unreplayed = [entry for _, _, entry in sorted(self._queue) if isinstance(entry, BoundedStepModel)]
        for bounded in unreplayed[: self.keep]:
            self._replay(bounded)

    def _replayed(self) -> dict[Key, PlanCandidate]:
        replayed = [candidate for _, _, candidate in self._queue if isinstance(candidate, PlanCandidate)]
        replayed.sort(key=lambda candidate: -candidate.step.seconds)  # of equal keys, the fastest is assigned last
        return {_key(candidate.mapping): candidate for candidate in replayed}

    def _can_fit(self, p: ParallelConfig, micro_batch: int | None) -> bool:
        if (p, micro_batch) not in self._lean:
            lean_mappings = self._trades[p].leanest(self.space, p, micro_batch)
            self._lean[p, micro_batch] = any(self._fits(mapping) for mapping in lean_mappings)
        return self._lean[p, micro_batch]

    def _fits(self, mapping: Mapping) -> bool:
        fit, p = _fit(self.request, mapping), mapping.parallel
        if fit is not None and not fit and (p not in self._nearest or fit.missing < self._nearest[p].fit.missing):
            self._nearest[p] = NearestMapping(mapping, fit, ())
        return bool(fit)

    def _push_open(self, node: _OpenNode) -> None:
        p, (schedule, virtual, micro_batch) = node.key
        levels = self.space.recompute[node.recompute :][: None if can_split(schedule, p.pp) else 1]
        sharding = self.space.sharding[0]  # the bound holds for every sharding
        overlap, dispatcher = node.overlap, node.dispatcher
        mappings = (
            Mapping(p, virtual, micro_batch, sharding, level, overlap, schedule, dispatcher, lengths=node.lengths)
            for level in levels
        )
        self._push(min(map(self._bounds.of, mappings)), node)

    def _push(self, bound: float, entry: _OpenNode | BoundedStepModel | PlanCandidate) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (bound, self._pushed, entry))


def _fit(request: PlanRequest, mapping: Mapping) -> Fit | None:
    """Return None if the mapping cannot run."""
    try:
        return request.fit(mapping)
    except ConfigError:
        return None


def _key(mapping: Mapping) -> Key:
    schedule = mapping.schedule if mapping.parallel.pp > 1 else None
    return mapping.parallel, (schedule, mapping.virtual, mapping.micro_batch)


def _nothing_runs(request: PlanRequest, space: SearchSpace, rejected: Counter[str]) -> str:
    shape, gpus = request.shape, request.cluster.gpus
    message = (
        f"no mapping of {shape.name} can run on {gpus:,} accelerators with {request.global_batch:,} sequences of "
        f"{request.load.seq_len:,} tokens per step"
    )
    # With one sequence per accelerator, the batch is divisible by every dp.
    divisible = replace(request, global_batch=gpus)
    runnable = (p for p in space.degrees(divisible) if space.dispatchers(divisible, p) and space.storages(divisible, p))
    least = min((p.dp for p in runnable), default=None)
    if least is None:
        reasons = "; ".join(why for why, _ in rejected.most_common(3))
        return f"{message}: {reasons or 'no degrees divide the model'}. Change the number of accelerators or seq_len"
    return (
        f"{message}: dp is at least {least:,}. The number of sequences must be a multiple of dp, with enough "
        f"micro-batches for the pipeline. Change the number of sequences or of accelerators"
    )
