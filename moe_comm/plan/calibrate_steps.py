"""Whole training steps of a calibration, and what rates keep within them.

Products, passes and transfers are measured one kind after the other, each in a loop of its own that finds its caches
warm and the cores where it left them. In a step they take turns, memory comes fresh, and ranks that share a core evict
each other whenever they meet. Small models are trained for a few steps, by the trainer itself, each of them

    with all experts on each rank: ranks meet once a step         and with experts spread: four times a layer

The share of the rates with which predictions come nearest to all is ``Accelerator.sustained``.
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

from moe_comm.plan.calibrate_fit import nearest, shape_of
from moe_comm.plan.calibrate_ranks import MODELS, TIMEOUT_S
from moe_comm.plan.hardware import Cluster
from moe_comm.plan.mapping import Mapping, Place
from moe_comm.plan.operators import Load
from moe_comm.plan.step import StepModel
from moe_comm.topology import ParallelConfig

SEQUENCES, LENGTH, MICRO_BATCHES = 1, 256, 2
"""Of a micro-batch: sequences and their tokens; and micro-batches of a step."""
WARM, STEPS = 1, 5
"""Steps that are thrown away, and steps whose median counts."""


@dataclass(frozen=True)
class Stepped:
    """A step of ``MODELS[model]`` on data-parallel ranks. imbalance: rows of the busiest rank over the mean.

    seconds: by the clock, until the last rank has done it.
    """

    model: int
    ep: int
    seconds: float
    imbalance: float


def imbalance(slots_LE: Sequence[Sequence[int]], ep: int) -> float:
    """Rows of the busiest of ``ep`` ranks over the mean of all, the mean over layers. Experts are dealt in order."""
    found = []
    for slots in slots_LE:
        cuts = [rank * len(slots) // ep for rank in range(ep + 1)]
        every = [sum(slots[first:stop]) for first, stop in itertools.pairwise(cuts)]
        found.append(max(every) * ep / max(sum(every), 1))
    return max(1.0, fmean(found)) if found else 1.0


def runs(ranks: int) -> list[tuple[int, int]]:
    """(model, ep) of what is trained."""
    return [(model, ep) for model, sizes in enumerate(MODELS) for ep in sorted({1, math.gcd(ranks, sizes["experts"])})]


def step_seconds(cluster: Cluster, one: Stepped) -> float:
    """``one`` as it is predicted."""
    mapping = Mapping(ParallelConfig(dp=cluster.gpus, ep=one.ep), micro_batch=SEQUENCES, sharding="replicate")
    load = Load(LENGTH, "fp32", imbalance=one.imbalance)
    batch = SEQUENCES * MICRO_BATCHES * cluster.gpus
    return StepModel(shape_of(MODELS[one.model]), Place(mapping, cluster), load, batch).predict().seconds


def sustaining(cluster: Cluster, steps: Sequence[Stepped]) -> Cluster:
    """``cluster`` with what its accelerators' rates keep in ``steps``: at most all."""

    def made(share: float) -> Cluster:
        return replace(cluster, accelerator=replace(cluster.accelerator, sustained=min(share, 1.0)))

    (share,) = nearest(lambda tried: [math.log(step_seconds(made(tried), one) / one.seconds) for one in steps], (1.0,))
    return made(share)


def measure_steps() -> list[Stepped]:
    """One rank's part. Collective over all ranks of the default process group, which is made if there is none."""
    import torch

    from moe_comm.runtime.launch import init_ranks

    torch.set_num_threads(1)
    with init_ranks("cpu", TIMEOUT_S) as here, contextlib.ExitStack() as stack:
        return _taken([(*one, _trainer(*one, stack)) for one in runs(here.world)], here.world)


def _taken(trained: Sequence[tuple[int, int, Any]], world: int) -> list[Stepped]:
    """They take turns, a step each, so that what else the machine does hits all alike."""
    import torch
    import torch.distributed as dist

    def meet() -> None:
        if world > 1:
            dist.barrier()

    seconds: list[list[float]] = [[] for _ in trained]
    loads: list[list[Any]] = [[] for _ in trained]
    for step in range(WARM + STEPS):
        for place, (_, _, trainer) in enumerate(trained):
            meet()
            began = time.perf_counter()
            report = trainer.train_step(step)
            meet()
            seconds[place].append(time.perf_counter() - began)
            loads[place].append(report.load.slots)
    medians = torch.tensor([median(one[WARM:]) for one in seconds])
    if world > 1:
        dist.all_reduce(medians, dist.ReduceOp.MAX)
    return [
        Stepped(model, ep, took, fmean(imbalance(slots, ep) for slots in load[WARM:]))
        for (model, ep, _), took, load in zip(trained, medians.tolist(), loads, strict=True)
    ]


def _trainer(model: int, ep: int, stack: contextlib.ExitStack) -> Any:
    from moe_comm.topology import FoldedMesh
    from moe_comm.train import config as configuration
    from moe_comm.train.build import architecture_of, build
    from moe_comm.train.ranks import Ranks
    from moe_comm.train.trainer import Trainer

    ranks, sizes = Ranks.make(), MODELS[model]
    given = [f"model.{key}={value}" for key, value in sizes.items()]
    given += [f"parallel.ranks={ranks.world}", f"parallel.dp={ranks.world}", f"parallel.ep={ep}"]
    given += [f"data.seq_len={LENGTH}", f"data.batch={SEQUENCES * MICRO_BATCHES * ranks.world}"]
    given += [f"data.micro_batches={MICRO_BATCHES}", "model.family=qwen3_moe", "model.init_std=0.1"]
    # Weights start wide and hardly move, so that routers spread tokens over experts, and go on to.
    given += ["optimizer.warmup=0", "optimizer.lr=1e-6", "parallel.sharding=replicate"]
    config = configuration.load(None, given)
    mesh = FoldedMesh(config.parallel.mapping(ranks.world))
    machinery = build(config, architecture_of(config, sizes["vocab"]), mesh)
    for stage in machinery.stages:
        stack.callback(stage.close)  # type: ignore[arg-type]
    stack.callback(machinery.runner.close)
    return Trainer(config, machinery, _Feed(sizes["vocab"], ranks.world), ranks)


class _Feed:
    """Tokens by chance."""

    def __init__(self, vocab: int, dp: int) -> None:
        import torch

        self._vocab, self._dp = vocab, dp
        self._chance = torch.Generator().manual_seed(torch.initial_seed())

    def train(self, step: int) -> Any:
        import torch

        from moe_comm.train.pipeline.batch import MicroBatch
        from moe_comm.train.trainer import StepBatch

        shape = (MICRO_BATCHES, 2, SEQUENCES, LENGTH)
        every = torch.randint(0, self._vocab, shape, generator=self._chance)
        micro = [MicroBatch(ids_BS, targets_BS) for ids_BS, targets_BS in every]
        return StepBatch(micro, SEQUENCES * LENGTH * MICRO_BATCHES * self._dp)

    def validation(self, count: int) -> Any:
        return iter(())
