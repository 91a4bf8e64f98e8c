"""``moe-comm bench layer``: forward and backward of an MoE layer, including the router.

All contestants have the same weights and inputs and are interleaved. A contestant with EP 1 runs on all ranks at once,
each with all experts, so that the machine has the same load as with expert parallelism.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from moe_comm.bench.common import machine, report
from moe_comm.bench.common.clock import Clock, Summary, gather, summarize, times_of
from moe_comm.bench.common.inputs import WrongAnswer, make_x
from moe_comm.bench.common.interleave import run_rounds
from moe_comm.bench.common.ranks import on_ranks, run_benchmark, say
from moe_comm.bench.common.settings import LayerBench
from moe_comm.bench.layer.peers import (
    HuggingFaceEPLayer,
    HuggingFaceLayer,
    LayerContestant,
    LayerWeights,
    MoeCommLayer,
    MoeCommReplicatedLayer,
    SonicMoELayer,
    TorchtitanLayer,
)
from moe_comm.runtime.launch import under_torchrun

KINDS: dict[str, type[LayerContestant]] = {
    kind.name: kind
    for kind in (
        MoeCommReplicatedLayer,
        MoeCommLayer,
        HuggingFaceLayer,
        HuggingFaceEPLayer,
        TorchtitanLayer,
        SonicMoELayer,
    )
}
MEMORY_ITERATIONS = 2
"""Iterations of the memory measurement. The first one also allocates persistent buffers."""
GEMM_SIZES = {"cpu": 2048, "cuda": 8192}
GEMM = "torch.mm"
ROUNDINGS = 4
"""Tolerated relative error of a result in units of its dtype's epsilon. That of ``MoELayer`` in bf16 is below 0.5."""
LONG_SUMS = 1e-4
"""Tolerated relative error in float32, where the summation order of long sums matters more than one rounding."""


def select_contestants(settings: LayerBench) -> tuple[list[str], dict[str, str]]:
    """Return the names of the contestants that can run, and the reasons why the others cannot."""
    own = (MoeCommReplicatedLayer.name, MoeCommLayer.name) if settings.ranks > 1 else (MoeCommReplicatedLayer.name,)
    reasons = {name: KINDS[name].unavailable_reason(settings) for name in (*own, *settings.peers)}
    return (
        [name for name, reason in reasons.items() if reason is None],
        {name: reason for name, reason in reasons.items() if reason is not None},
    )


class ContestantRun:
    """Forward and backward of one contestant."""

    def __init__(self, contestant: LayerContestant, x_TD: Tensor, grad_TD: Tensor) -> None:
        self.contestant = contestant
        self.x_TD = x_TD.clone().requires_grad_()
        self.grad_TD = grad_TD
        self.y_TD: Tensor

    def forward(self) -> None:
        self.y_TD = self.contestant.forward(self.x_TD)

    def backward(self) -> None:
        torch.autograd.backward(self.y_TD, self.grad_TD)

    def free(self) -> None:
        """Free the output and the gradients."""
        del self.y_TD
        self.x_TD.grad = None
        self.contestant.module.zero_grad(set_to_none=True)

    def results(self) -> dict[str, Tensor]:
        """Return output and gradients of this rank. Collective.

        Gradients of experts are those of the local experts under expert parallelism, for the tokens of all ranks.
        """
        grads = self.contestant.grads()
        results = {"output": self.y_TD.detach(), "input gradient": self.x_TD.grad, "router gradient": grads["router"]}
        s = self.contestant.settings
        for name in ("gate_up", "down"):
            grad = grads[name]
            if self.contestant.ep == 1 and s.ranks > 1:
                grad = grad.float()
                dist.all_reduce(grad)
                grad = grad.chunk(s.ranks)[self.contestant.rank]
            results[f"{name} gradient"] = grad
        return {name: value for name, value in results.items() if value is not None}


