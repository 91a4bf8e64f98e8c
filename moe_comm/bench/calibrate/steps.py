"""Calibrate rates and the start time of collectives within training steps.

GEMMs, passes and transfers are measured separately, each in a loop with warm caches. In a step they alternate, memory
is newly allocated, and ranks that share cores wait for each other in every collective. The trainer therefore trains
small models for a few steps:

    mapping          collectives      calibrates
    dp               1 per step       ``Accelerator.sustained``: fraction of the rates measured separately
    dp + ep          4 per layer      ``Cluster.start_s``: start time of a collective
    tp + dp + ep     10 per layer     the same

Both numbers are fitted to all measured steps.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.bench.calibrate.fit import LEAST_S, shape_of
from moe_comm.bench.calibrate.ranks import MODELS, TIMEOUT_S
from moe_comm.runtime.launch import init_ranks
from moe_comm.topology import ParallelMesh
from moe_comm.train import config as configuration
from moe_comm.train.feed import StepBatch
from moe_comm.train.loop.build import architecture_of, build
from moe_comm.train.loop.trainer import Trainer
from moe_comm.train.pipeline.batch import MicroBatch
from moe_comm.train.ranks import Ranks
from moe_plan.machine.hardware import Cluster
from moe_plan.machine.link_fit import nearest
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Mapping, PlacedMapping
from moe_plan.step.step import StepModel

SEQUENCES, LENGTH, MICRO_BATCHES = 1, 256, 2
"""Sequences of a micro-batch, their length, and micro-batches of a step."""
WARM, STEPS = 1, 5
"""Number of discarded steps, and of steps whose median is used."""


@dataclass(frozen=True)
class CalibrationStep:
    """Time of a training step.

    Attributes:
        model: index in ``MODELS``.
        mapping: argument of ``Mapping.parse``.
        seconds: wall time until the last rank is done.
        imbalance: rows of the busiest rank over the mean.
    """

    model: int
    mapping: str
    seconds: float
    imbalance: float


def imbalance(slots_LE: Sequence[Sequence[int]], ep: int) -> float:
    """Return the rows of the busiest of ``ep`` ranks over the mean, averaged over layers.

    ``slots_LE`` is the number of slots (token and expert choice) of each expert. Each rank has contiguous experts.
    """
    results = []
    for slots in slots_LE:
        cuts = [rank * len(slots) // ep for rank in range(ep + 1)]
        rows_per_rank = [sum(slots[first:stop]) for first, stop in itertools.pairwise(cuts)]
        results.append(max(rows_per_rank) * ep / max(sum(rows_per_rank), 1))
    return max(1.0, fmean(results)) if results else 1.0


def runs(ranks: int) -> list[tuple[int, str]]:
    """Return the (model, mapping) pairs to train."""
    results = []
    for model, sizes in enumerate(MODELS):
        ep = math.gcd(ranks, sizes["experts"])
        results += [(model, f"dp={ranks},ep={ep}") for ep in sorted({1, ep})]
        if ranks % 2 == 0 and sizes["heads"] % 2 == 0:
            results.append((model, f"tp=2,dp={ranks // 2},ep={ep}"))
    return results


def step_seconds(cluster: Cluster, sample: CalibrationStep) -> float:
    """Return the predicted seconds of a calibration step."""
    mapping = Mapping.parse(sample.mapping, cluster.gpus, micro_batch=SEQUENCES, sharding="replicate")
    load = Workload(LENGTH, "fp32", imbalance=sample.imbalance)
    batch = SEQUENCES * MICRO_BATCHES * mapping.parallel.dp
    return StepModel(shape_of(MODELS[sample.model]), PlacedMapping(mapping, cluster), load, batch).predict().seconds


def within_steps(cluster: Cluster, steps: Sequence[CalibrationStep]) -> Cluster:
    """Return ``cluster`` with ``sustained`` (at most 1) and ``start_s`` (at least its value) fitted to ``steps``."""

    def with_values(sustained: float, extra_start_s: float) -> Cluster:
        accelerator = replace(cluster.accelerator, sustained=min(sustained, 1.0))
        return replace(cluster, accelerator=accelerator, start_s=cluster.start_s + extra_start_s)

    def errors(sustained: float, extra_start_s: float) -> list[float]:
        return [
            math.log(step_seconds(with_values(sustained, extra_start_s), sample) / sample.seconds) for sample in steps
        ]

    # Squared errors: with absolute errors, the pattern search would stop at a ridge of these correlated numbers.
    return with_values(*nearest(errors, (1.0, max(cluster.start_s, LEAST_S) if cluster.gpus > 1 else LEAST_S), power=2))


def measure_steps() -> list[CalibrationStep]:
    """Measure on this rank. Collective over the default process group, which is created if there is none."""
    torch.set_num_threads(1)
    with init_ranks("cpu", TIMEOUT_S) as ranks, contextlib.ExitStack() as stack:
        return _measure_interleaved([(*sample, _trainer(*sample, stack)) for sample in runs(ranks.world)])


def _measure_interleaved(trained: Sequence[tuple[int, str, Any]]) -> list[CalibrationStep]:
    """Train one step with each trainer in turn, so that noise affects them equally."""
    world = dist.get_world_size() if dist.is_initialized() else 1

    def barrier() -> None:
        if world > 1:
            dist.barrier()

    seconds: list[list[float]] = [[] for _ in trained]
    loads: list[list[Any]] = [[] for _ in trained]
    for step in range(WARM + STEPS):
        for index, (_, _, trainer) in enumerate(trained):
            barrier()
            start = time.perf_counter()
            report = trainer.train_step(step)
            barrier()
            seconds[index].append(time.perf_counter() - start)
            loads[index].append(report.load.slots)
    medians = torch.tensor([median(sample[WARM:]) for sample in seconds], dtype=torch.float32, device="cpu")
    if world > 1:
        dist.all_reduce(medians, dist.ReduceOp.MAX)
    results = []
    for (model, mapping, _), step_s, load in zip(trained, medians.tolist(), loads, strict=True):
        ep = Mapping.parse(mapping, world).parallel.ep
        results.append(CalibrationStep(model, mapping, step_s, fmean(imbalance(slots, ep) for slots in load[WARM:])))
    return results


def _trainer(model: int, mapping: str, stack: contextlib.ExitStack) -> Any:
    ranks, sizes = Ranks.make(), MODELS[model]
    parallel = Mapping.parse(mapping, ranks.world).parallel
    overrides = [
        *(f"model.{key}={value}" for key, value in sizes.items()),
        f"parallel.ranks={ranks.world}",
        *(f"parallel.{axis}={parallel.sizes[axis]}" for axis in ("tp", "dp", "ep")),
        "parallel.sharding=replicate",
        f"data.seq_len={LENGTH}",
        f"data.batch={SEQUENCES * MICRO_BATCHES * parallel.dp}",
        f"data.micro_batches={MICRO_BATCHES}",
        "model.family=qwen3_moe",
        # A large initial standard deviation and a small learning rate keep the tokens distributed over all experts.
        "model.init_std=0.1",
        "optimizer.warmup=0",
        "optimizer.lr=1e-6",
    ]
    config = configuration.load(None, overrides)
    mesh = ParallelMesh(config.parallel.mapping(ranks.world))
    train_state = build(config, architecture_of(config, sizes["vocab"]), mesh)
    stack.callback(train_state.close)
    return Trainer(config, train_state, _Feed(sizes["vocab"], mesh), ranks)


class _Feed:
    """Random tokens, the same for the ranks of one data-parallel replica."""

    def __init__(self, vocab: int, mesh: ParallelMesh) -> None:
        self._vocab, self._dp = vocab, mesh.size("dp")
        self._generator = torch.Generator().manual_seed(mesh.place["dp"])

    def train(self, step: int) -> Any:
        shape = (MICRO_BATCHES, 2, SEQUENCES, LENGTH)
        batches = torch.randint(0, self._vocab, shape, generator=self._generator, device="cpu")
        micro = [MicroBatch(ids_BS, targets_BS) for ids_BS, targets_BS in batches]
        return StepBatch(micro, SEQUENCES * LENGTH * MICRO_BATCHES * self._dp)

    def validation(self, count: int) -> Any:
        return iter(())
