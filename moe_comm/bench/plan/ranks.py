"""Measure training steps of several mappings for ``moe-comm bench plan``.

Mappings on the same ranks are built in the same processes and are interleaved step by step, so that noise affects them
equally. A step is ``Trainer.train_step``, including reading the batch and the update.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median

import torch

from moe_comm.bench.common.clock import Clock, gather, summarize
from moe_comm.bench.common.interleave import run_rounds
from moe_comm.bench.common.ranks import launch_ranks
from moe_comm.bench.plan.settings import PlanBench, PlanCase
from moe_comm.runtime.launch import init_ranks
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
class MeasuredStep:
    """Measured steps of one mapping.

    Attributes:
        seconds, fastest: median and minimum of a step.
        losses: losses of all steps, including warm-up.
        loads: slots of each layer and expert in the last step, which are the same for all mappings.
        communication: mean seconds of communication per rank and step, including waits.
        processor: mean CPU seconds per rank and step.
    """

    seconds: float
    fastest: float
    losses: tuple[float, ...]
    loads: tuple[tuple[int, ...], ...]
    communication: float
    processor: float


def measure(bench: PlanBench, cases: Sequence[PlanCase], folder: Path) -> list[MeasuredStep]:
    """Measure steps of ``cases``, which must have the same numbers of ranks and hosts.

    Args:
        bench: settings.
        cases: mappings to measure.
        folder: cache folder of the prepared text.

    Raises:
        ConfigError: the hosts cannot be created.
        RankFailed: a rank raised an exception or was killed.
    """
    ((ranks, count),) = {(case.ranks, case.hosts) for case in cases}
    arguments = (bench, tuple(cases), str(folder))
    by_rank = launch_ranks(_rank, arguments, ranks, count, bench.link_gbit, TIMEOUT_S, ("torch", __name__))
    return by_rank[0]  # type: ignore[no-any-return]


class _MappingRun:
    """The trainer of one mapping."""

    def __init__(
        self, bench: PlanBench, case: PlanCase, folder: str, ranks: Ranks, stack: contextlib.ExitStack
    ) -> None:
        config = configuration.load(None, [*bench.overrides(case), f"data.cache={folder}"])
        corpus = open_corpus(config, ranks)
        mesh = ParallelMesh(config.parallel.mapping(ranks.world))
        train_state = build(config, architecture_of(config, corpus.vocab_size), mesh)
        data = config.data
        feed = stack.enter_context(
            CorpusFeed(corpus, mesh, config.parallel.context, data.micro_batches, config.run.steps)
        )
        for stage in train_state.stages:
            stack.callback(stage.close)  # type: ignore[arg-type]
        stack.callback(train_state.runner.close)
        self.trainer = Trainer(config, train_state, feed, ranks)
        self.reports: list[StepReport] = []
        self.processor: list[float] = []

    def step(self, step: int) -> None:
        start = time.process_time()
        self.reports.append(self.trainer.train_step(step))
        self.processor.append(time.process_time() - start)


def _rank(bench: PlanBench, cases: tuple[PlanCase, ...], folder: str) -> list[MeasuredStep]:
    """Measure on this rank. Collective."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with init_ranks("cpu", TIMEOUT_S), contextlib.ExitStack() as stack:
        ranks = Ranks.make()
        mapping_runs = [_MappingRun(bench, case, folder, ranks, stack) for case in cases]
        clock = Clock()

        def measure_step(mapping_run: _MappingRun, step: int) -> None:
            clock.measure(str(mapping_runs.index(mapping_run)), ("step", partial(mapping_run.step, step)))

        run_rounds(mapping_runs, measure_step, clock, bench.warmup, bench.steps)
        medians = [
            (
                median(report.times.communication for report in mapping_run.reports[bench.warmup :]),
                median(mapping_run.processor[bench.warmup :]),
            )
            for mapping_run in mapping_runs
        ]
        by_rank = gather((dict(clock.times), medians))
        stats = summarize([times for times, _ in by_rank])
        measured = []
        for index, mapping_run in enumerate(mapping_runs):
            one = stats[str(index), "step"]
            communication, processor = (fmean(by_mapping[index][part] for _, by_mapping in by_rank) for part in (0, 1))
            measured.append(
                MeasuredStep(
                    seconds=one["median_ms"] / 1e3,
                    fastest=one["min_ms"] / 1e3,
                    losses=tuple(report.loss for report in mapping_run.reports),
                    loads=mapping_run.reports[-1].load.slots,
                    communication=communication,
                    processor=processor,
                )
            )
        return measured
