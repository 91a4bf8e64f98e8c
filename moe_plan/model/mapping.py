"""A parallel mapping as the planner tries it: degrees, micro-batches, sharding, recomputation and overlap.

``hosts_reached`` is the mean number of hosts that hold experts of a token. Experts are distributed over hosts in order,
and routing is uniform: all choices of K among E experts are equally likely. A host with e experts is not reached by C(E
- e, K) / C(E, K) of the tokens. Group-limited routing (DeepSeek-V3, arXiv 2412.19437, section 2.1.2) first chooses M of
G groups of experts uniformly, and then K experts of these groups. A host is not reached if none of its groups is
chosen, or none of its experts in the chosen groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import comb
from typing import Literal, Self, get_args

import numpy as np

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import ModelShape, Recompute
from moe_comm.topology import ParallelConfig
from moe_comm.topology.parallel import ShardingMode
from moe_comm.topology.pipeline import can_split, stages_per_rank
from moe_plan.machine.collectives import GroupSpan, check_integer
from moe_plan.machine.hardware import Cluster

OverlapMode = Literal["none", "outer", "chunks", "inter", "all"]
Dispatcher = Literal["all_to_all", "all_gather", "hierarchical"]
"""Dispatch backends that the planner models."""
LengthMode = Literal["static", "balanced"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
"""In increasing order of recomputed work."""
MICRO_BATCHES = (1, 2, 4)
"""Micro-batch sizes (sequences) to try if a mapping does not set one."""
_KEYS = ("tp", "cp", "dp", "pp", "vpp", "ep", "etp", "replicas")


@dataclass(frozen=True)
class Mapping:
    """How a model is distributed over ranks.

    Args:
        parallel: degrees of parallelism.
        virtual: pipeline stages on each rank.
        micro_batch: sequences in a micro-batch of one data-parallel rank.
        sharding, recompute: as in ``moe_comm.train``.
        overlap: "none": communication and computation alternate. "outer": gradient and weight collectives overlap with
            passes, as do transfers between virtual stages, as in Megatron. "inter": in addition, transfers within a
            pass overlap with independent operators. "all": in addition, transfers overlap tile by tile with the
            operator that needs them. "chunks": that alone, between the ranks of several hosts, as
            ``parallel.overlap_chunks`` of the trainer without interleaved micro-batches.
        pipeline: name of the pipeline schedule in ``moe_comm.train``. None: 1F1B, or interleaved 1F1B with several
            stages per rank; naming that schedule is normalized to None.
        dispatcher: dispatch backend (``moe_plan.step.dispatching``).
        lengths: as ``parallel.lengths`` of the trainer. "balanced" requires ``Workload.lengths``.
        replicas: with "fsdp", number of blocks of consecutive ranks that each store all shards, as
            ``parallel.dp_replicate`` of the trainer.
    """

    parallel: ParallelConfig
    virtual: int = 1
    micro_batch: int = 1
    sharding: ShardingMode = "zero1"
    recompute: Recompute = "none"
    overlap: OverlapMode = "none"
    pipeline: str | None = None
    dispatcher: Dispatcher = "all_to_all"
    replicas: int = 1
    lengths: LengthMode = "static"

    def __post_init__(self) -> None:
        check_integer("mapping", virtual=self.virtual, micro_batch=self.micro_batch, replicas=self.replicas)
        if self.replicas > 1:
            if self.sharding != "fsdp":
                raise ConfigError(f"replicas = {self.replicas} requires sharding fsdp; got {self.sharding}")
            self.parallel.check_replicas(self.replicas)
        if self.lengths == "balanced" and not self.can_balance:
            raise ConfigError(
                "balanced lengths require pp = 1, several ranks of dp x cp, and no interleaved micro-batches"
            )
        if self.virtual > 1 and self.parallel.pp == 1:
            raise ConfigError(f"vpp = {self.virtual} needs a pipeline, but pp is 1")
        if self.pipeline is not None:
            stages_per_rank(self.pipeline, self.parallel.pp, self.virtual)
            if self.parallel.pp == 1:
                raise ConfigError(f"schedule = {self.pipeline} needs a pipeline, but pp is 1")
            if self.pipeline == _default_schedule(self.virtual):
                object.__setattr__(self, "pipeline", None)

    @classmethod
    def parse(cls, text: str, gpus: int, *, coupled: bool = False, **settings: object) -> Self:
        """Return the mapping that a text like "tp=2,cp=1,pp=8,vpp=1,ep=8,etp=1" describes on ``gpus`` ranks.

        Missing degrees are 1, except dp, which takes the remaining ranks, and vpp, which defaults to the usual value of
        the schedule in ``pipeline``. With sharding "fsdp", the text can also have ``replicas``.

        Args:
            text: the degrees.
            gpus: number of ranks.
            coupled: experts are distributed inside data parallelism, without folding: etp equals tp.
            settings: other fields of the mapping.

        Raises:
            ConfigError: a key is unknown or repeated, or the degrees do not fit ``gpus`` or each other.
        """
        degrees: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = part.partition("=")
            key = key.strip().lower()
            if not equals or key not in _KEYS or not value.strip().isdecimal():
                raise ConfigError(f"a mapping must look like tp=2,pp=8,ep=8 with keys {', '.join(_KEYS)}; got {part!r}")
            if key in degrees:
                raise ConfigError(f"{key} occurs twice in {text!r}")
            degrees[key] = int(value)
        virtual, replicas = degrees.pop("vpp", None), degrees.pop("replicas", 1)
        if coupled and degrees.setdefault("etp", degrees.get("tp", 1)) != degrees.get("tp", 1):
            raise ConfigError(
                f"without folding, etp must equal tp; got etp={degrees['etp']}, tp={degrees.get('tp', 1)}"
            )
        parallel = ParallelConfig.of(gpus, **{"ep": 1, **degrees})
        if virtual is None:
            pipeline = settings.get("pipeline")
            virtual = stages_per_rank(str(pipeline), parallel.pp) if pipeline is not None else 1
        return cls(parallel, virtual, replicas=replicas, **settings)  # type: ignore[arg-type]

    @property
    def stages(self) -> int:
        return self.parallel.pp * self.virtual

    @property
    def fuses(self) -> bool:
        """Whether transfers overlap with a layer's operators. The experts then are several autograd functions."""
        return self.overlap in ("inter", "all")

    @property
    def can_balance(self) -> bool:
        """Whether the trainer can balance lengths."""
        return self.parallel.pp == 1 and self.parallel.dp * self.parallel.cp > 1 and not self.fuses

    @property
    def waits_for_stages(self) -> bool:
        """Whether a rank idles during a transfer from a neighbouring stage."""
        return self.overlap in ("none", "chunks") or (self.overlap == "outer" and self.virtual == 1)

    @property
    def schedule(self) -> str:
        """Name of the pipeline schedule in ``moe_comm.train``."""
        return self.pipeline or _default_schedule(self.virtual)

    @property
    def splits(self) -> bool:
        """Whether some backward passes are split into an input and a weight half."""
        return self.recompute != "full" and can_split(self.schedule, self.parallel.pp)

    def micro_batches(self, global_batch: int) -> int:
        """Return the number of micro-batches of a pipeline in a step of ``global_batch`` sequences.

        Raises:
            ConfigError: the batch is not divisible.
        """
        sequences = self.parallel.dp * self.micro_batch
        if global_batch % sequences:
            raise ConfigError(
                f"a batch of {global_batch} sequences cannot be divided into micro-batches of {self.micro_batch} on "
                f"{self.parallel.dp} data-parallel ranks"
            )
        return global_batch // sequences

    @property
    def degrees(self) -> str:
        """The degrees in the form of ``parse`` and of the option ``--mapping``."""
        p = self.parallel
        replicas = f",replicas={self.replicas}" if self.replicas > 1 else ""
        return f"tp={p.tp},cp={p.cp},dp={p.dp},pp={p.pp},vpp={self.virtual},ep={p.ep},etp={p.etp}{replicas}"

    def __str__(self) -> str:
        settings = [f"micro-batch {self.micro_batch}", self.sharding, f"recompute {self.recompute}"]
        settings += [self.pipeline] if self.pipeline else []
        settings += ["balanced lengths"] if self.lengths == "balanced" else []
        settings += [f"dispatcher {self.dispatcher}"] if self.dispatcher != "all_to_all" else []
        return f"{self.degrees},{', '.join(settings)}"


