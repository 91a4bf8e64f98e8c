"""``moe-comm bench plan``: predicted steps against measured ones, and the planner's mapping against the fastest one.

For each number of ranks, this machine is calibrated and training steps are measured with every mapping. Each step is
predicted from the calibration, the model and the measured load of the experts. The load is taken from the first
mapping, because it does not depend on the mapping.

The regret is the relative difference of measured times between the mapping with the shortest predicted step and the
fastest mapping.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from rich.table import Table

from moe_comm.bench.calibrate.fit import shape_of
from moe_comm.bench.calibrate.machine import calibrate
from moe_comm.bench.calibrate.steps import imbalance
from moe_comm.bench.common import report
from moe_comm.bench.common.clock import Clock, gather, summarize
from moe_comm.bench.common.interleave import run_rounds
from moe_comm.bench.common.ranks import launch_ranks, run_benchmark, say
from moe_comm.bench.common.report import NOISY
from moe_comm.bench.hosts.namespaces import unavailable_reason
from moe_comm.bench.parity.training import session
from moe_comm.bench.plan.settings import MODEL_KEYS, PlanBench, PlanCase
from moe_comm.runtime.launch import init_ranks
from moe_comm.train import config as configuration
from moe_comm.train.loop.trainer import Trainer
from moe_comm.train.metrics import StepReport
from moe_plan.machine.hardware import Cluster
from moe_plan.machine.hardware_file import to_json
from moe_plan.model.load import Workload
from moe_plan.model.mapping import PlacedMapping
from moe_plan.step.step import StepModel, StepPrediction

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
        folder: cache folder of the prepared text.
    """
    ((ranks, count),) = {(case.ranks, case.hosts) for case in cases}
    arguments = (bench, tuple(cases), str(folder))
    by_rank = launch_ranks(_rank, arguments, ranks, count, bench.link_gbit, TIMEOUT_S, ("torch", __name__))
    return by_rank[0]  # type: ignore[no-any-return]


class _MappingRun:
    """The trainer of one mapping."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
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
        configs = [configuration.load(None, [*bench.overrides(case), f"data.cache={folder}"]) for case in cases]
        mapping_runs = [_MappingRun(stack.enter_context(session(config)).trainer) for config in configs]
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
            step_stats = stats[str(index), "step"]
            communication, processor = (fmean(by_mapping[index][part] for _, by_mapping in by_rank) for part in (0, 1))
            measured.append(
                MeasuredStep(
                    seconds=step_stats["median_ms"] / 1e3,
                    fastest=step_stats["min_ms"] / 1e3,
                    losses=tuple(report.loss for report in mapping_run.reports),
                    loads=mapping_run.reports[-1].load.slots,
                    communication=communication,
                    processor=processor,
                )
            )
        return measured


TOLERATED = 0.15
"""Target of the prediction error."""


def predict(bench: PlanBench, case: PlanCase, cluster: Cluster, slots_LE: Sequence[Sequence[int]]) -> StepPrediction:
    """Predict a step of ``case``."""
    mapping = case.parsed()
    shape = replace(shape_of({key: getattr(bench, key) for key in MODEL_KEYS}), name="bench")
    load = Workload(bench.seq_len, "fp32", imbalance=imbalance(slots_LE, mapping.parallel.ep))
    return StepModel(shape, PlacedMapping(mapping, cluster), load, bench.batch).predict()


def run(bench: PlanBench) -> dict[str, Any]:
    """Calibrate, measure and predict. Return the JSON object of ``moe-comm bench plan``."""
    reason = unavailable_reason() if any(case.hosts > 1 for case in bench.cases) else ""
    skipped = {f"{case} on {case.hosts} hosts": reason for case in bench.cases if reason and case.hosts > 1}
    groups: dict[tuple[int, int], list[PlanCase]] = {}
    for case in bench.cases:
        if not (reason and case.hosts > 1):
            groups.setdefault((case.ranks, case.hosts), []).append(case)
    results: list[dict[str, Any]] = []
    calibrations: dict[int, Cluster] = {}
    with tempfile.TemporaryDirectory(prefix="moe_comm-plan-") as folder:
        for (ranks, hosts), cases in groups.items():
            where = f"{ranks} ranks" + (f" on {hosts} hosts" if hosts > 1 else "")
            say(f"{where}: calibrating")
            cluster = calibrate(
                ranks, hosts=hosts, link_gbit=bench.link_gbit, host=calibrations.get(ranks) if hosts > 1 else None
            )
            calibrations[ranks] = cluster
            say(f"{where}: {len(cases)} mappings")
            results.append(_group(bench, cases, cluster, measure(bench, cases, Path(folder))))
    rows = [row for group in results for row in group["mappings"]]
    errors = [abs(row["error"]) for row in rows]
    return {
        "benchmark": "plan",
        "groups": results,
        "median_error": median(errors),
        "worst_error": max(errors),
        "within": sum(error <= TOLERATED for error in errors),
        "mappings": len(rows),
        "worst_regret": max(group["regret"] for group in results),
        "skipped": skipped,
        "settings": bench.to_dict(),
        "command": shlex.join(sys.argv),
    }


def _group(
    bench: PlanBench, cases: Sequence[PlanCase], cluster: Cluster, measured: Sequence[MeasuredStep]
) -> dict[str, Any]:
    """Return the result of the mappings on the same ranks, fastest first, with the planner's pick and its regret."""
    slots = measured[0].loads
    rows = [
        _row(bench, case, measured_step, predict(bench, case, cluster, slots))
        for case, measured_step in zip(cases, measured, strict=True)
    ]
    rows.sort(key=lambda row: row["step_ms"])
    pick = min(rows, key=lambda row: row["predicted_ms"])
    return {
        "ranks": cases[0].ranks,
        "hosts": cases[0].hosts,
        "mappings": rows,
        "best": rows[0]["mapping"],
        "pick": pick["mapping"],
        "regret": pick["step_ms"] / rows[0]["step_ms"] - 1,
        "hardware": to_json(cluster),
    }


