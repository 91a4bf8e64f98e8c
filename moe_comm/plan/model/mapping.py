"""A mapping as the planner tries it: degrees of parallelism, micro-batches, and how work and memory are traded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, Self, get_args

import numpy as np

from moe_comm.errors import ConfigError
from moe_comm.plan.machine.collectives import Span
from moe_comm.plan.machine.hardware import Cluster
from moe_comm.plan.pipeline.schedules import can_split, stages_per_rank
from moe_comm.topology import ParallelConfig

Recompute = Literal["none", "selective", "full"]
Sharding = Literal["replicate", "zero1", "fsdp"]
Overlap = Literal["none", "outer", "inter", "all"]
Dispatcher = Literal["all_to_all", "all_gather", "hierarchical"]
"""Backends of ``moe_comm.dispatch`` that move rows between accelerators."""
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
"""The least first."""
MICRO_BATCHES = (1, 2, 4)
"""Sequences at a time that are tried where a mapping leaves that open."""
_KEYS = ("tp", "cp", "dp", "pp", "vpp", "ep", "etp")


@dataclass(frozen=True)
class Mapping:
    """How a model is spread.

    virtual: pipeline stages on each rank. micro_batch: sequences that a data-parallel rank takes at a time.
    sharding, recompute: as in ``moe_comm.train``. overlap: "none": what moves and what computes take turns; "outer":
    gradients and weights move beside passes, and with virtual stages what stages send each other, as in Megatron;
    "inter": and a transfer within a pass goes on beside operators that do not need it; "all": and inside those that do,
    tile by tile.
    pipeline: its schedule by its name in ``moe_comm.train``; None: 1F1B, interleaved where there are several stages a
    rank, which are made None where they are named.
    dispatcher: how rows get to their experts and back (``moe_comm.plan.step.dispatching``).
    """

    parallel: ParallelConfig
    virtual: int = 1
    micro_batch: int = 1
    sharding: Sharding = "zero1"
    recompute: Recompute = "none"
    overlap: Overlap = "none"
    pipeline: str | None = None
    dispatcher: Dispatcher = "all_to_all"

    def __post_init__(self) -> None:
        for name in ("virtual", "micro_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1; got {value!r}")
        if self.virtual > 1 and self.parallel.pp == 1:
            raise ConfigError(f"vpp = {self.virtual} needs a pipeline: pp is 1")
        if self.pipeline is not None:
            stages_per_rank(self.pipeline, self.parallel.pp, self.virtual)
            if self.parallel.pp == 1:
                raise ConfigError(f"schedule = {self.pipeline} needs a pipeline: pp is 1")
            if self.pipeline == _usual(self.virtual):
                object.__setattr__(self, "pipeline", None)

    @classmethod
    def parse(cls, text: str, gpus: int, *, coupled: bool = False, **settings: object) -> Self:
        """From "tp=2,cp=1,pp=8,vpp=1,ep=8,etp=1" on ``gpus`` ranks; what is left out is 1, but dp what is left, and vpp
        what is usual for the schedule, if ``pipeline`` names one.

        Args:
            coupled: experts lie inside data parallelism, as without folding: etp is tp.

        Raises:
            ConfigError: an unknown or repeated key, or degrees that do not fit ``gpus`` or each other.
        """
        found: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = part.partition("=")
            key = key.strip().lower()
            if not equals or key not in _KEYS or not value.strip().isdecimal():
                raise ConfigError(f"a mapping is like tp=2,pp=8,ep=8 with keys {', '.join(_KEYS)}; got {part!r}")
            if key in found:
                raise ConfigError(f"{key} is given twice in {text!r}")
            found[key] = int(value)
        virtual = found.pop("vpp", None)
        if coupled and found.setdefault("etp", found.get("tp", 1)) != found.get("tp", 1):
            raise ConfigError(f"without folding etp is tp; got etp={found['etp']}, tp={found.get('tp', 1)}")
        parallel = ParallelConfig.of(gpus, **{"ep": 1, **found})
        if virtual is None:
            pipeline = settings.get("pipeline")
            virtual = stages_per_rank(str(pipeline), parallel.pp) if pipeline is not None else 1
        return cls(parallel, virtual, **settings)  # type: ignore[arg-type]

    @property
    def stages(self) -> int:
        return self.parallel.pp * self.virtual

    @property
    def fuses(self) -> bool:
        """Whether transfers go on beside a layer's operators, for which its experts are several functions."""
        return self.overlap in ("inter", "all")

    @property
    def waits_for_stages(self) -> bool:
        """Whether nothing is computed while a stage's neighbour sends to it."""
        return self.overlap == "none" or (self.overlap == "outer" and self.virtual == 1)

    @property
    def schedule(self) -> str:
        """Of the pipeline, by its name in ``moe_comm.train``."""
        return self.pipeline or _usual(self.virtual)

    @property
    def splits(self) -> bool:
        """Whether backward passes, or some of them, run in two halves."""
        return self.recompute != "full" and can_split(self.schedule, self.parallel.pp)

    def micro_batches(self, global_batch: int) -> int:
        """How many a pipeline takes in a step of ``global_batch`` sequences.

        Raises:
            ConfigError: the batch cannot be cut so.
        """
        each = self.parallel.dp * self.micro_batch
        if global_batch % each:
            raise ConfigError(
                f"a batch of {global_batch} sequences cannot be cut into micro-batches of {self.micro_batch} on "
                f"{self.parallel.dp} data-parallel ranks"
            )
        return global_batch // each

    def __str__(self) -> str:
        p = self.parallel
        shown = f"tp={p.tp},cp={p.cp},dp={p.dp},pp={p.pp},vpp={self.virtual},ep={p.ep},etp={p.etp}"
        settings = [f"micro-batch {self.micro_batch}", self.sharding, f"recompute {self.recompute}"]
        settings += [self.pipeline] if self.pipeline else []
        settings += [f"dispatcher {self.dispatcher}"] if self.dispatcher != "all_to_all" else []
        return f"{shown},{', '.join(settings)}"