def allowed_error(settings: LayerBench, x_TD: Tensor) -> float:
    """Return the relative Frobenius error that rounding to ``settings.dtype`` can cause.

    Two routers may select different experts for a token whose K-th and (K+1)-th logits differ by less than their
    error: the rounding to the dtype, and that of the D additions in fp32, which the routers do in different orders. If
    a fraction p of the tokens is affected, one of their K terms differs, and the relative error of the sum is about
    sqrt(2 p / K).
    """
    epsilon = torch.finfo(settings.torch_dtype).eps
    x_TD, router_ED = x_TD.float(), LayerWeights(settings).router().float().to(x_TD.device)
    logits_TE = x_TD @ router_ED.T
    near_ties = 0.0
    if settings.top_k < settings.experts and len(x_TD):
        best = logits_TE.topk(settings.top_k + 1, -1).values
        additions_T = torch.finfo(torch.float32).eps * x_TD.norm(dim=-1) * router_ED.norm(dim=-1).amax()
        rounding_T = epsilon * logits_TE.abs().amax(-1) + additions_T
        near_ties = float((best[:, -2] - best[:, -1] < rounding_T).double().mean())
    return max(LONG_SUMS, ROUNDINGS * epsilon) + math.sqrt(2 * near_ties / settings.top_k)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the Frobenius norm of ``actual - expected`` over that of ``expected``, computed in fp32.

    Slices of dimension 0 are converted one at a time, because copies of large weight gradients would not fit in memory.
    """
    squares = torch.zeros(2, dtype=torch.float64, device=expected.device)
    step = max(1, len(expected) // 16)
    for actual_slice, expected_slice in zip(actual.split(step), expected.split(step), strict=True):
        difference_norm = (actual_slice.float() - expected_slice.float()).norm()
        squares += torch.stack([difference_norm, expected_slice.float().norm()]).double().square()
    difference, norm = squares.sqrt().tolist()
    return float(difference / max(norm, 1e-30))


def check(runners: list[ContestantRun]) -> dict[str, float]:
    """Compare the results of every contestant with those of the first. Collective.

    Returns:
        By contestant, the largest Frobenius norm of a difference over the norm of the first contestant's result.
    """
    errors: dict[str, float] = {}
    reference: dict[str, Tensor] = {}
    # Gradients of weights have terms of the tokens of all ranks, so all ranks allow the largest error.
    settings, x_TD = runners[0].contestant.settings, runners[0].x_TD.detach()
    largest = torch.tensor(allowed_error(settings, x_TD), dtype=torch.float64, device=settings.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    allowed = float(largest)
    for runner in runners:
        runner.forward()
        runner.backward()
        results = runner.results()
        runner.free()
        reference = reference or results
        name = runner.contestant.name
        limit = max(runner.contestant.tolerance or 0.0, runners[0].contestant.tolerance or 0.0, allowed)
        for what, expected in reference.items():
            error = relative_error(results[what], expected)
            errors[name] = max(errors.get(name, 0.0), error)
            if not error <= limit:
                raise WrongAnswer(
                    f"{name}: {what} differs from {runners[0].contestant.name} by {error:.3g} (allowed {limit:.3g}); "
                    "nothing was timed. Please report this with the settings."
                )
    return errors


def make_inputs(settings: LayerBench, rank: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of a rank and the gradient of its output, both [T, D]."""
    generator = torch.Generator().manual_seed(settings.seed * 4096 + rank + (1 << 41))
    grad_TD = torch.randn(settings.tokens, settings.hidden, generator=generator, dtype=torch.float32, device="cpu").to(
        settings.torch_dtype
    )
    return make_x(settings, rank).to(settings.device), grad_TD.to(settings.device)


def run(settings: LayerBench, threads: int = 1) -> dict[str, Any]:
    """Run the benchmark on this rank and return the result, the same on every rank. Collective."""
    rank = dist.get_rank()
    names, skipped = select_contestants(settings)
    x_TD, grad_TD = make_inputs(settings, rank)
    say(f"building {', '.join(names)}")
    runners = [ContestantRun(KINDS[name](settings, rank), x_TD, grad_TD) for name in names]
    try:
        say("comparing their results")
        errors = check(runners)
        say(f"measuring {settings.warmup} (discarded) + {settings.rounds} rounds of forward and backward")
        clock = Clock(settings.device)
        # Tests use small shapes; a large GEMM would only make them slower.
        size = GEMM_SIZES[settings.device] if settings.flops > 1e9 else 128
        a, b = (
            torch.randn(size, size, device=settings.device, dtype=torch.float32).to(settings.torch_dtype)
            for _ in range(2)
        )

        def measure(runner: ContestantRun, _: int) -> None:
            clock.measure(runner.contestant.name, ("forward", runner.forward), ("backward", runner.backward))
            runner.free()
            clock.measure(GEMM, ("total", lambda: torch.mm(a, b)))

        run_rounds(runners, measure, clock, settings.warmup, settings.rounds)
        by_rank = gather((dict(clock.times), errors))
    finally:
        for runner in runners:
            runner.contestant.close()
    stats = summarize([times for times, _ in by_rank])
    gemm_gflops = 2e-6 * size**3 / stats[GEMM, "total"]["median_ms"]
    return {
        "benchmark": "layer",
        "gemm_gflops": gemm_gflops,
        "contestants": {name: _row(settings, name, stats, gemm_gflops) for name in names},
        "max_error": {name: max(errors[name] for _, errors in by_rank) for name in names},
        "skipped": skipped,
        "settings": settings.to_dict() | {"iterations": settings.rounds},
        "threads_per_rank": threads,
    }


