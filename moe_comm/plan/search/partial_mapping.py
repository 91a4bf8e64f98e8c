"""A mapping that somebody gives, as far as they give it: what is left open is chosen as the fastest that fits.

Degrees that are left out are 1, dp what they leave; open are sequences of a micro-batch, what is computed again, and
the dispatcher.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from moe_comm.errors import ConfigError
from moe_comm.plan.model.mapping import MICRO_BATCHES, RECOMPUTE, Dispatcher, Mapping, Overlap, Recompute, Sharding
from moe_comm.plan.search.fit import suits
from moe_comm.plan.search.question import Candidate, Question
from moe_comm.plan.search.space import Space


@dataclass(frozen=True)
class Given:
    """degrees: as ``Mapping.parse`` reads them. coupled: experts lie inside data parallelism. micro_batch, recompute,
    dispatcher: None: open. schedule: of the pipeline; None: 1F1B, interleaved with vpp above 1."""

    degrees: str
    coupled: bool = False
    micro_batch: int | None = None
    recompute: Recompute | None = None
    sharding: Sharding = "zero1"
    overlap: Overlap = "none"
    schedule: str | None = None
    dispatcher: Dispatcher | None = None

    def candidate(self, question: Question) -> Candidate:
        """The fastest that fits; if none does, the one that lacks the fewest bytes.

        Raises:
            ConfigError: it cannot run at all: a key, a degree or the batch is wrong. Of several reasons, the first
                one: with the least of everything that is open.
        """
        first = Mapping.parse(
            self.degrees,
            question.cluster.gpus,
            coupled=self.coupled,
            sharding=self.sharding,
            overlap=self.overlap,
            pipeline=self.schedule,
        )
        if why := suits(question.shape, first.parallel, question.load):
            raise ConfigError(f"{question.shape.name} cannot run with {self.degrees}: {why}")
        ways = (self.dispatcher,) if self.dispatcher else Space().dispatchers(question, first.parallel)
        sizes = MICRO_BATCHES if self.micro_batch is None else (self.micro_batch,)
        refused: ConfigError | None = None
        best: Candidate | None = None
        nearest: tuple[int, Mapping] | None = None
        for size, dispatcher in product(sizes, ways):
            for recompute in RECOMPUTE if self.recompute is None else (self.recompute,):
                mapping = replace(first, micro_batch=size, recompute=recompute, dispatcher=dispatcher)
                try:
                    model = question.model(mapping)
                    fit = question.fit(mapping)
                except ConfigError as error:
                    refused = refused or error
                    break
                if nearest is None or fit.missing < nearest[0]:
                    nearest = (fit.missing, mapping)
                if fit:
                    one = Candidate(mapping, model.predict(), fit)
                    best = one if best is None or one.step.seconds < best.step.seconds else best
                    if not mapping.splits:
                        break  # computing more of it again only takes longer
        if best is not None:
            return best
        if nearest is None:
            raise refused or ConfigError(f"{first} cannot run")
        return question.candidate(nearest[1])
