"""A planning request: a model on a cluster with a batch. It predicts steps, and whether mappings fit memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.topology import ParallelConfig
from moe_comm.topology.parallel import ShardingMode
from moe_comm.topology.pipeline import find_schedule
from moe_plan.machine.collectives import check_integer
from moe_plan.machine.hardware import Accelerator, Cluster
from moe_plan.model.load import Workload
from moe_plan.model.mapping import RECOMPUTE, Mapping, PlacedMapping
from moe_plan.model.memory import DEFAULT_POLICY, MemoryPolicy, PositionMemory, fullest, memory
from moe_plan.step.step import StepModel, StepPrediction

RESERVE = 4 << 30
"""Default bytes that are not available to tensors: contexts, library workspaces, communicators and allocator
fragmentation. This is an assumption; they take 2 to 5 GiB."""
_SHARDING: tuple[ShardingMode, ...] = ("replicate", "zero1", "fsdp")
_ORDER = (
    *("recompute", "sharding", "replicas", "micro-batch", "schedule", "dispatcher"),
    *("vpp", "ep", "etp", "pp", "tp", "cp"),
)


@dataclass(frozen=True)
class Fit:
    """Whether a mapping fits. fullest: its fullest position. available: bytes available to tensors."""

    fullest: PositionMemory
    available: int

    def __bool__(self) -> bool:
        return self.fullest.total <= self.available

    @property
    def missing(self) -> int:
        """Missing bytes; 0 if it fits."""
        return max(0, self.fullest.total - self.available)

    def __str__(self) -> str:
        gib, fullest = 1 << 30, self.fullest
        usage = f"{fullest.total / gib:.1f} of {self.available / gib:.1f} GiB at pipeline position {fullest.position}"
        term = f"most of it {fullest.largest.replace('_', ' ')}, {getattr(fullest, fullest.largest) / gib:.1f} GiB"
        return f"fits: {usage}" if self else f"{self.missing / gib:.1f} GiB too much: {usage}, {term}"


def fits(memories: Sequence[PositionMemory], accelerator: Accelerator, reserve: int = RESERVE) -> Fit:
    """Return whether the memory of every rank suffices.

    ``reserve`` bytes are not available to tensors. Raises ConfigError if it leaves nothing.
    """
    if not 0 <= reserve < accelerator.memory_bytes:
        raise ConfigError(
            f"accelerator {accelerator.name!r} has {accelerator.memory_bytes:,} bytes; a reserve of {reserve:,} leaves "
            f"nothing for tensors; give a smaller reserve"
        )
    return Fit(fullest(memories), accelerator.memory_bytes - reserve)


@dataclass(frozen=True)
class PlanCandidate:
    """A mapping, its predicted step, and whether it fits memory."""

    mapping: Mapping
    step: StepPrediction
    fit: Fit


@dataclass(frozen=True)
class PlanRequest:
    """A model, a cluster and a workload to plan for.

    global_batch: sequences of a step. reserve: bytes of an accelerator that are not available to tensors.
    """

    shape: ModelShape
    cluster: Cluster
    load: Workload
    global_batch: int
    policy: MemoryPolicy = DEFAULT_POLICY
    reserve: int = RESERVE

    def __post_init__(self) -> None:
        check_integer("request", global_batch=self.global_batch)
        self.cluster.accelerator.peak(self.load.dtype)
        if self.load.loads is not None and self.load.loads.experts != self.shape.experts:
            raise ConfigError(
                f"the loads are of {self.load.loads.experts} experts, but {self.shape.name} has {self.shape.experts}"
            )

    @property
    def host(self) -> int:
        """The largest size such that each aligned block of that many consecutive ranks is on one host."""
        gpus, host_size = self.cluster.gpus, self.cluster.host_size
        return gpus if gpus <= host_size else math.gcd(gpus, host_size)

    def replicates(self, parallel: ParallelConfig, replicas: int) -> bool:
        """Return whether FSDP can have this number of replicas of its shards."""
        try:
            parallel.check_replicas(replicas)
        except ConfigError:
            return False
        return replicas == 1 or not self._moves_experts(parallel)

    def _moves_experts(self, parallel: ParallelConfig) -> bool:
        return self.load.loads is not None and self.load.loads.placed(parallel.ep).kind != "fixed"

    def _check_replicas(self, mapping: Mapping) -> None:
        if mapping.replicas > 1 and self._moves_experts(mapping.parallel):
            raise ConfigError(f"replicas = {mapping.replicas} requires a fixed placement of experts")

    def fit(self, mapping: Mapping) -> Fit:
        """Return whether a mapping fits. Raises ConfigError if it cannot run."""
        self._check_replicas(mapping)
        memories = memory(self.shape, mapping, self.load, self.global_batch, self.policy, self.cluster.host_size)
        return fits(memories, self.cluster.accelerator, self.reserve)

    def model(self, mapping: Mapping) -> StepModel:
        """Return the cost model of a step with a mapping. Raises ConfigError if it cannot run."""
        self._check_replicas(mapping)
        placed = PlacedMapping(mapping, self.cluster)
        return StepModel(self.shape, placed, self.load, self.global_batch, self.policy)

    def candidate(self, mapping: Mapping) -> PlanCandidate:
        """Evaluate a mapping. Raises ConfigError if it cannot run."""
        return PlanCandidate(mapping, self.model(mapping).predict(), self.fit(mapping))


@dataclass(frozen=True)
class MappingChange:
    """One or two changes of a mapping, in words, with the resulting mapping and memory."""

    what: str
    mapping: Mapping
    fit: Fit


def changes_that_fit(request: PlanRequest, mapping: Mapping) -> tuple[MappingChange, ...]:
    """Return single changes with which the mapping fits, the smallest of each kind.

    The kinds are recompute, sharding, fewer replicas, a smaller micro-batch, 1F1B, another dispatcher, fewer stages per
    rank, and a higher degree (tp, cp and pp reduce dp). If no single change suffices, return pairs of changes, the
    smallest of each pair of kinds. An empty result means that no two changes suffice.
    """

    def fitting(steps: Iterable[tuple[str, str, Mapping]]) -> tuple[MappingChange, ...]:
        changes: dict[str, MappingChange] = {}
        for kind, what, changed in steps:
            if kind in changes:
                continue
            try:
                fit = request.fit(changed)
            except ConfigError:  # the batch or layers are not divisible, or the schedule does not support them
                continue
            if fit:
                changes[kind] = MappingChange(what, changed, fit)
        return tuple(changes.values())

    return fitting(_changed(request, mapping)) or fitting(_changed_twice(request, mapping))


def indivisible(shape: ModelShape, p: ParallelConfig, load: Workload, host: int | None = None) -> str | None:
    """Return why a model cannot be sharded with these degrees, or None if it can.

    ``host``: accelerators of a host. tp and etp stay inside, because they transfer every layer's rows several times and
    networks are too slow for that (arXiv 2104.04473, section 3.2). None: any number.
    """
    if host is not None and (host % p.tp or host % p.etp):
        return "tp or etp would exceed a host"
    if shape.heads % (p.tp * p.cp) or shape.key_heads % p.tp:
        return "heads are not divisible by tp x cp"
    if (shape.dense_layers or shape.shortcut) and shape.dense_ffn % p.tp:
        return "dense blocks are not divisible by tp"
    if load.seq_len % (p.tp * p.cp):
        return "sequences are not divisible by tp x cp"
    if shape.moe_layers and p.ep > shape.experts:
        return "ep exceeds the number of experts"
    if shape.moe_layers and (shape.ffn % p.etp or (shape.expert_bias and shape.hidden % p.etp)):
        return "experts are not divisible by etp"
    return None


def _changed(request: PlanRequest, mapping: Mapping) -> Iterator[tuple[str, str, Mapping]]:
    """Yield (kind, description, mapping) of changes, the cheapest first."""
    for recompute in RECOMPUTE[RECOMPUTE.index(mapping.recompute) + 1 :]:
        yield "recompute", f"recompute {recompute}", replace(mapping, recompute=recompute)
    for sharding in _SHARDING[_SHARDING.index(mapping.sharding) + 1 :]:
        yield "sharding", f"sharding {sharding}", replace(mapping, sharding=sharding)
    for value in reversed(divisors(mapping.replicas)[:-1]):
        yield "replicas", f"replicas {value}", replace(mapping, replicas=value)
    for value in reversed(divisors(mapping.micro_batch)[:-1]):
        yield "micro-batch", f"micro-batch {value}", replace(mapping, micro_batch=value)
    if mapping.pipeline is not None:
        yield "schedule", "schedule 1f1b", replace(mapping, pipeline=None, virtual=1)
    if mapping.dispatcher != "all_to_all":
        yield "dispatcher", "dispatcher all_to_all", replace(mapping, dispatcher="all_to_all")
    for value in reversed(divisors(mapping.virtual)[:-1]):
        if mapping.pipeline is None or value >= find_schedule(mapping.pipeline).least:
            yield "vpp", f"vpp {value}", replace(mapping, virtual=value)
    p = mapping.parallel
    for axis in ("ep", "etp", "pp", "tp", "cp"):
        expert = axis in ("ep", "etp")
        for times in divisors(p.edp if expert else p.dp)[1:]:
            degree = getattr(p, axis) * times
            try:
                parallel = replace(p, **{axis: degree}) if expert else replace(p, **{axis: degree, "dp": p.dp // times})
                parallel.check_replicas(mapping.replicas)
            except ConfigError:  # ep x etp no longer divides the stage, or the replicas its ranks
                continue
            if indivisible(request.shape, parallel, request.load, request.host) is None:
                # With fewer ranks of a host per expert group, hierarchical dispatch may have no rows to relay.
                alone = axis == "etp" and mapping.dispatcher == "hierarchical"
                changed = replace(mapping, dispatcher="all_to_all") if alone else mapping
                yield axis, f"{axis} {degree}", replace(changed, parallel=parallel)


def _changed_twice(request: PlanRequest, mapping: Mapping) -> Iterator[tuple[str, str, Mapping]]:
    for kind, what, changed_once in _changed(request, mapping):
        for other_kind, other_what, changed_again in _changed(request, changed_once):
            if _ORDER.index(other_kind) > _ORDER.index(kind):  # each pair once
                yield f"{kind} {other_kind}", f"{what} and {other_what}", changed_again


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if not number % divisor]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor != number]
