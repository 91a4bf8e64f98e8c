"""Tiny training runs for tests: a text, settings, a trainer, and full weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_comm.bench.parity import training as parity_train
from moe_comm.bench.parity.training import Parts, Session, assemble
from moe_comm.train.config import TrainConfig, load

__all__ = ["Parts", "Session"]

TINY = (
    "run.steps=4",
    "run.eval_batches=2",
    "run.sample_tokens=0",
    "run.gc_every=0",  # the planned collections end with gc.unfreeze, after which each takes 0.25 s; see tests/pool.py
    "data.seq_len=16",
    "data.batch=8",
    "data.micro_batches=2",
    "model.hidden=16",
    "model.layers=2",
    "model.heads=4",
    "model.kv_heads=2",
    "model.experts=4",
    "model.ffn=24",
    "model.init_std=0.2",
    "optimizer.warmup=1",
    "parallel.timeout_s=60",
    "watch.stuck_s=60",
)
SGD = ("optimizer.kind=sgd", "optimizer.lr=0.3", "model.aux_loss=0.1", "model.z_loss=0.01", "optimizer.clip=0.5")
"""SGD, because Adam would hide a wrong scale of a gradient; with clipping, so that a wrong norm changes the weights."""
TEXT = "".join(f"line {n}: the quick brown fox jumps over the lazy dog, {n * n} times\n" for n in range(400))


def write_text(folder: Path) -> list[str]:
    """Return settings of runs on ``TEXT`` with all files in ``folder``."""
    text = folder / "text.txt"
    text.write_text(TEXT)
    return [*TINY, f"data.source={text}", f"data.cache={folder / 'cache'}", f"run.folder={folder / 'runs'}"]


def config_of(settings: Sequence[str]) -> TrainConfig:
    return load(None, settings)


@contextlib.contextmanager
def session(settings: Sequence[str], **options: Any) -> Iterator[Session]:
    """Yield a trainer without a run folder, on all ranks of the default process group or on one rank. Collective."""
    with parity_train.session(config_of(settings), **options) as active:
        yield active


@dataclass(frozen=True)
class Trained:
    """Results of one rank after training. validation: loss after the last step."""

    losses: list[float]
    norms: list[float]
    loads: list[Any]
    parts: Parts
    validation: float
    status: str


def train(rank: int, world: int, settings: Sequence[str]) -> Trained:
    """Train to the end, on a ``RankPool`` or as a reference with ``train(0, 1, ...)``."""
    with session(settings) as active:
        status = active.trainer.fit()
        reports = active.trainer.reports
        return Trained(
            [report.loss for report in reports],
            [report.grad_norm for report in reports],
            [report.load for report in reports],
            active.parts(),
            active.trainer.evaluate(),
            status,
        )


def whole(parts_by_rank: Sequence[Parts]) -> dict[str, Tensor]:
    """Assemble full tensors from the shards of all ranks. Missing elements are NaN; replicas must be equal."""
    tensors, differences = assemble(parts_by_rank)
    assert not any(differences.values()), {name: difference for name, difference in differences.items() if difference}
    return tensors


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Compare the largest difference of each tensor relative to its largest element."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = float((actual[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-12))
        assert difference <= tolerance, f"{name} differs by {difference:.1e}"


def assert_same_training(actual: Sequence[Trained], expected: Trained, tolerance: float = 1e-5) -> None:
    """Compare losses, norms and validation loss of each rank, and the full weights."""
    for trained in actual:
        assert_floats(trained.losses, expected.losses, tolerance)
        assert_floats(trained.norms, expected.norms, 3 * tolerance)
        assert_floats([trained.validation], [expected.validation], tolerance)
    assert_close(whole([t.parts for t in actual]), whole([expected.parts]), 3 * tolerance)


def assert_floats(actual: Sequence[float], expected: Sequence[float], tolerance: float = 1e-5) -> None:
    assert len(actual) == len(expected)
    for step, (a, b) in enumerate(zip(actual, expected, strict=True), 1):
        assert abs(a - b) <= tolerance * abs(b), f"step {step}: {a} and {b}"
