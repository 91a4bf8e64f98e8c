"""Tiny runs for the tests of training."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_comm.integrations.hugging_face import gather_state_dict
from moe_comm.train.config import TrainConfig, load
from moe_comm.train.data import Corpus
from moe_comm.train.metrics import MetricsSink
from moe_comm.train.model import build, spread
from moe_comm.train.ranks import Ranks
from moe_comm.train.trainer import Trainer

TINY = (
    "run.steps=4",
    "run.eval_batches=2",
    "run.sample_bytes=24",
    "data.seq_len=16",
    "data.batch=4",
    "model.hidden=16",
    "model.layers=2",
    "model.heads=2",
    "model.experts=5",
    "model.ffn=24",
    "model.init_std=0.2",
    "optimizer.warmup=1",
    "parallel.timeout_s=20",
)
TEXT = b"".join(b"line %d: the quick brown fox jumps over the lazy dog\n" % n for n in range(200))


def tiny(*overrides: str) -> TrainConfig:
    return load(None, [*TINY, *overrides])


def make_trainer(config: TrainConfig, sinks: Sequence[MetricsSink] = ()) -> Trainer:
    """A trainer on this rank of the default process group, or on one rank where there is none."""
    ranks = Ranks.make(config.parallel.ep)
    whole = build(config.model, config.data.seq_len, config.run.seed)
    model = spread(whole, ranks, config.parallel)
    return Trainer(config, model, Corpus(TEXT, config.data, config.run.seed), ranks, sinks)


def full_weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in gather_state_dict(trainer.model.module).items()}
