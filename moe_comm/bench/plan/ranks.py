"""The measured side of ``moe-comm bench plan``: steps of ``moe-comm train`` with one mapping after another.

Mappings on the same ranks are built side by side and take turns, a step each, so that what else the machine does hits
all alike. A step is ``Trainer.train_step``: with its batch, its agreement and its update.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.bench.common.clock import Clock, summarise, sync_group
from moe_comm.bench.hosts.namespaces import Hosts
from moe_comm.bench.hosts.ranks import run_on_hosts
from moe_comm.bench.plan.settings import Case, PlanBench
from moe_comm.runtime.launch import init_ranks, launch
from moe_comm.topology import ParallelMesh
from moe_comm.train import config as configuration
from moe_comm.train.loop.build import architecture_of, build
from moe_comm.train.loop.feed import CorpusFeed
from moe_comm.train.loop.job import open_corpus
from moe_comm.train.loop.trainer import Trainer
from moe_comm.train.metrics import StepReport
from moe_comm.train.ranks import Ranks

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Measured:
    """Of one mapping, over its ranks. seconds: the median of a step; fastest: the least.

    losses: of every step, warm-up too. loads: slots of the last step for each layer and expert; they are the same for
    any mapping. communication: mean of what the ranks' meters counted in a step, seconds, waits included. processor:
    mean of the processor seconds that a rank took for a step, which others on the machine hardly change.
    """

    seconds: float
    fastest: float
    losses: tuple[float, ...]
    loads: tuple[tuple[int, ...], ...]
    communication: float
    processor: float


def measure(bench: PlanBench, cases: Sequence[Case], folder: Path) -> list[Measured]:
    """Steps with ``cases``, all of which have as many ranks on as many hosts. folder: for prepared text.

    Raises:
        ConfigError: several hosts are wanted and cannot be made here.
        RankFailed: a rank raised or was killed.
    """
    (ranks, count), *others = {(case.ranks, case.hosts) for case in cases}
    assert not others
    arguments = (bench, tuple(cases), str(folder))
    if count == 1:
        return launch(_rank, arguments, ranks)[0]  # type: ignore[no-any-return]
    with Hosts(count, bench.link_gbit) as hosts:
        return run_on_hosts(_rank, arguments, hosts, ranks // count, TIMEOUT_S)[0]  # type: ignore[no-any-return]


class _Turn:
    """One mapping's trainer."""

    def __init__(self, bench: PlanBench, case: Case, folder: str, ranks: Ranks, stack: contextlib.ExitStack) -> None:
        config = configuration.load(None, [*bench.overrides(case), f"data.cache={folder}"])
        corpus = open_corpus(config, ranks)
        mesh = ParallelMesh(config.parallel.mapping(ranks.world))
        machinery = build(config, architecture_of(config, corpus.vocab_size), mesh)
        data = config.data
        feed = stack.enter_context(
            CorpusFeed(corpus, mesh, config.parallel.context, data.micro_batches, config.run.steps)
        )
        for stage in machinery.stages:
            stack.callback(stage.close)  # type: ignore[arg-type]
        stack.callback(machinery.runner.close)
        self.trainer = Trainer(config, machinery, feed, ranks)
        self.reports: list[StepReport] = []
        self.processor: list[float] = []

    def step(self, step: int) -> None:
        began = time.process_time()
        self.reports.append(self.trainer.train_step(step))
        self.processor.append(time.process_time() - began)


def _rank(bench: PlanBench, cases: tuple[Case, ...], folder: str) -> list[Measured]:
    """One rank's part. Collective."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with init_ranks("cpu", TIMEOUT_S), contextlib.ExitStack() as stack:
        ranks = Ranks.make()
        turns = [_Turn(bench, case, folder, ranks, stack) for case in cases]
        clock = Clock(sync_group)
        gc.disable()
        stack.callback(gc.enable)
        for step in range(bench.warmup + bench.steps):
            if step == bench.warmup:
                clock.clear()
            shift = step % len(turns)
            order = [*range(shift, len(turns)), *range(shift)]
            for index in order:
                gc.collect()
                clock.measure(str(index), ("step", partial(turns[index].step, step)))
        own = [
            (
                median(report.times.communication for report in turn.reports[bench.warmup :]),
                median(turn.processor[bench.warmup :]),
            )
            for turn in turns
        ]
        everyone: list[Any] = [None] * ranks.world
        dist.all_gather_object(everyone, (dict(clock.times), own))
        stats = summarise([times for times, _ in everyone])
        found = []
        for index, turn in enumerate(turns):
            one = stats[str(index), "step"]
            moving, processor = (fmean(spent[index][part] for _, spent in everyone) for part in (0, 1))
            found.append(
                Measured(
                    seconds=one["median_ms"] / 1e3,
                    fastest=one["min_ms"] / 1e3,
                    losses=tuple(report.loss for report in turn.reports),
                    loads=turn.reports[-1].load.slots,
                    communication=moving,
                    processor=processor,
                )
            )
        return found
