"""Whether a mapping fits an accelerator's memory, and which changes would make it fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from moe_comm.errors import ConfigError
from moe_comm.plan.machine.hardware import Accelerator
from moe_comm.plan.model.load import Load
from moe_comm.plan.model.mapping import RECOMPUTE, Mapping, Sharding
from moe_comm.plan.model.memory import POLICY, Policy, RankMemory, memory, worst
from moe_comm.plan.model.shape import ModelShape
from moe_comm.plan.pipeline.schedules import find_schedule
from moe_comm.topology import ParallelConfig

RESERVE = 4 << 30
"""Bytes that a run does not have for tensors, unless told otherwise: contexts, libraries' work space, communicators
and what an allocator cannot give out. An assumption; such things take 2 to 5 GiB."""
_SHARDING: tuple[Sharding, ...] = ("replicate", "zero1", "fsdp")
_ORDER = ("recompute", "sharding", "micro-batch", "schedule", "dispatcher", "vpp", "ep", "etp", "pp", "tp", "cp")


@dataclass(frozen=True)
class Fit:
    """Whether a mapping fits. worst: its fullest position. available: bytes that there are for tensors."""

    worst: RankMemory
    available: int

    def __bool__(self) -> bool:
        return self.worst.total <= self.available

    @property
    def missing(self) -> int:
        """Bytes; 0 if it fits."""
        return max(0, self.worst.total - self.available)

    def __str__(self) -> str:
        gib, one = 1 << 30, self.worst
        held = f"{one.total / gib:.1f} of {self.available / gib:.1f} GiB at pipeline position {one.position}"
        term = f"most of it {one.largest.replace('_', ' ')}, {getattr(one, one.largest) / gib:.1f} GiB"
        return f"fits: {held}" if self else f"{self.missing / gib:.1f} GiB too much: {held}, {term}"


def fits(memories: Sequence[RankMemory], accelerator: Accelerator, reserve: int = RESERVE) -> Fit:
    """Whether every rank's bytes are there.

    Args:
        reserve: bytes of the accelerator that tensors cannot have.

    Raises:
        ConfigError: ``reserve`` leaves nothing.
    """
    if not 0 <= reserve < accelerator.memory_bytes:
        raise ConfigError(
            f"accelerator {accelerator.name!r} has {accelerator.memory_bytes:,} bytes, and a reserve of {reserve:,} of "
            f"them, for what is no tensor, would leave nothing"
        )
    return Fit(worst(memories), accelerator.memory_bytes - reserve)


@dataclass(frozen=True)
class Change:
    """A change of a mapping, or two, in words, and what comes of it."""

    what: str
    mapping: Mapping
    fit: Fit


def changes_that_fit(
    shape: ModelShape,
    mapping: Mapping,
    load: Load,
    global_batch: int,
    accelerator: Accelerator,
    *,
    policy: Policy = POLICY,
    reserve: int = RESERVE,
    host: int | None = None,
) -> tuple[Change, ...]:
    """Single changes with which the mapping fits, the least of each kind: recompute, sharding, a smaller micro-batch,
    1F1B, another dispatcher, fewer stages a rank, or a higher degree (of tp, cp and pp at the cost of dp). Where none
    does, two together, the least of each pair of kinds. Empty: it takes more than two, or more accelerators.

    Args:
        host: accelerators of one host, beyond which no tensor is cut; None: any number.
    """

    def fitting(steps: Iterable[tuple[str, str, Mapping]]) -> tuple[Change, ...]:
        found: dict[str, Change] = {}
        for kind, what, changed in steps:
            if kind in found:
                continue
            try:
                fit = fits(memory(shape, changed, load, global_batch, policy, host), accelerator, reserve)
            except ConfigError:  # a batch, a schedule or layers that cannot be cut so
                continue
            if fit:
                found[kind] = Change(what, changed, fit)
        return tuple(found.values())

    return fitting(_changed(shape, mapping, load, host)) or fitting(_changed_twice(shape, mapping, load, host))


def suits(shape: ModelShape, p: ParallelConfig, load: Load, host: int | None = None) -> str | None:
    """What keeps a model from being cut so, in words; None: nothing does.

    Args:
        host: accelerators of one host: tp and etp stay inside, for they move every layer's rows over and over, and no
            network is fast enough for that (arXiv 2104.04473, section 3.2); None: any number.
    """
    if host is not None and (host % p.tp or host % p.etp):
        return "tp or etp would leave a host"
    if shape.heads % (p.tp * p.cp) or shape.key_heads % p.tp:
        return "heads cannot be dealt over tp x cp"
    if (shape.dense_layers or shape.shortcut) and shape.dense_ffn % p.tp:
        return "dense blocks cannot be cut over tp"
    if load.seq_len % (p.tp * p.cp):
        return "sequences cannot be cut over tp x cp"
    if shape.moe_layers and p.ep > shape.experts:
        return "ep is more than there are experts"
    if shape.moe_layers and (shape.ffn % p.etp or (shape.expert_bias and shape.hidden % p.etp)):
        return "experts cannot be cut over etp"
    return None


def _changed(shape: ModelShape, mapping: Mapping, load: Load, host: int | None) -> Iterator[tuple[str, str, Mapping]]:
    """(kind, the change in words, the mapping), in order of what a change costs."""
    for recompute in RECOMPUTE[RECOMPUTE.index(mapping.recompute) + 1 :]:
        yield "recompute", f"recompute {recompute}", replace(mapping, recompute=recompute)
    for sharding in _SHARDING[_SHARDING.index(mapping.sharding) + 1 :]:
        yield "sharding", f"sharding {sharding}", replace(mapping, sharding=sharding)
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
            except ConfigError:  # experts' ranks no longer divide the stage
                continue
            if suits(shape, parallel, load, host) is None:
                # Fewer of a host's ranks share experts then: maybe one, with nobody to pass rows on to.
                alone = axis == "etp" and mapping.dispatcher == "hierarchical"
                changed = replace(mapping, dispatcher="all_to_all") if alone else mapping
                yield axis, f"{axis} {degree}", replace(changed, parallel=parallel)


def _changed_twice(
    shape: ModelShape, mapping: Mapping, load: Load, host: int | None
) -> Iterator[tuple[str, str, Mapping]]:
    for kind, what, once in _changed(shape, mapping, load, host):
        for other, also, twice in _changed(shape, once, load, host):
            if _ORDER.index(other) > _ORDER.index(kind):  # each pair once
                yield f"{kind} {other}", f"{what} and {also}", twice


def divisors(number: int) -> list[int]:
    """Ascending, from 1 to ``number`` itself."""
    low = [one for one in range(1, math.isqrt(number) + 1) if not number % one]
    return low + [number // one for one in reversed(low) if one * one != number]
