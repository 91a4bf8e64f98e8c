"""Whole training steps of a calibration, and what rates and meetings are within them.

Products, passes and transfers are measured one kind after the other, each in a loop of its own that finds its caches
warm and the cores where it left them. In a step they take turns, memory comes fresh, and where ranks share cores every
meeting waits until the last of them has had one. Small models are trained for a few steps, by the trainer itself:

    mapping                  ranks meet                    says
    dp                       once a step                   what rates keep: ``Accelerator.sustained``
    dp, ep and tp, dp, ep    four, ten times a layer       what a collective takes to begin: ``Cluster.start_s``

Both are those with which predictions come nearest to all of them.
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

from moe_comm.bench.calibrate.fit import LEAST_S, nearest, shape_of
from moe_comm.bench.calibrate.ranks import MODELS, TIMEOUT_S
from moe_comm.plan.machine.hardware import Cluster
from moe_comm.plan.model.load import Load
from moe_comm.plan.model.mapping import Mapping, Place
from moe_comm.plan.step.step import StepModel
from moe_comm.runtime.launch import init_ranks
from moe_comm.topology import ParallelMesh
from moe_comm.train import config as configuration
from moe_comm.train.loop.build import architecture_of, build
from moe_comm.train.loop.trainer import StepBatch, Trainer
from moe_comm.train.pipeline.batch import MicroBatch
from moe_comm.train.ranks import Ranks

SEQUENCES, LENGTH, MICRO_BATCHES = 1, 256, 2
"""Of a micro-batch: sequences and their tokens; and micro-batches of a step."""
WARM, STEPS = 1, 5
"""Steps that are thrown away, and steps whose median counts."""


@dataclass(frozen=True)
class Stepped:
    """A step of ``MODELS[model]``. mapping: as ``Mapping.parse`` takes it. imbalance: rows of the busiest rank over the
    mean. seconds: by the clock, until the last rank has done it."""

    model: int
    mapping: str
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


def runs(ranks: int) -> list[tuple[int, str]]:
    """(model, mapping) of what is trained."""
    found = []
    for model, sizes in enumerate(MODELS):
        ep = math.gcd(ranks, sizes["experts"])
        found += [(model, f"dp={ranks},ep={ep}") for ep in sorted({1, ep})]
        if ranks % 2 == 0 and sizes["heads"] % 2 == 0:
            found.append((model, f"tp=2,dp={ranks // 2},ep={ep}"))
    return found


def step_seconds(cluster: Cluster, one: Stepped) -> float:
    """``one`` as it is predicted."""
    mapping = Mapping.parse(one.mapping, cluster.gpus, micro_batch=SEQUENCES, sharding="replicate")
    load = Load(LENGTH, "fp32", imbalance=one.imbalance)
    batch = SEQUENCES * MICRO_BATCHES * mapping.parallel.dp
    return StepModel(shape_of(MODELS[one.model]), Place(mapping, cluster), load, batch).predict().seconds


def within_steps(cluster: Cluster, steps: Sequence[Stepped]) -> Cluster:
    """``cluster`` with what its rates keep in ``steps``, at most all, and what collectives take to begin there, at
    least what they do by themselves."""

    def made(share: float, more: float) -> Cluster:
        accelerator = replace(cluster.accelerator, sustained=min(share, 1.0))
        return replace(cluster, accelerator=accelerator, start_s=cluster.start_s + more)

    def errors(share: float, more: float) -> list[float]:
        return [math.log(step_seconds(made(share, more), one) / one.seconds) for one in steps]

    # Squares: absolute values make ridges of two numbers that both lengthen all, on which the search stands still.
    return made(*nearest(errors, (1.0, max(cluster.start_s, LEAST_S) if cluster.gpus > 1 else LEAST_S), power=2))


def measure_steps() -> list[Stepped]:
    """One rank's part. Collective over all ranks of the default process group, which is made if there is none."""
    torch.set_num_threads(1)
    with init_ranks("cpu", TIMEOUT_S) as here, contextlib.ExitStack() as stack:
        return _taken([(*one, _trainer(*one, stack)) for one in runs(here.world)])


def _taken(trained: Sequence[tuple[int, str, Any]]) -> list[Stepped]:
    """They take turns, a step each, so that what else the machine does hits all alike."""
    world = dist.get_world_size() if dist.is_initialized() else 1

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
    found = []
    for (model, mapping, _), took, load in zip(trained, medians.tolist(), loads, strict=True):
        ep = Mapping.parse(mapping, world).parallel.ep
        found.append(Stepped(model, mapping, took, fmean(imbalance(slots, ep) for slots in load[WARM:])))
    return found


def _trainer(model: int, mapping: str, stack: contextlib.ExitStack) -> Any:
    ranks, sizes = Ranks.make(), MODELS[model]
    parallel = Mapping.parse(mapping, ranks.world).parallel
    given = [f"model.{key}={value}" for key, value in sizes.items()]
    given += [
        f"parallel.ranks={ranks.world}",
        *(f"parallel.{axis}={parallel.sizes[axis]}" for axis in ("tp", "dp", "ep")),
    ]
    given += [f"data.seq_len={LENGTH}", f"data.batch={SEQUENCES * MICRO_BATCHES * parallel.dp}"]
    given += [f"data.micro_batches={MICRO_BATCHES}", "model.family=qwen3_moe", "model.init_std=0.1"]
    # Weights start wide and hardly move, so that routers spread tokens over experts, and go on to.
    given += ["optimizer.warmup=0", "optimizer.lr=1e-6", "parallel.sharding=replicate"]
    config = configuration.load(None, given)
    mesh = ParallelMesh(config.parallel.mapping(ranks.world))
    machinery = build(config, architecture_of(config, sizes["vocab"]), mesh)
    for stage in machinery.stages:
        stack.callback(stage.close)  # type: ignore[arg-type]
    stack.callback(machinery.runner.close)
    return Trainer(config, machinery, _Feed(sizes["vocab"], mesh), ranks)


class _Feed:
    """Tokens by chance, the same for ranks that work on the same ones."""

    def __init__(self, vocab: int, mesh: ParallelMesh) -> None:
        self._vocab, self._dp = vocab, mesh.size("dp")
        self._chance = torch.Generator().manual_seed(mesh.place["dp"])

    def train(self, step: int) -> Any:
        shape = (MICRO_BATCHES, 2, SEQUENCES, LENGTH)
        every = torch.randint(0, self._vocab, shape, generator=self._chance)
        micro = [MicroBatch(ids_BS, targets_BS) for ids_BS, targets_BS in every]
        return StepBatch(micro, SEQUENCES * LENGTH * MICRO_BATCHES * self._dp)

    def validation(self, count: int) -> Any:
        return iter(())