def _default_schedule(virtual: int) -> str:
    return "interleaved_1f1b" if virtual > 1 else "1f1b"


@dataclass(frozen=True)
class PlacedMapping:
    """A mapping on a cluster. The groups of rank 0 represent all groups."""

    mapping: Mapping
    cluster: Cluster

    def __post_init__(self) -> None:
        p = self.mapping.parallel
        if p.world != self.cluster.gpus:
            raise ConfigError(f"the mapping has {p.world} ranks, but the cluster has {self.cluster.gpus} accelerators")
        if why := inapplicable(self.mapping.dispatcher, self.cluster, self.mapping.parallel):
            raise ConfigError(f"dispatcher {self.mapping.dispatcher} does not apply to {self.mapping}: {why}")

    @cached_property
    def spans(self) -> dict[str, GroupSpan]:
        """Spans of groups by axis: "tp", "cp", "dp", "ep", "etp", "edp".

        "dp_cp" are the ranks with the same dense parameters, "experts" those of ep x etp, and "pp" a rank and its
        successor in the pipeline.
        """
        return _spans(self.cluster, self.mapping.parallel)

    @cached_property
    def unit_spans(self) -> tuple[UnitSpans, UnitSpans]:
        """Spans of FSDP's units with dense parameters, and of those with experts."""
        p, replicas = self.mapping.parallel, self.mapping.replicas
        return (
            UnitSpans.of(self.cluster, p.cp * p.dp, p.tp, replicas),
            UnitSpans.of(self.cluster, p.edp, p.etp * p.ep, replicas),
        )


