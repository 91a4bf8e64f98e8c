"""``moe-comm bench train``: training steps against the training loops of other libraries on the same ranks.

All contestants start from the same weights and use the same batches. They are built in the same processes and are
interleaved step by step, so that noise affects them equally. Their losses are compared after each step. With several
hosts (``bench.hosts``), the ranks are distributed over them, and the bytes on the links are counted in each step.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from rich.table import Table

from moe_comm.bench.calibrate.machine import calibrate
from moe_comm.bench.common import report
from moe_comm.bench.common.clock import Clock, Stats, gather, summarize, times_of
from moe_comm.bench.common.inputs import WrongAnswer
from moe_comm.bench.common.interleave import run_rounds
from moe_comm.bench.common.ranks import (
    SingleRankMesh,
    cores_of_group,
    on_hosts,
    on_ranks,
    pinned_to,
    run_benchmark,
    say,
)
from moe_comm.bench.hosts.namespaces import interface_bytes
from moe_comm.bench.train.contestant import (
    ContestantInputs,
    MoeCommTraining,
    OneProcessTraining,
    TrainContestant,
    predicted_ms,
    write_trace,
)
from moe_comm.bench.train.peers import PEERS
from moe_comm.bench.train.settings import LR, OWN, RIVALS, TrainBench
from moe_comm.errors import ConfigError
from moe_comm.integrations.hugging_face.architecture import to_hugging_face
from moe_comm.integrations.hugging_face.weights import write_folder
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.observe.perfetto import check_package
from moe_comm.observe.records import SpanLine
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.gemm import gemm_flops
from moe_comm.train.auto.choose import resolve_parallel
from moe_comm.train.loop.build import architecture_of, build_stages
from moe_comm.train.loop.job import open_corpus
from moe_comm.train.loop.trainer import trial_seconds
from moe_comm.train.metrics import StepTimes
from moe_comm.train.ranks import Ranks
from moe_plan.machine.hardware import Cluster

FIRST_STEP, LATER_STEPS = 1e-3, 1e-2
"""Largest allowed relative difference of a loss from that of this library: in the first step, and in later steps."""
PREFIX = "moe_comm-bench-"
PARTS = ("compute", "communication", "data", "checkpoint", "loop")


def kind_of(name: str) -> type[TrainContestant]:
    """Return the class of a contestant. Names that are not peers are configurations of this library."""
    return OneProcessTraining if name == OneProcessTraining.name else PEERS.get(name, MoeCommTraining)


def select_contestants(bench: TrainBench) -> tuple[list[str], dict[str, str]]:
    """Return the names of the contestants that can run, and the reasons why the others cannot."""
    reasons: dict[str, str | None] = {}
    for name in (*bench.own_names, *bench.peers):
        kind = kind_of(name)
        one_host = kind.single_process and bench.hosts > 1
        reasons[name] = "runs in one process, on one host" if one_host else kind.unavailable_reason(bench)
    return (
        [name for name, reason in reasons.items() if reason is None],
        {name: reason for name, reason in reasons.items() if reason is not None},
    )


class _ContestantRun:
    """One training loop of the comparison. ``contestant`` is None on ranks that do not run it.

    Attributes:
        traffic: for each round, the bytes per step that the interface of this host sent and received. Empty with one
            host.
        spans: spans of the last step if it was traced.
    """

    def __init__(self, name: str, inputs: ContestantInputs, cores: set[int]) -> None:
        self.name, self.kind, self.inputs, self.cores = name, kind_of(name), inputs, cores
        self.losses: list[float] = []
        self.traffic: list[tuple[int, int]] = []
        self.spans: list[SpanLine] = []
        self.contestant: TrainContestant | None = None
        with self._affinity():
            if inputs.ranks.is_first or not self.kind.single_process:
                self.contestant = self.kind(inputs)

    def _affinity(self) -> contextlib.AbstractContextManager[None]:
        """Give all cores to a contestant in a single process."""
        if self.kind.single_process and self.inputs.ranks.is_first:
            return pinned_to(self.cores)
        return contextlib.nullcontext()

    def run_round(self, clock: Clock, number: int, traced: bool = False) -> None:
        """Time a step, and record its loss, its traffic and, if ``traced``, its spans. Collective.

        See ``TrainBench.steps_per_round``.
        """
        contestant, loss = self.contestant, 0.0
        each = self.inputs.bench.steps_per_round
        *lead, step = range(number * each, (number + 1) * each)
        before = interface_bytes() if self.inputs.bench.hosts > 1 else None
        with self._affinity():
            if contestant is None:
                clock.measure(self.name, ("step", lambda: None))
            else:
                phases = [("lead", partial(contestant.step, earlier)) for earlier in lead]
                if lead:
                    phases.append(("prepare", partial(contestant.prepare, step)))
                contestant.prepare(number * each)
                clock.measure(self.name, *phases, ("step", partial(contestant.step, step)))
                loss = contestant.loss()
        if traced and isinstance(contestant, MoeCommTraining):
            self.spans = contestant.spans(f"step of {self.name}")
        if contestant is not None:
            contestant.finish()
        self.losses.append(float(self.inputs.ranks.sum(torch.tensor([loss], dtype=torch.float64, device="cpu"))))
        if before is not None:  # the sum above has waited for all ranks
            after = interface_bytes()
            self.traffic.append(((after.sent - before.sent) // each, (after.received - before.received) // each))

    def measure_compute(self, clock: Clock, steps: int) -> None:
        """Time steps without communication, after the last step, if the contestant can leave it out. Collective."""
        contestant = self.contestant
        without_communication = None if contestant is None else contestant.without_communication()
        if contestant is None or without_communication is None:
            return
        with without_communication:
            for _ in range(1 + steps):
                gc.collect()
                clock.measure(self.name, ("compute", partial(contestant.step, 0)))
        del clock.times[self.name, "compute"][0]

    def close(self) -> None:
        if self.contestant is not None:
            self.contestant.close()


def run(
    bench: TrainBench,
    threads: int = 1,
    *,
    folder: str | None = None,
    trace: str | None = None,
    cluster: Cluster | None = None,
) -> dict[str, Any]:
    """Run the benchmark on this rank and return the result, the same on every rank. Collective over the default group.

    Args:
        bench: settings of the benchmark.
        threads: number of threads of this rank.
        folder: folder for the weights and the text, which all ranks can read. None: rank 0 creates a temporary one.
        trace: file for a Perfetto trace of the last step of each configuration of this library.
        cluster: description of this machine with these ranks, for predictions. None: no predictions.
    """
    names, skipped = select_contestants(bench)
    ranks = Ranks.make()
    with contextlib.ExitStack() as stack:
        inputs = _make_inputs(bench, ranks, folder, stack)
        cores = cores_of_group()
        contestant_runs: list[_ContestantRun] = []
        for name in names:
            say(f"building {name}")
            contestant_runs.append(_ContestantRun(name, _with_config(inputs, name), cores))
            stack.callback(contestant_runs[-1].close)
            ranks.barrier()
        clock = Clock()
        # Tests use small shapes; a large GEMM would only make them slower.
        flops = ModelShape.of(inputs.architecture).model_flops(bench.seq_len)
        size = None if flops * bench.tokens > 1e9 else 64
        rates: list[float] = []
        last = bench.warmup + bench.steps - 1

        def before(number: int) -> None:
            say(f"round {number + 1} of {bench.warmup} (discarded) + {bench.steps}: a step of each")

        def measure(contestant_run: _ContestantRun, number: int) -> None:
            contestant_run.run_round(clock, number, traced=trace is not None and number == last)

        def after(number: int) -> None:
            ranks.barrier()
            rates.append(gemm_flops(size=size))
            _check(contestant_runs)

        run_rounds(contestant_runs, measure, clock, bench.warmup, bench.steps, before=before, after=after)
        if bench.hosts > 1:
            say("measuring steps without communication")
        for contestant_run in contestant_runs:
            if bench.hosts > 1:
                contestant_run.measure_compute(clock, bench.steps)
        trainings = {run.name: run.contestant for run in contestant_runs if isinstance(run.contestant, MoeCommTraining)}
        trainings.pop(OneProcessTraining.name, None)
        each = bench.steps_per_round
        breakdowns = {
            name: _breakdown([step_report.times for step_report in training.reports[each - 1 :: each][bench.warmup :]])
            for name, training in trainings.items()
        }
        traffic = {run.name: run.traffic[bench.warmup :] for run in contestant_runs}
        spans = [run.spans for run in contestant_runs if run.name in trainings]
        by_rank = gather((dict(clock.times), median(rates[bench.warmup :]), breakdowns, traffic, spans))
    if trace is not None and ranks.is_first:
        write_trace(list(zip(*(spans for *_, spans in by_rank), strict=True)), bench.ranks_per_host, trace)
    stats = summarize([times for times, *_ in by_rank])
    peak = sum(rate for _, rate, *_ in by_rank)
    rows = {name: _row(bench, stats[name, "step"], flops, peak) for name in names}
    for name, training in trainings.items():
        rows[name]["step"] = _mean([breakdowns[name] for _, _, breakdowns, *_ in by_rank])
        if bench.hosts > 1 or bench.variants or cluster is not None:
            rows[name] |= {"mapping": training.degrees, "backend": training.backend}
        if training.config.placement.kind != "fixed":
            rows[name]["placement"] = training.placement
        if cluster is not None:
            rows[name]["predicted_ms"] = predicted_ms(inputs, training, cluster)
    if bench.hosts > 1:
        first_ranks = by_rank[:: bench.ranks_per_host]
        for name in names:
            rows[name] |= _exposed(rows[name], stats.get((name, "compute")))
            rows[name]["bytes_per_link"] = _bytes_per_link([traffic[name] for *_, traffic, _ in first_ranks])
    for contestant_run in contestant_runs[1:]:
        row = rows[contestant_run.name]
        row["speedup"] = row["step_ms"] / rows[OWN]["step_ms"]
        row["loss_rel_diff"] = _difference(contestant_run, contestant_runs[0])
        if contestant_run.kind.note:
            row["note"] = contestant_run.kind.note
    own_row = rows.pop(OWN)
    variants = {variant.name: rows.pop(variant.name) for variant in bench.variants}
    speedups = {name: row["speedup"] for name, row in rows.items()}
    best = min((name for name in rows if name in RIVALS), key=speedups.__getitem__, default=None)
    return {
        "benchmark": "train",
        **own_row,
        "speedup": None if best is None else speedups[best],
        "best_peer": best,
        "speedup_over_all": min(speedups.values(), default=None),
        **({"variants": variants} if variants else {}),
        "peers": rows,
        "losses": contestant_runs[0].losses,
        "flops_per_token": flops,
        "gemm_gflops": peak * 1e-9,
        "skipped": skipped,
        "settings": bench.to_dict() | {"lr": LR},
        "threads_per_rank": threads,
    }


def _make_inputs(bench: TrainBench, ranks: Ranks, folder: str | None, stack: contextlib.ExitStack) -> ContestantInputs:
    """Return the inputs of the peers. The first rank writes a folder with the initial weights."""
    if folder is None:
        created = stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)) if ranks.is_first else ""
        folder = ranks.broadcast_text(created)
    config = bench.config()
    config = config.model_copy(update={"data": config.data.model_copy(update={"cache": folder})})
    corpus = open_corpus(config, ranks)
    architecture = architecture_of(config, corpus.vocab_size)
    inputs = ContestantInputs(bench, config, architecture, corpus, ranks, Path(folder) / "weights")
    if ranks.is_first:
        (model,) = build_stages(config, architecture, SingleRankMesh())
        initialize(model, bench.seed)
        hf_config = to_hugging_face(architecture, "qwen3_moe")
        hf_config.dtype = "float32"
        write_folder(inputs.weights, architecture, "qwen3_moe", hf_config, model.state_dict().items())
        model.close()
    ranks.barrier()
    return inputs


def _with_config(inputs: ContestantInputs, name: str) -> ContestantInputs:
    """Return the inputs of the contestant ``name``. Collective if the planner chooses its parallel settings."""
    if name not in inputs.bench.own_names:
        return inputs
    config, ranks = inputs.bench.config(name), inputs.ranks
    if config.parallel.auto:
        architecture, corpus = inputs.architecture, inputs.corpus
        trial = partial(trial_seconds, architecture=architecture, corpus=corpus, ranks=ranks, device="cpu")
        config, text = resolve_parallel(config, ModelShape.of(architecture), ranks, "cpu", lambda: None, trial)
        if ranks.is_first:
            print(f"{name}: {text}", file=sys.stderr, flush=True)
    return replace(inputs, config=config)


def _exposed(row: dict[str, Any], compute: Stats | None) -> dict[str, float]:
    """Return the exposed communication of a contestant if it was measured.

    It is the communication time of this library's training loop, or the difference from steps without communication.
    """
    if "step" in row:
        return {"exposed_communication_ms": row["step"]["seconds"]["communication"] * 1e3}
    if compute is None:
        return {}
    return {
        "exposed_communication_ms": row["step_ms"] - compute["median_ms"],
        "compute_ms": compute["median_ms"],
    }


def _bytes_per_link(hosts: list[list[tuple[int, int]]]) -> dict[str, list[float]]:
    """Return the median bytes of a step on the link of each host. ``hosts``: sent and received bytes by step."""
    sent, received = ([median(step[way] for step in steps) for steps in hosts] for way in (0, 1))
    return {"sent": sent, "received": received}


def _check(contestant_runs: list[_ContestantRun]) -> None:
    """Compare the losses of the last step with those of this library."""
    first = len(contestant_runs[0].losses) == 1
    allowed = FIRST_STEP if first else LATER_STEPS
    for contestant_run in contestant_runs[1:]:
        loss, expected = contestant_run.losses[-1], contestant_runs[0].losses[-1]
        if not abs(loss - expected) <= allowed * abs(expected):
            raise WrongAnswer(
                f"{contestant_run.name}: the loss of step {len(contestant_run.losses)} is {loss:.6g}, but that of "
                f"moe_comm is {expected:.6g} (allowed relative difference: {allowed:g}). "
                "Please report this with the settings."
            )


def _difference(contestant_run: _ContestantRun, reference: _ContestantRun) -> float:
    """Return the largest relative difference of the losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(contestant_run.losses, reference.losses, strict=True))


