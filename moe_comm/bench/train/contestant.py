"""Interface of the contestants of ``bench train`` (the compared training loops), and their inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from moe_comm.bench.train.settings import TrainBench
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.topology import ParallelMesh
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus
from moe_comm.train.loop.feed import CorpusFeed
from moe_comm.train.ranks import Ranks


@dataclass(frozen=True)
class ContestantInputs:
    """Inputs that are the same for all contestants on this rank.

    Attributes:
        weights: folder with the initial weights of this library's model, for ``from_pretrained``.
    """

    bench: TrainBench
    config: TrainConfig
    architecture: TransformerConfig
    corpus: Corpus
    ranks: Ranks
    weights: Path

    def feed(self, mesh: ParallelMesh) -> CorpusFeed:
        """Return the batches of this rank, the same for all contestants on the same mesh."""
        data = self.config.data
        return CorpusFeed(self.corpus, mesh, self.config.parallel.context, data.micro_batches, self.config.run.steps)


class TrainContestant(ABC):
    """A training loop with its own copy of the model and of the optimizer state. The constructor is collective.

    Attributes:
        single_process: only the first rank builds and runs it, with all cores, and the other ranks wait.
        note: remark in the result.
    """

    name: ClassVar[str]
    single_process: ClassVar[bool] = False
    note: ClassVar[str] = ""

    @classmethod
    def unavailable_reason(cls, bench: TrainBench) -> str | None:
        """Return the reason why it cannot run here, or None."""
        return "requires more than one rank" if bench.ranks == 1 and not cls.single_process else None

    @abstractmethod
    def __init__(self, inputs: ContestantInputs) -> None:
        """Build model and optimizer."""

    def prepare(self, step: int) -> None:  # noqa: B027
        """Fetch the batch of ``step`` (from 0), unless the loop does so itself. Not timed."""

    @abstractmethod
    def step(self, step: int) -> None:
        """Update the weights once. Collective, unless it runs in a single process."""

    def without_communication(self) -> AbstractContextManager[object] | None:
        """Return a context in which ``step`` computes the same without communication; None if that is not possible.

        The weights are invalid afterwards.
        """
        return None

    def finish(self) -> None:  # noqa: B027
        """Wait for transfers of the last step that are in flight. Not timed."""

    @abstractmethod
    def loss(self) -> float:
        """Return this rank's contribution to the loss of the last step. The sum over ranks is the mean loss."""

    def close(self) -> None:  # noqa: B027
        """Release resources. Collective, unless it runs in a single process."""
