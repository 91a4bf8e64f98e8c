"""Whether a mapping fits an accelerator's memory, and which single changes would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moe_comm.errors import ConfigError
from moe_comm.plan.hardware import Accelerator
from moe_comm.plan.mapping import Mapping, Recompute, Sharding
from moe_comm.plan.memory import POLICY, Policy, RankMemory, memory, worst
from moe_comm.plan.model import ModelShape
from moe_comm.plan.operators import Load
from moe_comm.topology import ParallelConfig

RESERVE = 4 << 30
"""Bytes that a run does not have for tensors, unless told otherwise: contexts, libraries' work space, communicators
and what an allocator cannot give out. An assumption; such things take 2 to 5 GiB."""
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_SHARDING: tuple[Sharding, ...] = ("replicate", "zero1", "fsdp")


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
            f"reserve must be from 0 to less than the accelerator's {accelerator.memory_bytes} bytes; got {reserve}"
        )
    return Fit(worst(memories), accelerator.memory_bytes - reserve)


@dataclass(frozen=True)
class Change:
    """One change of a mapping, in words, and what comes of it."""

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
) -> tuple[Change, ...]:
    """Single changes with which the mapping fits, the least of each kind: recompute, sharding, a smaller micro-batch,
    or a higher degree (of tp, cp and pp at the cost of dp). Empty: it takes more than one."""
    found: dict[str, Change] = {}
    for key, value, changed in _changed(shape, mapping, load):
        if key in found:
            continue
        try:
            fit = fits(memory(shape, changed, load, global_batch, policy), accelerator, reserve)
        except ConfigError:  # a batch, a schedule or layers that cannot be cut so
            continue
        if fit:
            found[key] = Change(f"{key} {value}", changed, fit)
    return tuple(found.values())


def _changed(shape: ModelShape, mapping: Mapping, load: Load) -> Iterator[tuple[str, object, Mapping]]:
    """(what, its new value, the mapping), in order of what a change costs."""
    for recompute in _RECOMPUTE[_RECOMPUTE.index(mapping.recompute) + 1 :]:
        yield "recompute", recompute, replace(mapping, recompute=recompute)
    for sharding in _SHARDING[_SHARDING.index(mapping.sharding) + 1 :]:
        yield "sharding", sharding, replace(mapping, sharding=sharding)
    for micro_batch in range(mapping.micro_batch - 1, 0, -1):
        if not mapping.micro_batch % micro_batch:
            yield "micro-batch", micro_batch, replace(mapping, micro_batch=micro_batch)
    p = mapping.parallel
    for axis in ("ep", "etp", "pp", "tp", "cp"):
        times = 2
        while getattr(p, axis) * times <= p.world:
            degree, dp = getattr(p, axis) * times, p.dp if axis in ("ep", "etp") else p.dp // times
            if dp * times == p.dp or axis in ("ep", "etp"):
                try:
                    parallel = replace(p, **{axis: degree, "dp": dp})
                except ConfigError:
                    break
                if _suits(shape, parallel, load):
                    yield axis, degree, replace(mapping, parallel=parallel)
            times *= 2


def _suits(shape: ModelShape, p: ParallelConfig, load: Load) -> bool:
    """Whether heads, experts and sequences can be cut so."""
    experts = not shape.moe_layers or (p.ep <= shape.experts and not shape.ffn % p.etp)
    heads = not shape.heads % p.tp and not shape.key_heads % p.tp
    return experts and heads and not load.seq_len % (p.tp * p.cp * (2 if p.cp > 1 else 1))
