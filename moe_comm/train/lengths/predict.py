"""Work of the slowest rank with static and with balanced lengths, predicted from the documents of a corpus."""

from __future__ import annotations

from dataclasses import dataclass

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.lengths.loads import MICRO_BATCHES, balanced_loads
from moe_comm.topology import ParallelConfig
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus
from moe_comm.train.data.sequences import document_lengths
from moe_comm.train.lengths.feed import check_model, cost_of, static_work

WORTH = 1.1
"""Balanced lengths are recommended if the slowest rank's work falls by at least this factor."""


@dataclass(frozen=True)
class LengthPrediction:
    """Work of the slowest rank divided by the mean, with each setting of ``parallel.lengths``; mean over micro-batches.

    Transfers of keys are not included. chosen: whether lengths are balanced already.
    """

    static: float
    balanced: float
    chosen: bool = False

    @property
    def speedup(self) -> float:
        """Work of the slowest rank with static lengths divided by that with balanced ones."""
        return self.static / self.balanced

    def __str__(self) -> str:
        text = (
            f"lengths: the slowest rank has {self.static:.2f} times the mean work with static lengths, "
            f"{self.balanced:.2f} times with balanced ones"
        )
        worth = self.speedup >= WORTH and not self.chosen
        return f'{text}; parallel.lengths = "balanced" would save time' if worth else text


def can_balance(config: TrainConfig, mapping: ParallelConfig, architecture: TransformerConfig) -> bool:
    """Return whether lengths can be balanced over several ranks, and static ones give each of them a sequence."""
    parallel, data = config.parallel, config.data
    separate = data.documents == "separate" and (mapping.cp == 1 or parallel.context == "ring")
    if mapping.dp * mapping.cp == 1 or not separate or mapping.pp > 1 or parallel.interleave:
        return False
    try:
        check_model(architecture)
    except ConfigError:
        return False
    return data.batch // data.micro_batches >= mapping.dp


def predict_lengths(
    config: TrainConfig, corpus: Corpus, mapping: ParallelConfig, architecture: TransformerConfig
) -> LengthPrediction | None:
    """Predict the first ``MICRO_BATCHES`` micro-batches of a run, without reading tokens.

    Returns None unless ``can_balance``.
    """
    if not can_balance(config, mapping, architecture):
        return None
    world, data = mapping.dp * mapping.cp, config.data
    cost = cost_of(config, architecture, mapping)
    slowest = [0, 0]
    work = 0
    for number in range(min(MICRO_BATCHES, config.run.steps * data.micro_batches)):
        step, index = divmod(number, data.micro_batches)
        micro_batch = corpus.batch_of(step).micro(index, data.micro_batches)
        static = static_work(micro_batch, mapping.dp, mapping.cp, cost)
        slowest[0] += max(static)
        slowest[1] += max(balanced_loads(document_lengths(micro_batch.packings, micro_batch.indices), world, cost).work)
        work += sum(static)
    mean = max(work, 1) / world
    return LengthPrediction(slowest[0] / mean, slowest[1] / mean, config.parallel.lengths == "balanced")
