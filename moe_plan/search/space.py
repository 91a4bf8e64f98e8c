"""The space of mappings that a search considers: all ways to distribute a model over a cluster that can run.

    degrees       tp x cp x dp x pp = gpus, etp x ep divides a position's tp x cp x dp   (``SearchSpace.degrees``)
    shapes        schedule, stages per rank (vpp) and micro-batch, as divisibility allows  (``SearchSpace.shapes``)
    trades        memory against time: recompute x sharding x overlap                    (``SearchSpace.trades``)
    sharding      "fsdp" also with one replica per host, if hosts have equal ranks        (``SearchSpace.storages``)
    dispatchers   that apply to the degrees and can be the fastest                       (``SearchSpace.dispatchers``)

Degrees are divisors, not only powers of two: 60 layers on 240 accelerators allow pp 15.

Tensors are never sharded over more than one host: tp and etp transfer every layer's rows in each pass, and a network is
several times slower than the links of a host (arXiv 2104.04473, section 3.2). Sequences are sharded over several hosts
only in a ``wide`` space, which a search tries if nothing else runs or fits. The bytes that cp transfers do not grow
with its degree, so it is slow but possible over a network, and necessary if one sequence is too long for a host.

``PartialMapping`` is a mapping of which the user has left settings open. They are chosen so that it is the fastest one
that fits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from typing import Any, get_args

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import Recompute
from moe_comm.topology import ParallelConfig
from moe_comm.topology.parallel import ShardingMode
from moe_comm.topology.pipeline import check_micro_batches, find_schedule
from moe_plan.machine.collectives import check_integer
from moe_plan.model.mapping import (
    MICRO_BATCHES,
    RECOMPUTE,
    Dispatcher,
    LengthMode,
    Mapping,
    OverlapMode,
    PlacedMapping,
    inapplicable,
)
from moe_plan.search.request import PlanCandidate, PlanRequest, divisors, indivisible
from moe_plan.step.dispatching import beats_all_to_all

Storage = tuple[ShardingMode, int]
"""Sharding and replicas."""
Trade = tuple[Recompute, Storage, OverlapMode]
PipelineShape = tuple[str | None, int, int]
"""Schedule (None: no pipeline), stages per rank, micro-batch."""
SCHEDULES = ("1f1b", "zero_bubble", "zbv", "dualpipev", "interleaved_1f1b", "gpipe")
"""In increasing order of memory, as a rule."""


@dataclass(frozen=True)
class SearchSpace:
    """The mappings to consider.

    overlap, recompute, sharding, dispatcher, lengths: allowed values. lengths applies to requests with documents.
    micro_batches: sequences of a micro-batch; None: all powers of two that divide the batch. steps: number of
    micro-batches in a step; None: any. fixed: required degrees, as (axis, size). ep: allowed degrees of expert
    parallelism; None: all. virtual: pipeline stages per rank; None: all numbers that divide a rank's layers evenly.
    folded: False: experts are distributed inside data parallelism (etp equals tp, ep divides dp).
    wide: cp may exceed a host, and ep groups may straddle hosts. interleave: micro-batches run in pairs, which a
    schedule treats as one. schedule: allowed schedules. gpipe is not faster than 1f1b and takes more memory, so it is
    not a default. replicas: of fsdp's shards; None: 1, and the number of hosts that the ranks
    with the same dense parameters cover.
    """

    overlap: tuple[OverlapMode, ...] = ("none",)
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    sharding: tuple[ShardingMode, ...] = ("replicate", "zero1", "fsdp")
    dispatcher: tuple[Dispatcher, ...] = get_args(Dispatcher)
    micro_batches: tuple[int, ...] | None = None
    steps: int | None = None
    fixed: tuple[tuple[str, int], ...] = ()
    ep: tuple[int, ...] | None = None
    virtual: tuple[int, ...] | None = None
    folded: bool | None = None
    wide: bool = False
    interleave: bool = False
    schedule: tuple[str, ...] = SCHEDULES[:-1]
    replicas: int | None = None
    lengths: tuple[LengthMode, ...] = get_args(LengthMode)

    def __post_init__(self) -> None:
        allowed_values: dict[str, tuple[Any, ...]] = {
            "overlap": get_args(OverlapMode),
            "recompute": get_args(Recompute),
            "sharding": get_args(ShardingMode),
            "schedule": SCHEDULES,
            "dispatcher": get_args(Dispatcher),
            "lengths": get_args(LengthMode),
        }
        for name, values in allowed_values.items():
            value = getattr(self, name)
            if not isinstance(value, tuple) or not value or not set(value) <= set(values):
                raise ConfigError(f"{name} must be a non-empty tuple of {', '.join(values)}; got {value!r}")
            # The search relies on this order, the cheapest first.
            object.__setattr__(self, name, tuple(allowed for allowed in values if allowed in value))
        for name in ("micro_batches", "virtual", "ep"):
            value = getattr(self, name)
            if value is not None and not (value and all(type(number) is int and number >= 1 for number in value)):
                raise ConfigError(f"{name} must be integers of at least 1, or None; got {value!r}")
        if self.replicas is not None:
            check_integer("search space", replicas=self.replicas)

    @classmethod
    def of(cls, **settings: object) -> SearchSpace:
        """Return a space. Single values stand for tuples, None for the default, micro_batch for micro_batches.

        Raises:
            ConfigError: a setting is unknown or has an invalid value.
        """
        names = {field.name for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in settings.items():
            name = "micro_batches" if name == "micro_batch" else name
            if name not in names:
                raise ConfigError(f"a search space has no {name!r}; it has {', '.join(sorted(names))}")
            if value is not None:
                values[name] = value if isinstance(value, tuple | bool) or name == "replicas" else (value,)
        return cls(**values)

    def candidates(self, request: PlanRequest) -> Iterator[Mapping]:
        """Yield all mappings that can run, whether they fit memory or not."""
        for parallel in self.degrees(request):
            dispatchers, trades = self.dispatchers(request, parallel), self.trades(request, parallel)
            for schedule, virtual, size in self.shapes(request, parallel):
                for (recompute, (sharding, replicas), overlap), name in product(trades, dispatchers):
                    mapping = Mapping(parallel, virtual, size, sharding, recompute, overlap, schedule, name, replicas)
                    yield from (replace(mapping, lengths=mode) for mode in self.length_modes(request, mapping))

    def length_modes(self, request: PlanRequest, mapping: Mapping) -> tuple[LengthMode, ...]:
        """Return the settings of lengths with which ``mapping`` can run. Capacities need whole sequences."""
        balances = mapping.can_balance and request.load.lengths is not None and request.load.capacity is None
        return tuple(mode for mode in self.lengths if mode == "static" or balances)

    def trades(self, request: PlanRequest, parallel: ParallelConfig) -> tuple[Trade, ...]:
        """Return the settings that are independent of micro-batch, stages and dispatcher."""
        return tuple(product(self.recompute, self.storages(request, parallel), self.overlap))

    def storages(self, request: PlanRequest, parallel: ParallelConfig) -> tuple[Storage, ...]:
        """Return sharding and replicas, in decreasing order of memory.

        Replicas require "fsdp", and experts that do not move.
        """
        result: list[Storage] = []
        for sharding in self.sharding:
            if sharding == "fsdp":
                span = PlacedMapping(Mapping(parallel), request.cluster).spans["dp_cp"]
                hosts = span.hosts if 1 < span.fewest == span.most else 1
                numbers = (hosts, 1) if self.replicas is None else (self.replicas,)
                result += [
                    (sharding, number) for number in dict.fromkeys(numbers) if request.replicates(parallel, number)
                ]
            elif self.replicas in (None, 1):
                result.append((sharding, 1))
        return tuple(result)

    def dispatchers(self, request: PlanRequest, parallel: ParallelConfig) -> tuple[Dispatcher, ...]:
        """Return the dispatchers that apply to these degrees and can be faster than ``all_to_all``."""
        result = tuple(name for name in self.dispatcher if inapplicable(name, request.cluster, parallel) is None)
        if "all_to_all" not in result:
            return result
        placed = PlacedMapping(Mapping(parallel), request.cluster)
        return tuple(name for name in result if beats_all_to_all(name, request.shape, placed, request.load))

    def degrees(self, request: PlanRequest, rejected: Counter[str] | None = None) -> Iterator[ParallelConfig]:
        """Yield degrees that divide the model, the batch and the cluster's hosts.

        ``rejected`` counts rejected degrees by reason; attention degrees count once if experts make no difference.
        """
        rejected = Counter() if rejected is None else rejected
        shape, gpus, host = request.shape, request.cluster.gpus, request.host
        for tp in divisors(gpus):
            for cp in divisors(gpus // tp):
                why = self._refuses(request, ParallelConfig(tp=tp, cp=cp), host)
                if why is not None:
                    rejected[why] += 1
                    continue
                for pp in divisors(gpus // (tp * cp)):
                    dp = gpus // (tp * cp * pp)
                    if pp > shape.layers:
                        rejected["more pipeline stages than layers"] += 1
                    elif request.global_batch % dp:
                        rejected["sequences of a batch are not divisible by dp"] += 1
                    else:
                        mappings = self._experts(request, ParallelConfig(tp, cp, dp, pp), host)
                        yield from (p for p in mappings if self._allows(p))

    def shapes(self, request: PlanRequest, parallel: ParallelConfig) -> Iterator[PipelineShape]:
        """Yield the pipeline shapes that divide the batch and the layers."""
        sequences, pp = request.global_batch // parallel.dp, parallel.pp
        for micro_batch in self.sizes(sequences):
            for schedule in self.schedule if pp > 1 else (None,):
                if can_run(schedule or "gpipe", pp, sequences // micro_batch, interleave=self.interleave):
                    for virtual in self.virtuals(request, pp, schedule):
                        yield schedule, virtual, micro_batch

    def sizes(self, sequences: int) -> tuple[int, ...]:
        """Return the micro-batch sizes that divide the ``sequences`` of a rank in a step."""
        if self.steps is not None:
            return () if sequences % self.steps else (sequences // self.steps,)
        powers = (1 << power for power in range(sequences.bit_length()))
        return tuple(size for size in self.micro_batches or powers if not sequences % size)

    def virtuals(self, request: PlanRequest, pp: int, schedule: str | None) -> tuple[int, ...]:
        """Return the numbers of stages per rank. The two stages of a V schedule balance each other."""
        layers = request.shape.layers
        if schedule is None:
            return (1,) if self.virtual is None or 1 in self.virtual else ()
        limits = find_schedule(schedule)
        if limits.style == "v":
            numbers: Iterable[int] = (limits.usual,)
        else:
            numbers = self.virtual or divisors(-(-layers // pp))
        if self.virtual is not None:
            numbers = (number for number in numbers if number in self.virtual)
        return tuple(
            number
            for number in numbers
            if number * pp <= layers and limits.least <= number and number <= (limits.most or number)
        )

    def _allows(self, p: ParallelConfig) -> bool:
        return (self.ep is None or p.ep in self.ep) and all(getattr(p, axis) == size for axis, size in self.fixed)

    def _refuses(self, request: PlanRequest, p: ParallelConfig, host: int) -> str | None:
        if why := indivisible(request.shape, p, request.load, host):
            return why
        block = p.tp * p.cp
        if host % block and (not self.wide or block % host):
            return "cp would exceed a host"
        return None

    def _experts(self, request: PlanRequest, p: ParallelConfig, host: int) -> Iterator[ParallelConfig]:
        shape, load = request.shape, request.load
        if not shape.moe_layers:
            yield p
            return
        for etp, ep in _expert_degrees(p.stage, math.gcd(shape.ffn, host), shape.experts):
            if self.folded is False and (etp != p.tp or p.dp % ep):
                continue
            block = etp * ep
            aligned = self.wide or not host % block or not block % host
            if aligned and indivisible(shape, ParallelConfig(dp=etp, etp=etp), load, host) is None:
                yield ParallelConfig(p.tp, p.cp, p.dp, p.pp, ep, etp)


@lru_cache(maxsize=1 << 14)
def can_run(schedule: str, pp: int, micro_batches: int, *, interleave: bool = False) -> bool:
    """Return whether a schedule supports a number of micro-batches."""
    try:
        check_micro_batches(schedule, pp, micro_batches, interleave=interleave)
    except ConfigError:
        return False
    return True


@lru_cache(maxsize=1 << 14)
def _expert_degrees(stage: int, widest: int, experts: int) -> tuple[tuple[int, int], ...]:
    """Return (etp, ep) that divide a pipeline position's ranks, with equal numbers of experts per rank."""
    return tuple(
        (etp, ep) for etp in divisors(math.gcd(stage, widest)) for ep in divisors(math.gcd(stage // etp, experts))
    )


@dataclass(frozen=True)
class PartialMapping:
    """A partially specified mapping.

    degrees: text for ``Mapping.parse``. Missing degrees are 1, and dp takes the remaining ranks. coupled: experts are
    distributed inside data parallelism. micro_batch, recompute, dispatcher, lengths: None: open. schedule: None: 1F1B,
    or interleaved 1F1B with vpp above 1.
    """

    degrees: str
    coupled: bool = False
    micro_batch: int | None = None
    recompute: Recompute | None = None
    sharding: ShardingMode = "zero1"
    overlap: OverlapMode = "none"
    schedule: str | None = None
    dispatcher: Dispatcher | None = None
    lengths: LengthMode | None = None

    def candidate(self, request: PlanRequest) -> PlanCandidate:
        """Return the fastest mapping that fits. If none fits, return the one with the least missing memory.

        Raises:
            ConfigError: the mapping cannot run: a key, a degree or the batch is invalid.
        """
        first = Mapping.parse(
            self.degrees,
            request.cluster.gpus,
            coupled=self.coupled,
            sharding=self.sharding,
            overlap=self.overlap,
            pipeline=self.schedule,
        )
        if why := indivisible(request.shape, first.parallel, request.load):
            raise ConfigError(f"{request.shape.name} cannot run with {self.degrees}: {why}")
        dispatchers = (self.dispatcher,) if self.dispatcher else SearchSpace().dispatchers(request, first.parallel)
        sizes = MICRO_BATCHES if self.micro_batch is None else (self.micro_batch,)
        rejected: ConfigError | None = None
        best: PlanCandidate | None = None
        nearest: tuple[int, Mapping] | None = None
        space = SearchSpace() if self.lengths is None else SearchSpace(lengths=(self.lengths,))
        for size, dispatcher, lengths in product(sizes, dispatchers, space.length_modes(request, first)):
            for recompute in RECOMPUTE if self.recompute is None else (self.recompute,):
                mapping = replace(first, micro_batch=size, recompute=recompute, dispatcher=dispatcher, lengths=lengths)
                try:
                    model = request.model(mapping)
                    fit = request.fit(mapping)
                except ConfigError as error:
                    rejected = rejected or error
                    break
                if nearest is None or fit.missing < nearest[0]:
                    nearest = (fit.missing, mapping)
                if fit:
                    candidate = PlanCandidate(mapping, model.predict(), fit)
                    best = candidate if best is None or candidate.step.seconds < best.step.seconds else best
                    if not mapping.splits:
                        break  # more recomputation is only slower
        if best is not None:
            return best
        if nearest is None:
            raise rejected or ConfigError(f"{first} cannot run")
        return request.candidate(nearest[1])
