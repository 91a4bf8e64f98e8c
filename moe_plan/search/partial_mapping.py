"""A mapping that a user specifies partially. Open settings are chosen so that it is the fastest one that fits.

Missing degrees are 1, and dp takes the remaining ranks. Micro-batch, recompute and dispatcher can be open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.config import Recompute
from moe_plan.model.mapping import MICRO_BATCHES, RECOMPUTE, Dispatcher, Mapping, OverlapMode, ShardingMode
from moe_plan.search.fit import indivisible
from moe_plan.search.request import PlanCandidate, PlanRequest
from moe_plan.search.space import SearchSpace


@dataclass(frozen=True)
class PartialMapping:
    """A partially specified mapping.

    degrees: text for ``Mapping.parse``. coupled: experts are distributed inside data parallelism. micro_batch,
    recompute, dispatcher: None: open. schedule: None: 1F1B, or interleaved 1F1B with vpp above 1.
    """

    degrees: str
    coupled: bool = False
    micro_batch: int | None = None
    recompute: Recompute | None = None
    sharding: ShardingMode = "zero1"
    overlap: OverlapMode = "none"
    schedule: str | None = None
    dispatcher: Dispatcher | None = None

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
        for size, dispatcher in product(sizes, dispatchers):
            for recompute in RECOMPUTE if self.recompute is None else (self.recompute,):
                mapping = replace(first, micro_batch=size, recompute=recompute, dispatcher=dispatcher)
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