def _usual(virtual: int) -> str:
    return "interleaved_1f1b" if virtual > 1 else "1f1b"


@dataclass(frozen=True)
class Place:
    """A mapping on a cluster: where its groups stand. Those of rank 0 stand for all."""

    mapping: Mapping
    cluster: Cluster

    def __post_init__(self) -> None:
        p = self.mapping.parallel
        if p.world != self.cluster.gpus:
            raise ConfigError(f"a mapping for {p.world} ranks on a cluster of {self.cluster.gpus} accelerators")
        if why := lacks(self.mapping.dispatcher, self.cluster, self.mapping.parallel):
            raise ConfigError(f"dispatcher {self.mapping.dispatcher} has nothing to do for {self.mapping}: {why}")

    @cached_property
    def spans(self) -> dict[str, Span]:
        """By axis: "tp", "cp", "dp", "ep", "etp", "edp"; "dp_cp": ranks that hold the same dense parameters; "pp": a
        rank and the one with the next stage."""
        return _spans(self.cluster, self.mapping.parallel)


def dispatch_span(dispatcher: Dispatcher, cluster: Cluster, parallel: ParallelConfig) -> Span:
    """Ranks among which a dispatcher works: those of "ep", whose rows "etp" ranks gather afterwards; of all_gather both
    at once, for a token that has come is there for all parts of its experts."""
    return _spans(cluster, parallel)["experts" if dispatcher == "all_gather" else "ep"]


def lacks(dispatcher: Dispatcher, cluster: Cluster, parallel: ParallelConfig) -> str | None:
    """What ranks that share experts lack for a dispatcher, in words; None: nothing."""
    if dispatcher == "all_to_all":
        return None
    span = dispatch_span(dispatcher, cluster, parallel)
    if span.ranks == 1:
        return "every rank has all experts"
    if dispatcher == "hierarchical":
        if span.hosts == 1:
            return "the ranks that share the experts are all on one host"
        if span.fewest != span.most or span.most < 2:
            return "hosts must have equal numbers of the ranks that share the experts, at least 2"
    elif cluster.direct and span.hosts == 1:
        return "ranks of a host put rows into each other's memory, which is what all_to_all is priced as"
    return None


@lru_cache(maxsize=1 << 14)
def _spans(cluster: Cluster, p: ParallelConfig) -> dict[str, Span]:
    """Ranks of a group of rank 0 are equally far apart."""
    strides = {"tp": 1, "cp": p.tp, "dp": p.tp * p.cp, "etp": 1, "ep": p.etp, "edp": p.etp * p.ep}
    found = {axis: _span(cluster, p.sizes[axis], stride) for axis, stride in strides.items()}
    found["dp_cp"] = _span(cluster, p.cp * p.dp, p.tp)
    found["experts"] = _span(cluster, p.ep * p.etp, 1)
    found["pp"] = _span(cluster, min(2, p.pp), p.stage)
    return found


@lru_cache(maxsize=1 << 12)
def _span(cluster: Cluster, ranks: int, stride: int) -> Span:
    return cluster.span(np.arange(ranks) * stride)