def _row(settings: LayerBench, name: str, stats: Summary, gemm_gflops: float) -> dict[str, Any]:
    ep = KINDS[name].ep_of(settings)
    baseline = MoeCommReplicatedLayer.name if ep == 1 else MoeCommLayer.name
    total = stats[name, "total"]
    gflops = settings.flops * 1e-6 / total["median_ms"]
    row: dict[str, Any] = {"ep": ep}
    row |= {f"{phase}_ms": stats[name, phase]["median_ms"] for phase in ("forward", "backward")}
    row |= times_of(total, "total")
    row |= {"gflops": gflops, "gemm_fraction": gflops / gemm_gflops}
    if name != baseline:
        row["speedup"] = total["median_ms"] / stats[baseline, "total"]["median_ms"]
        row["speedup_of"] = baseline
    if KINDS[name].note:
        row["note"] = KINDS[name].note
    return row


def peak_memory(settings: LayerBench, name: str) -> dict[str, float]:
    """Measure the peak memory of one contestant in separate processes, in MiB, on the rank with the most.

    It includes weights, gradients, activations, buffers and shared memory, but not the inputs.
    """
    if settings.device == "cuda" or settings.ranks > 1:
        return on_ranks(_memory_of, (settings, name), settings.ranks, settings.device) or {}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(on_ranks, _memory_of, (settings, name), 1, settings.device).result() or {}


def _memory_of(task: tuple[LayerBench, str], threads: int) -> dict[str, float]:
    settings, name = task
    rank = dist.get_rank()
    _iterate(replace(settings, tokens=8, hidden=64, ffn=64), name, 1)  # load libraries before memory is measured
    x_TD, grad_TD = make_inputs(settings, rank)
    cuda = settings.device == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
    else:
        machine.reset_peak_rss()
        before = machine.rss_mib()
    _iterate(settings, name, MEMORY_ITERATIONS, x_TD, grad_TD)
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else machine.peak_rss_mib()
    return {"peak_memory_mib": max(gather(peak - before))}


def _iterate(settings: LayerBench, name: str, iterations: int, *inputs: Tensor) -> None:
    rank = dist.get_rank()
    runner = ContestantRun(KINDS[name](settings, rank), *(inputs or make_inputs(settings, rank)))
    try:
        for _ in range(iterations):
            runner.forward()
            runner.backward()
            runner.free()
    finally:
        runner.contestant.close()


def main(settings: LayerBench, json_out: str | None = None) -> dict[str, Any]:
    """Run ``moe-comm bench layer``, see ``run_benchmark``."""
    return run_benchmark(lambda: _measure(settings), tables, json_out, settings.device)


def _measure(settings: LayerBench) -> dict[str, Any] | None:
    result = on_ranks(run, settings, settings.ranks, settings.device)
    if result is None or not settings.memory:
        return result
    if under_torchrun():
        result["skipped"]["memory"] = "requires separate processes; run without torchrun"
        return result
    for name, row in result["contestants"].items():
        say(f"measuring the peak memory of {name}")
        row |= peak_memory(settings, name)
    return result


COLUMNS: tuple[report.Column, ...] = (
    ("ms", "name"),
    ("EP", "ep"),
    ("forward", "forward_ms"),
    ("backward", "backward_ms"),
    *report.timed("total"),
    ("GFLOP/s", "gflops"),
    ("of GEMM", lambda row: f"{row['gemm_fraction']:.0%}"),
    ("MiB", "peak_memory_mib"),
    ("compared", lambda row: report.faster_or_slower(row.get("speedup"), row.get("speedup_of", ""))),
)


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of times, GFLOP/s, fraction of the GEMM rate and memory of each layer."""
    gemm = f"torch.mm on all ranks at once: {result['gemm_gflops']:.0f} GFLOP/s per rank"
    rows = ({"name": name} | row for name, row in result["contestants"].items())
    caption = report.captions(gemm, report.skipped(result))
    return [report.make_table(report.heading(result), COLUMNS, rows, caption)]
