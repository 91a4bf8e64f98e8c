"""The mappings that a search looks through: every way to spread a model over a cluster that can run at all.

    degrees   tp x cp x dp x pp = gpus, etp x ep divides a pipeline position's tp x cp x dp      (``Space.degrees``)
    shapes    schedule, pipeline stages a rank (vpp) and micro-batch, that the batch and the layers allow
                                                                                                 (``Space.shapes``)
    trades    recompute x sharding x overlap                                                     (``Space.trades``)
    ways      dispatchers that can run with the degrees, and can be the faster one               (``Space.dispatchers``)

Degrees are divisors of what there is to divide and not only powers of two: 60 layers on 240 accelerators make pp 15.

Tensors are never cut over more than one host: tp and etp move every layer's rows in each pass, and a network is several
times slower than the links of a host (arXiv 2104.04473, section 3.2). Sequences are (cp beyond a host) only in a
``wide`` space, which a search tries where nothing else can run or fits: what cp moves does not grow with its degree,
so over a network it is slow but possible, and it is all that helps when one sequence is too long for a host.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import product
from typing import Any, get_args

from moe_comm.errors import ConfigError
from moe_comm.plan.model.mapping import Dispatcher, Mapping, Overlap, Place, Recompute, Sharding, lacks
from moe_comm.plan.pipeline.schedules import check_micro_batches, find_schedule
from moe_comm.plan.search.fit import divisors, suits
from moe_comm.plan.search.question import Question
from moe_comm.plan.step.dispatching import pays
from moe_comm.topology import ParallelConfig

Trade = tuple[Recompute, Sharding, Overlap]
Shape = tuple[str | None, int, int]
"""Schedule (None: no pipeline), stages a rank, micro-batch."""
SCHEDULES = ("1f1b", "zero_bubble", "zbv", "dualpipev", "interleaved_1f1b", "gpipe")
"""By what they keep, as a rule, the least first."""


@dataclass(frozen=True)
class Space:
    """Which mappings are looked at.

    overlap, recompute, sharding, dispatcher: those that may be chosen. micro_batches: sequences that a rank takes at a
    time; None: every power of two that the batch allows. virtual: pipeline stages a rank; None: every number that cuts
    a rank's layers evenly. folded: False: experts lie inside data parallelism, as without folding: etp is tp, ep
    divides dp. wide: cp may leave a host, and ep ranks may stand astride of hosts. schedule: those that pipelines may
    have; gpipe is no faster than 1f1b and keeps more, and is looked at only if it is named.
    """

    overlap: tuple[Overlap, ...] = ("none",)
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    sharding: tuple[Sharding, ...] = ("replicate", "zero1", "fsdp")
    dispatcher: tuple[Dispatcher, ...] = get_args(Dispatcher)
    micro_batches: tuple[int, ...] | None = None
    virtual: tuple[int, ...] | None = None
    folded: bool | None = None
    wide: bool = False
    schedule: tuple[str, ...] = SCHEDULES[:-1]

    def __post_init__(self) -> None:
        known: dict[str, tuple[Any, ...]] = {
            "overlap": get_args(Overlap),
            "recompute": get_args(Recompute),
            "sharding": get_args(Sharding),
            "schedule": SCHEDULES,
            "dispatcher": get_args(Dispatcher),
        }
        for name, values in known.items():
            given = getattr(self, name)
            if not isinstance(given, tuple) or not given or not set(given) <= set(values):
                raise ConfigError(f"{name} must be a tuple of some of {', '.join(values)}; got {given!r}")
            # Cheapest first, which the search relies on.
            object.__setattr__(self, name, tuple(value for value in values if value in given))
        for name in ("micro_batches", "virtual"):
            given = getattr(self, name)
            if given is not None and not (given and all(type(one) is int and one >= 1 for one in given)):
                raise ConfigError(f"{name} must be whole numbers of at least 1, or None; got {given!r}")

    @classmethod
    def of(cls, **settings: object) -> Space:
        """A single value will do for a tuple; None is the default. ``micro_batch`` is ``micro_batches``.

        Raises:
            ConfigError: no such setting, or a value that it does not take.
        """
        names = {field.name for field in fields(cls)}
        given: dict[str, Any] = {}
        for name, value in settings.items():
            name = "micro_batches" if name == "micro_batch" else name
            if name not in names:
                raise ConfigError(f"a space of mappings has no {name!r}; it has {', '.join(sorted(names))}")
            if value is not None:
                given[name] = value if isinstance(value, tuple | bool) else (value,)
        return cls(**given)

    def candidates(self, question: Question) -> Iterator[Mapping]:
        """All of them; only mappings that can run, whether they fit memory or not."""
        for parallel in self.degrees(question):
            ways = self.dispatchers(question, parallel)
            for schedule, virtual, micro_batch in self.shapes(question, parallel):
                for (recompute, sharding, overlap), way in product(self.trades(), ways):
                    yield Mapping(parallel, virtual, micro_batch, sharding, recompute, overlap, schedule, way)

    def trades(self) -> tuple[Trade, ...]:
        """What is left to choose once degrees, micro-batch, stages and dispatcher are."""
        return tuple((r, s, o) for r in self.recompute for s in self.sharding for o in self.overlap)

    def dispatchers(self, question: Question, parallel: ParallelConfig) -> tuple[Dispatcher, ...]:
        """Those that can run with these degrees; of several, those that can be faster than ``all_to_all``."""
        shape, load, cluster = question.shape, question.load, question.cluster
        found = tuple(one for one in self.dispatcher if lacks(one, cluster, parallel) is None)
        if "all_to_all" not in found:
            return found
        rows = (min(1.0, load.capacity or 1.0), load.busiest(parallel.ep), load.size)
        place = Place(Mapping(parallel), cluster)
        return tuple(one for one in found if pays(one, shape, place, *rows))

    def degrees(self, question: Question, refused: Counter[str] | None = None) -> Iterator[ParallelConfig]:
        """Degrees with which the model, the batch and the cluster's hosts can be cut.

        Args:
            refused: counts, by reason, degrees that cannot run; of attention's alone where experts make no difference.
        """
        refused = Counter() if refused is None else refused
        shape, gpus, host = question.shape, question.cluster.gpus, host_of(question)
        for tp in divisors(gpus):
            for cp in divisors(gpus // tp):
                why = self._refuses(question, ParallelConfig(tp=tp, cp=cp), host)
                if why is not None:
                    refused[why] += 1
                    continue
                for pp in divisors(gpus // (tp * cp)):
                    dp = gpus // (tp * cp * pp)
                    if pp > shape.layers:
                        refused["more pipeline stages than layers"] += 1
                    elif question.global_batch % dp:
                        refused["sequences of a batch cannot be dealt over dp"] += 1
                    else:
                        yield from self._experts(question, ParallelConfig(tp, cp, dp, pp), host)

    def shapes(self, question: Question, parallel: ParallelConfig) -> Iterator[Shape]:
        """Those that the batch and the layers allow."""
        each, pp = question.global_batch // parallel.dp, parallel.pp
        for micro_batch in self.sizes(each):
            for schedule in self.schedule if pp > 1 else (None,):
                if schedule is None or runs(schedule, pp, each // micro_batch):
                    for virtual in self.virtuals(question, pp, schedule):
                        yield schedule, virtual, micro_batch

    def sizes(self, each: int) -> tuple[int, ...]:
        """Micro-batches that a rank's ``each`` sequences can be cut into."""
        powers = (1 << power for power in range(each.bit_length()))
        return tuple(one for one in self.micro_batches or powers if not each % one)

    def virtuals(self, question: Question, pp: int, schedule: str | None) -> tuple[int, ...]:
        """Stages that each rank of a pipeline may have. The two of a V are as even together as one would be: what the
        stages on the way down have more is spread like that."""
        layers = question.shape.layers
        if schedule is None:
            return (1,) if self.virtual is None or 1 in self.virtual else ()
        limits = find_schedule(schedule)
        if limits.style == "v":
            known: Iterable[int] = (limits.usual,)
        else:
            known = self.virtual or divisors(-(-layers // pp))
        if self.virtual is not None:
            known = (one for one in known if one in self.virtual)
        return tuple(one for one in known if one * pp <= layers and limits.least <= one and one <= (limits.most or one))

    def _refuses(self, question: Question, p: ParallelConfig, host: int) -> str | None:
        if why := suits(question.shape, p, question.load, host):
            return why
        block = p.tp * p.cp
        if host % block and (not self.wide or block % host):
            return "cp would leave a host"
        return None

    def _experts(self, question: Question, p: ParallelConfig, host: int) -> Iterator[ParallelConfig]:
        shape, load = question.shape, question.load
        if not shape.moe_layers:
            yield p
            return
        for etp, ep in _expert_degrees(p.stage, math.gcd(shape.ffn, host), shape.experts):
            if self.folded is False and (etp != p.tp or p.dp % ep):
                continue
            block = etp * ep
            aligned = self.wide or not host % block or not block % host
            if aligned and suits(shape, ParallelConfig(dp=etp, etp=etp), load, host) is None:
                yield ParallelConfig(p.tp, p.cp, p.dp, p.pp, ep, etp)


def host_of(question: Question) -> int:
    """Accelerators in a row that are on one host wherever the row starts at a multiple of it."""
    cluster = question.cluster
    return cluster.gpus if cluster.gpus <= cluster.host_size else math.gcd(cluster.gpus, cluster.host_size)


@lru_cache(maxsize=1 << 14)
def runs(schedule: str, pp: int, micro_batches: int) -> bool:
    """Whether a pipeline's schedule takes so many micro-batches."""
    try:
        check_micro_batches(schedule, pp, micro_batches)
    except ConfigError:
        return False
    return True


@lru_cache(maxsize=1 << 14)
def _expert_degrees(stage: int, widest: int, experts: int) -> tuple[tuple[int, int], ...]:
    """(etp, ep) that divide a pipeline position's ranks; every rank has as many experts."""
    return tuple(
        (etp, ep) for etp in divisors(math.gcd(stage, widest)) for ep in divisors(math.gcd(stage // etp, experts))
    )