@dataclass(frozen=True)
class UnitSpans:
    """The ranks of an FSDP unit: those over which it is sharded, and those that store the same shard.

    rank        0  1  2  3   4  5  6  7
    shard       0  1  2  3   0  1  2  3      shards: ranks 0 to 3; replicas: ranks 0 and 4
    """

    shards: GroupSpan
    replicas: GroupSpan

    @classmethod
    def of(cls, cluster: Cluster, ranks: int, stride: int, replicas: int) -> UnitSpans:
        """Divide ``ranks`` ranks into ``replicas`` blocks. Parameters of one rank have no replicas."""
        replicas = replicas if ranks > 1 else 1
        shards = ranks // replicas
        return cls(_span(cluster, shards, stride), _span(cluster, replicas, stride * shards))


def dispatch_span(dispatcher: Dispatcher, cluster: Cluster, parallel: ParallelConfig) -> GroupSpan:
    """Return the ranks among which a dispatcher works.

    This is the ep group, whose rows the etp ranks gather afterwards. all_gather uses ep x etp at once, because a
    gathered token is available to all shards of its experts.
    """
    return _spans(cluster, parallel)["experts" if dispatcher == "all_gather" else "ep"]


def inapplicable(dispatcher: Dispatcher, cluster: Cluster, parallel: ParallelConfig) -> str | None:
    """Return why a dispatcher does not apply to the ranks that share the experts, or None if it does."""
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
        return "ranks of a host write rows into each other's memory, which all_to_all models"
    return None