def _row(bench: PlanBench, case: PlanCase, measured_step: MeasuredStep, step: StepPrediction) -> dict[str, Any]:
    return {
        "mapping": str(case),
        "case": asdict(case),
        "imbalance": imbalance(measured_step.loads, case.parsed().parallel.ep),
        "step_ms": measured_step.seconds * 1e3,
        "step_min_ms": measured_step.fastest * 1e3,
        "processor_ms": measured_step.processor * 1e3,
        "communication_ms": measured_step.communication * 1e3,
        "predicted_ms": step.seconds * 1e3,
        "error": step.seconds / measured_step.seconds - 1,
        "tokens_per_s": bench.tokens / measured_step.seconds,
        "breakdown_ms": {name: seconds * 1e3 for name, seconds in step.breakdown.items()},
    }


COLUMNS: tuple[report.Column, ...] = (
    ("mapping", "mapping"),
    ("measured, ms", lambda row: f"{row['step_ms']:,.0f}"),
    ("minimum", lambda row: f"{row['step_min_ms']:,.0f}{' noisy' * (row['step_ms'] > NOISY * row['step_min_ms'])}"),
    ("predicted, ms", lambda row: f"{row['predicted_ms']:,.0f}"),
    ("prediction error", lambda row: f"{row['error']:+.1%}"),
)


def tables(result: dict[str, Any]) -> list[Table]:
    """Return a table for each number of ranks and hosts."""
    s, m = result["settings"], result["machine"]
    title = (
        f"; {s['layers']} layers, D {s['hidden']}, F {s['ffn']}, E {s['experts']}, K {s['top_k']}, "
        f"{s['batch']} sequences of {s['seq_len']}, fp32; {m['cpu']}, {m['cores']} cores"
    )
    all_tables: list[Table] = []
    for group in result["groups"]:
        hosts = f", {group['hosts']} hosts at {s['link_gbit']:g} Gbit/s" if group["hosts"] > 1 else ""
        heading = f"{group['ranks']} ranks{hosts}" + ("" if all_tables else title)
        caption = f"the planner selects {group['pick']}: its step is {group['regret']:.1%} longer than the fastest"
        all_tables.append(report.make_table(heading, COLUMNS, group["mappings"], caption))
    all_tables[-1].caption = (
        f"{all_tables[-1].caption}\nerrors: median {result['median_error']:.1%}, maximum {result['worst_error']:.1%}, "
        f"{result['within']} of {result['mappings']} within {TOLERATED:.0%}; max. regret {result['worst_regret']:.1%}"
    )
    return all_tables


def main(bench: PlanBench, json_out: str | None = None) -> dict[str, Any]:
    """Run ``moe-comm bench plan``, see ``run_benchmark``."""
    return run_benchmark(lambda: run(bench), tables, json_out)
