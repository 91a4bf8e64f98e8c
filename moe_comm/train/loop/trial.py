"""Measured steps of a configuration, before a run chooses between mappings."""

from __future__ import annotations

from collections.abc import Sequence

from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.topology import ParallelMesh
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus
from moe_comm.train.loop.build import build
from moe_comm.train.loop.feed import CorpusFeed
from moe_comm.train.loop.trainer import Trainer
from moe_comm.train.ranks import Ranks


def trial_seconds(
    config: TrainConfig,
    steps: int,
    *,
    architecture: TransformerConfig,
    corpus: Corpus,
    ranks: Ranks,
    device: str,
) -> Sequence[float]:
    """Train a new model of ``config`` for a few steps and return the seconds of each on this rank. Collective.

    The model and its process groups are released. Nothing is written.

    Raises:
        ConfigError: the configuration cannot be built.
        PeerDied, PeerTimeout: a rank failed.
    """
    mesh = ParallelMesh(config.parallel.mapping(ranks.world), device)
    state = build(config, architecture, mesh)
    with CorpusFeed(corpus, mesh, config.parallel.context, config.data.micro_batches, steps) as feed:
        trainer = Trainer(config, state, feed, ranks)
        seconds = [trainer.train_step(step).times.total for step in range(steps)]
    state.close()
    mesh.close()
    return seconds