def _row(bench: TrainBench, stats: dict[str, float], flops: float, peak: float) -> dict[str, Any]:
    tokens_per_s = bench.tokens / stats["median_ms"] * 1e3
    return {
        "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s * flops / peak,
        **times_of(stats, "step"),
    }


def _breakdown(times: list[StepTimes]) -> dict[str, Any]:
    """Return the breakdown of a step: median fractions and median seconds."""
    seconds: dict[str, float] = {part: median(getattr(t, part) for t in times) for part in PARTS}
    fractions: dict[str, Any] = {part: median(getattr(t, part) / t.total for t in times) for part in PARTS}
    return fractions | {"seconds": seconds | {"total": median(t.total for t in times)}}


def _mean(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of the breakdowns of all ranks."""
    mean: dict[str, Any] = {part: fmean(breakdown[part] for breakdown in ranks) for part in PARTS}
    mean["seconds"] = {part: fmean(breakdown["seconds"][part] for breakdown in ranks) for part in (*PARTS, "total")}
    return mean


def main(
    bench: TrainBench, json_out: str | None = None, trace: str | None = None, *, predict: bool = False
) -> dict[str, Any]:
    """Run ``moe-comm bench train``, see ``run_benchmark``.

    Args:
        trace: file for a Perfetto trace of one step of each configuration of this library.
        predict: calibrate this machine first, and predict the step of each configuration of this library.
    """

    def measure() -> dict[str, Any] | None:
        if predict:
            say("calibrating this machine")
        cluster = calibrate(bench.ranks, hosts=bench.hosts, link_gbit=bench.link_gbit) if predict else None
        work = partial(run, trace=trace, cluster=cluster)
        return on_ranks(work, bench, bench.ranks, "cpu") if bench.hosts == 1 else _on_hosts(work, bench)

    report.check_writable(trace)
    if trace is not None:
        check_package("bench")
        if not EVENTS.enabled:
            raise ConfigError("no spans are recorded, because the native core is not built; run: pip install -e .")
    return run_benchmark(measure, tables, json_out)


def _on_hosts(work: partial[dict[str, Any]], bench: TrainBench) -> dict[str, Any]:
    """Run ``work`` on ranks in network namespaces."""
    # The launcher removes the folder, because ranks are killed when another one fails.
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        in_folder = partial(work, folder=folder)
        result, links = on_hosts(in_folder, bench, bench.hosts, bench.ranks_per_host, bench.link_gbit)
    settings = {"hosts": bench.hosts, "ranks_per_host": bench.ranks_per_host, "link_gbit": bench.link_gbit}
    return result | settings | {"link_gbit_measured": links}


COLUMNS: tuple[report.Column, ...] = (
    ("", "name"),
    ("tokens/s", "tokens_per_s"),
    *report.timed("step ms", "step"),
    ("MFU", lambda row: f"{row['mfu']:.0%}"),
    ("than moe_comm", lambda row: report.faster_or_slower(row["speedup"])),
    ("loss differs by", lambda row: f"{row['loss_rel_diff']:.0e}" if "loss_rel_diff" in row else ""),
)
HOSTS_COLUMNS: tuple[report.Column, ...] = (
    ("exposed ms", "exposed_communication_ms"),
    ("sent MB", lambda row: f"{max(row['bytes_per_link']['sent']) / 1e6:.1f}"),
)


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the table: throughput of each loop, and the breakdown of this library's step.

    With several hosts, also the exposed communication and the bytes that a host sends.
    """
    s, m = result["settings"], result["machine"]
    heading = (
        f"{s['ranks']} ranks, {s['batch']} x {s['seq_len']} tokens per rank, {s['layers']} layers, D {s['hidden']}, "
        f"F {s['ffn']}, E {s['experts']}, K {s['top_k']}, {s['dtype']}; {m['cpu']}, {m['cores']} cores, {m['isa']}"
    )
    variants = result.get("variants", {})
    rows = {OWN: result | {"speedup": None}, **variants, **result["peers"]}
    breakdowns = [
        f"step of {name}: " + ", ".join(f"{part} {rows[name]['step'][part]:.1%}" for part in PARTS)
        for name in (OWN, *variants)
    ]
    gemm = f"torch.mm on all ranks at once: {result['gemm_gflops']:.0f} GFLOP/s in total"
    caption, columns = report.captions(*breakdowns, gemm, report.skipped(result)), COLUMNS
    if "hosts" in result:
        heading = f"{report.hosts(result, result['link_gbit_measured'])}; {heading}"
        columns += HOSTS_COLUMNS
        caption += "\nexposed: communication in the step, where it was measured; sent: bytes of a host on its link"
    if any(row.get("predicted_ms") is not None for row in rows.values()):
        columns += (("predicted ms", "predicted_ms"),)
    return [report.make_table(heading, columns, ({"name": name} | row for name, row in rows.items()), caption)]
