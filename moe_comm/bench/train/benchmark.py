"""``moe-comm bench train``: training steps against the training loops of other libraries on the same ranks.

All contestants start from the same weights and use the same batches. They are built in the same processes and are
interleaved step by step, so that noise affects them equally. Their losses are compared after each step.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.bench.common import machine, report
from moe_comm.bench.common.clock import Clock, summarize, sync_group, sync_single_rank
from moe_comm.bench.common.inputs import WrongAnswer
from moe_comm.bench.common.interleave import rotated
from moe_comm.bench.common.ranks import SingleRankMesh, cores_of_group, on_ranks, pinned_to
from moe_comm.bench.train.contestant import ContestantInputs, TrainContestant
from moe_comm.bench.train.own_loop import MoeCommTraining, OneProcessTraining
from moe_comm.bench.train.peers import PEERS
from moe_comm.bench.train.settings import LR, RIVALS, TrainBench
from moe_comm.integrations.hugging_face.architecture import to_hugging_face
from moe_comm.integrations.hugging_face.weights import write_folder
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.plan.model.shape import ModelShape
from moe_comm.runtime.gemm import gemm_flops
from moe_comm.train import config as configuration
from moe_comm.train.loop.build import architecture_of, build_stages
from moe_comm.train.loop.job import open_corpus
from moe_comm.train.metrics import StepTimes
from moe_comm.train.ranks import Ranks

KINDS: dict[str, type[TrainContestant]] = {
    MoeCommTraining.name: MoeCommTraining,
    OneProcessTraining.name: OneProcessTraining,
} | PEERS
FIRST_STEP, LATER_STEPS = 1e-3, 1e-2
"""Largest allowed relative difference of a loss from that of this library: in the first step, and in later steps."""
PARTS = ("compute", "communication", "data", "checkpoint", "loop")


def select_contestants(bench: TrainBench) -> tuple[list[str], dict[str, str]]:
    """Return the names of the contestants that can run, and the reasons why the others cannot."""
    reasons = {name: KINDS[name].unavailable_reason(bench) for name in (MoeCommTraining.name, *bench.peers)}
    return (
        [name for name, reason in reasons.items() if reason is None],
        {name: reason for name, reason in reasons.items() if reason is not None},
    )


class _ContestantRun:
    """One training loop of the comparison. ``contestant`` is None on ranks that do not run it."""

    def __init__(self, kind: type[TrainContestant], inputs: ContestantInputs, cores: set[int]) -> None:
        self.kind, self.inputs, self.cores = kind, inputs, cores
        self.losses: list[float] = []
        self.contestant: TrainContestant | None = None
        with self._affinity():
            if inputs.ranks.is_first or not kind.single_process:
                self.contestant = kind(inputs)

    def _affinity(self) -> contextlib.AbstractContextManager[None]:
        """Give all cores to a contestant in a single process."""
        if self.kind.single_process and self.inputs.ranks.is_first:
            return pinned_to(self.cores)
        return contextlib.nullcontext()

    def step(self, clock: Clock, step: int) -> None:
        """Time one step and record its loss. Collective."""
        contestant, loss = self.contestant, 0.0
        with self._affinity():
            if contestant is None:
                clock.measure(self.kind.name, ("step", lambda: None))
            else:
                contestant.prepare(step)
                clock.measure(self.kind.name, ("step", partial(contestant.step, step)))
                loss = contestant.loss()
        self.losses.append(float(self.inputs.ranks.sum(torch.tensor([loss], dtype=torch.float64))))

    def close(self) -> None:
        if self.contestant is not None:
            self.contestant.close()


def run(bench: TrainBench, threads: int = 1) -> dict[str, Any]:
    """Run the benchmark on this rank and return the result, the same on every rank. Collective over the default group.

    Raises:
        WrongAnswer: the losses of two contestants differ.
    """
    names, skipped = select_contestants(bench)
    ranks = Ranks.make()
    with contextlib.ExitStack() as stack:
        inputs = _make_inputs(bench, ranks, stack)
        cores = cores_of_group()
        contestant_runs = []
        for name in names:
            contestant_runs.append(_ContestantRun(KINDS[name], inputs, cores))
            stack.callback(contestant_runs[-1].close)
            ranks.barrier()
        clock = Clock(sync_group if bench.ranks > 1 else sync_single_rank)
        # Tests use small shapes; a large GEMM would only make them slower.
        flops = ModelShape.of(inputs.architecture).model_flops(bench.seq_len)
        size = None if flops * bench.tokens > 1e9 else 64
        rates: list[float] = []
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        for step in range(bench.warmup + bench.steps):
            if step == bench.warmup:
                clock.clear()
                rates.clear()
            for contestant_run in rotated(contestant_runs, step):
                gc.collect()
                contestant_run.step(clock, step)
            ranks.barrier()
            rates.append(gemm_flops(size=size))
            _check(contestant_runs)
        own_loop = contestant_runs[0].contestant
        assert isinstance(own_loop, MoeCommTraining)
        breakdown = _breakdown([step_report.times for step_report in own_loop.reports[bench.warmup :]])
        by_rank: list[Any] = [None] * bench.ranks
        dist.all_gather_object(by_rank, (dict(clock.times), median(rates), breakdown))
    stats = summarize([times for times, _, _ in by_rank])
    peak = sum(rate for _, rate, _ in by_rank)
    rows = {name: _row(bench, stats[name, "step"], flops, peak) for name in names}
    for contestant_run in contestant_runs[1:]:
        row = rows[contestant_run.kind.name]
        row["speedup"] = row["step_ms"] / rows[MoeCommTraining.name]["step_ms"]
        row["loss_rel_diff"] = _difference(contestant_run, contestant_runs[0])
        if contestant_run.kind.note:
            row["note"] = contestant_run.kind.note
    own_row = rows.pop(MoeCommTraining.name)
    speedups = {name: row["speedup"] for name, row in rows.items()}
    best = min((name for name in rows if name in RIVALS), key=speedups.__getitem__, default=None)
    return {
        "benchmark": "train",
        **own_row,
        "speedup": None if best is None else speedups[best],
        "best_peer": best,
        "speedup_over_all": min(speedups.values(), default=None),
        "peers": rows,
        "step": _mean([split for _, _, split in by_rank]),
        "losses": contestant_runs[0].losses,
        "flops_per_token": flops,
        "gemm_gflops": peak * 1e-9,
        "skipped": skipped,
        "settings": bench.to_dict() | {"lr": LR},
        "threads_per_rank": threads,
    }


def _make_inputs(bench: TrainBench, ranks: Ranks, stack: contextlib.ExitStack) -> ContestantInputs:
    """Return the inputs of the contestants. The first rank writes a folder with the initial weights."""
    own = stack.enter_context(tempfile.TemporaryDirectory(prefix="moe_comm-bench-")) if ranks.is_first else ""
    folder = Path(ranks.broadcast_text(own))
    config = configuration.load(None, [*bench.overrides, f"data.cache={folder}"])
    corpus = open_corpus(config, ranks)
    architecture = architecture_of(config, corpus.vocab_size)
    inputs = ContestantInputs(bench, config, architecture, corpus, ranks, folder / "weights")
    if ranks.is_first:
        (model,) = build_stages(config, architecture, SingleRankMesh())
        initialize(model, bench.seed)
        hf_config = to_hugging_face(architecture, "qwen3_moe")
        hf_config.dtype = "float32"
        write_folder(inputs.weights, architecture, "qwen3_moe", hf_config, model.state_dict().items())
        model.close()
    ranks.barrier()
    return inputs


def _check(contestant_runs: list[_ContestantRun]) -> None:
    """Compare the losses of the last step with those of this library."""
    first = len(contestant_runs[0].losses) == 1
    allowed = FIRST_STEP if first else LATER_STEPS
    for contestant_run in contestant_runs[1:]:
        loss, expected = contestant_run.losses[-1], contestant_runs[0].losses[-1]
        if not abs(loss - expected) <= allowed * abs(expected):
            raise WrongAnswer(
                f"{contestant_run.kind.name}: the loss of step {len(contestant_run.losses)} is {loss:.6g}, but that of "
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
        "step_ms": stats["median_ms"],
        "step_min_ms": stats["min_ms"],
        "step_p90_ms": stats["p90_ms"],
    }


def _breakdown(times: list[StepTimes]) -> dict[str, Any]:
    """Return the breakdown of a step: median fractions and median seconds."""
    seconds: dict[str, float] = {part: median(getattr(t, part) for t in times) for part in PARTS}
    fractions: dict[str, Any] = {part: median(getattr(t, part) / t.total for t in times) for part in PARTS}
    return fractions | {"seconds": seconds | {"total": median(t.total for t in times)}}


def _mean(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of the breakdowns of all ranks."""
    mean: dict[str, Any] = {part: fmean(one[part] for one in ranks) for part in PARTS}
    mean["seconds"] = {part: fmean(one["seconds"][part] for one in ranks) for part in (*PARTS, "total")}
    return mean


def main(bench: TrainBench, json_out: str | None = None) -> dict[str, Any]:
    """Run ``moe-comm bench train``: measure, print a table, write JSON.

    Starts the ranks. Under torchrun, uses the ranks of torchrun, and only rank 0 prints.

    Args:
        bench: settings of the benchmark.
        json_out: file for the JSON object; ``-`` is standard output.

    Returns:
        The JSON object; empty on ranks of torchrun other than 0.
    """
    report.check_writable(json_out)
    info = machine.machine_info("cpu")
    result = on_ranks(run, bench, bench.ranks, "cpu")
    if result is None:
        return {}
    result["machine"] = info
    report.write_json(result, json_out)
    report.show(report.train_tables(result), json_out)
    return result