@lru_cache(maxsize=1 << 14)
def _spans(cluster: Cluster, p: ParallelConfig) -> dict[str, GroupSpan]:
    """Return the spans of rank 0's groups. In each group, consecutive ranks have a constant stride."""
    strides = {"tp": 1, "cp": p.tp, "dp": p.tp * p.cp, "etp": 1, "ep": p.etp, "edp": p.etp * p.ep}
    result = {axis: _span(cluster, p.sizes[axis], stride) for axis, stride in strides.items()}
    result["dp_cp"] = _span(cluster, p.cp * p.dp, p.tp)
    result["experts"] = _span(cluster, p.ep * p.etp, 1)
    result["pp"] = _span(cluster, min(2, p.pp), p.stage)
    return result


@lru_cache(maxsize=1 << 12)
def _span(cluster: Cluster, ranks: int, stride: int) -> GroupSpan:
    return cluster.span(np.arange(ranks) * stride)


SUM_BYTES = 4
"""Bytes of an element of all_gather's partial sums."""


@lru_cache(maxsize=4096)
def hosts_reached(shape: ModelShape, hosts: int, kept_fraction: float = 1.0) -> float:
    """Return the mean number of hosts, of ``hosts``, that hold experts of a token.

    ``kept_fraction`` of the slots are not dropped. A host is not reached if all of its slots are dropped.
    """
    ends = [shape.experts * host // hosts for host in range(hosts + 1)]
    return sum(1 - _share_without(shape, range(*bounds), kept_fraction) for bounds in pairwise(ends))


def remote_copies(shape: ModelShape, hosts: int, kept_fraction: float) -> float:
    """Return the mean number of other hosts that a token is sent to."""
    return hosts_reached(shape, hosts, kept_fraction) * (hosts - 1) / hosts


def sends_sums(
    dispatcher: Dispatcher, shape: ModelShape, ranks: int, size: int, *, deterministic: bool = False
) -> bool:
    """Return whether combine sends sums instead of rows.

    ``ranks``: ep degree. ``size``: bytes of an element. ``deterministic``: as in ``Workload``.
    """
    if deterministic:
        return False
    fewer = SUM_BYTES * ranks < shape.chosen * size
    return dispatcher == "hierarchical" or (dispatcher == "all_gather" and fewer)


def _share_without(shape: ModelShape, experts: range, kept_fraction: float) -> float:
    """Return the share of tokens without a slot at any of ``experts``."""
    size = shape.experts // shape.groups
    groups = range(experts.start // size, -(-experts.stop // size))
    sizes = [min(experts.stop, (group + 1) * size) - max(experts.start, group * size) for group in groups]
    # Number of ways to choose among the groups that contain ``experts``, by the number of chosen groups and the number
    # of ``experts`` in them (``marked``).
    choices = {(0, 0): 1}
    for count in sizes:
        with_group = {(chosen + 1, marked + count): number for (chosen, marked), number in choices.items()}
        choices = {key: choices.get(key, 0) + with_group.get(key, 0) for key in choices | with_group}
    others = shape.groups - len(sizes)
    group_choices = comb(shape.groups, shape.top_groups)
    pool = shape.top_groups * size + shape.zero_experts
    missed = 0.0
    for (chosen, marked), number in choices.items():
        if 0 <= shape.top_groups - chosen <= others:
            share = number * comb(others, shape.top_groups - chosen) / group_choices
            missed += share * _probability_of_none(pool, marked, shape.top_k, 1 - kept_fraction)
    return missed


def _probability_of_none(pool: int, marked: int, chosen: int, dropped: float) -> float:
    """Return the probability that, of ``chosen`` random experts of ``pool``, all ``marked`` ones are dropped.

    ``dropped``: probability that the slot of an expert is dropped.
    """
    most, all_choices = min(marked, chosen) if dropped else 0, comb(pool, chosen)
    # Divide the integers before multiplying with a float, because they can exceed the range of floats.
    shares = (comb(marked, hits) * comb(pool - marked, chosen - hits) / all_choices for hits in range(most + 1))
    return sum(share * dropped**hits for hits, share in enumerate(shares))
