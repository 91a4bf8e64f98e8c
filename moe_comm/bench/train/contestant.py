"""What ``bench train`` asks of a contestant, and what all of them are given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from moe_comm.bench.train.settings import TrainBench
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus
from moe_comm.train.loop.feed import CorpusFeed
from moe_comm.train.ranks import Ranks


@dataclass(frozen=True)
class Setting:
    """The same for all contestants on this rank.

    weights: a folder that ``from_pretrained`` loads, with the weights that ours starts from.
    """

    bench: TrainBench
    config: TrainConfig
    architecture: TransformerConfig
    corpus: Corpus
    ranks: Ranks
    weights: Path

    def feed(self, mesh: ParallelMesh) -> CorpusFeed:
        """This rank's batches: of all tokens on one rank, the same tokens whoever asks."""
        data = self.config.data
        return CorpusFeed(self.corpus, mesh, self.config.parallel.context, data.micro_batches, self.config.run.steps)


class AloneMesh(ParallelMesh):
    """The mesh of a process that trains by itself, though it is a rank of a group."""

    def __init__(self) -> None:
        self.config, self.device, self.rank = ParallelConfig(), "cpu", 0
        self.place, self.sizes = self.config.place(0), self.config.sizes
        self.attention = self.expert = None
        self._groups, self._tied = {}, None


class TrainContestant(ABC):
    """A training loop, built, with its own copy of the model and the optimizer's state.

    alone: only the first rank makes it and runs it, with all cores; the others wait.
    note: for the reader of the result.
    """

    name: ClassVar[str]
    alone: ClassVar[bool] = False
    note: ClassVar[str] = ""

    @classmethod
    def why_not(cls, bench: TrainBench) -> str | None:
        """The reason why it cannot run here; None if it can."""
        return "needs more than one rank" if bench.ranks == 1 and not cls.alone else None

    @abstractmethod
    def __init__(self, setting: Setting) -> None:
        """Collective, unless it runs alone."""

    def prepare(self, step: int) -> None:  # noqa: B027
        """What is not measured: fetch the batch of ``step`` (from 0), if the loop does not do that itself."""

    @abstractmethod
    def step(self, step: int) -> None:
        """One update of the weights. Collective, unless it runs alone."""

    @abstractmethod
    def loss(self) -> float:
        """This rank's share of the last step's loss; all ranks' shares add up to the mean over the global batch."""

    def close(self) -> None:  # noqa: B027
        """Give back what it holds. Collective, unless it runs alone."""
