"""``moe-comm bench layer``: a whole MoE layer, forward and backward, router included.

All contestants have the same weights and input and take turns inside every iteration. One with EP 1 runs on every
rank at once, each rank with all experts to itself, so that the machine is as busy as under expert parallelism.
"""

from __future__ import annotations

import gc
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.bench.common import machine, report
from moe_comm.bench.common.case import WrongAnswer, make_x
from moe_comm.bench.common.clock import Clock, Stats, summarise, sync_alone, sync_group
from moe_comm.bench.common.ranks import on_ranks
from moe_comm.bench.common.settings import LayerBench
from moe_comm.bench.layer.ours import Ours, OursAlone
from moe_comm.bench.layer.peers import HuggingFace, HuggingFaceEP, LayerContestant, Torchtitan
from moe_comm.bench.layer.sonic import SonicMoE
from moe_comm.runtime.launch import under_torchrun

KINDS: dict[str, type[LayerContestant]] = {
    kind.name: kind for kind in (OursAlone, Ours, HuggingFace, HuggingFaceEP, Torchtitan, SonicMoE)
}
MEMORY_ITERATIONS = 2
"""Of a contestant alone; the first also makes buffers that stay."""
GEMM_SIZE = 2048
GEMM = "torch.mm"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Of the relative Frobenius norm of differences."""


def wanted(settings: LayerBench) -> tuple[list[str], dict[str, str]]:
    """Names of the contestants that can run, and why the others cannot."""
    ours = (OursAlone.name, Ours.name) if settings.ranks > 1 else (OursAlone.name,)
    reasons = {name: KINDS[name].why_not(settings) for name in (*ours, *settings.peers)}
    return (
        [name for name, reason in reasons.items() if reason is None],
        {name: reason for name, reason in reasons.items() if reason is not None},
    )


class Turn:
    """One contestant's forward and backward."""

    def __init__(self, contestant: LayerContestant, x_TD: Tensor, grad_TD: Tensor) -> None:
        self.contestant = contestant
        self.x_TD = x_TD.clone().requires_grad_()
        self.grad_TD = grad_TD
        self.y_TD: Tensor

    def forward(self) -> None:
        self.y_TD = self.contestant.forward(self.x_TD)

    def backward(self) -> None:
        torch.autograd.backward(self.y_TD, self.grad_TD)

    def drop(self) -> None:
        """What ``zero_grad`` does between steps."""
        del self.y_TD
        self.x_TD.grad = None
        self.contestant.module.zero_grad(set_to_none=True)

    def results(self) -> dict[str, Tensor]:
        """Output, input gradient and router gradient of this rank; expert gradients summed over all ranks' tokens.

        Expert gradients are of this rank's share of the experts. Collective.
        """
        grads = self.contestant.grads()
        found = {"output": self.y_TD.detach(), "input gradient": self.x_TD.grad, "router gradient": grads["router"]}
        s = self.contestant.settings
        for name in ("gate_up", "down"):
            grad = grads[name]
            if self.contestant.ep == 1 and s.ranks > 1:
                grad = grad.float()
                dist.all_reduce(grad)
                grad = grad.chunk(s.ranks)[self.contestant.rank]
            found[f"{name} gradient"] = grad
        return {name: value.float().clone() for name, value in found.items() if value is not None}


def check(turns: list[Turn], dtype: torch.dtype) -> dict[str, float]:
    """Every contestant's results against the first's; Frobenius norm of the difference over the norm.

    (Not the largest difference: in 16 bits a near tie between two experts may fall either way.)

    Raises:
        WrongAnswer: two contestants disagree, so their times mean nothing.
    """
    errors: dict[str, float] = {}
    reference: dict[str, Tensor] = {}
    for turn in turns:
        turn.forward()
        turn.backward()
        found = turn.results()
        turn.drop()
        reference = reference or found
        name = turn.contestant.name
        allowed = max(turn.contestant.tolerance or 0.0, turns[0].contestant.tolerance or 0.0, TOLERANCE[dtype])
        for what, want in reference.items():
            error = float((found[what] - want).norm() / want.norm().clamp(min=1e-30))
            errors[name] = max(errors.get(name, 0.0), error)
            if not error <= allowed:
                raise WrongAnswer(
                    f"{name}: {what} differs from {turns[0].contestant.name} by {error:.3g} (allowed {allowed:.3g}); "
                    "nothing was timed. Please report this with the settings."
                )
    return errors


def _inputs(settings: LayerBench, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(settings.seed * 4096 + rank + (1 << 41))
    grad_TD = torch.randn(settings.tokens, settings.hidden, generator=generator).to(settings.torch_dtype)
    return make_x(settings, rank).to(settings.device), grad_TD.to(settings.device)


def run(settings: LayerBench, threads: int = 1) -> dict[str, Any]:
    """One rank's part; collective over the default process group. Returns the same result on every rank.

    Raises:
        WrongAnswer: contestants disagree.
    """
    rank = dist.get_rank()
    names, skipped = wanted(settings)
    x_TD, grad_TD = _inputs(settings, rank)
    turns = [Turn(KINDS[name](settings, rank), x_TD, grad_TD) for name in names]
    try:
        errors = check(turns, settings.torch_dtype)
        clock = Clock(sync_group if settings.ranks > 1 else sync_alone, settings.device)
        # Small shapes are for tests of this code; there a large GEMM would only cost time.
        size = GEMM_SIZE if settings.flops > 1e9 else 128
        a, b = (torch.randn(size, size, device=settings.device).to(settings.torch_dtype) for _ in range(2))
        gc.disable()
        for turn_number in range(settings.warmup + settings.rounds):
            if turn_number == settings.warmup:
                clock.clear()
            shift = turn_number % len(turns)
            for turn in turns[shift:] + turns[:shift]:
                gc.collect()
                clock.measure(turn.contestant.name, ("forward", turn.forward), ("backward", turn.backward))
                turn.drop()
                clock.measure(GEMM, ("total", lambda: torch.mm(a, b)))
        everyone: list[Any] = [None] * settings.ranks
        dist.all_gather_object(everyone, (dict(clock.times), errors))
    finally:
        gc.enable()
        for turn in turns:
            turn.contestant.close()
    stats = summarise([times for times, _ in everyone])
    gemm_gflops = 2e-6 * size**3 / stats[GEMM, "total"]["median_ms"]
    return {
        "benchmark": "layer",
        "gemm_gflops": gemm_gflops,
        "contestants": {name: _row(settings, name, stats, gemm_gflops) for name in names},
        "max_error": {name: max(errors[name] for _, errors in everyone) for name in names},
        "skipped": skipped,
        "settings": settings.to_dict() | {"iterations": settings.rounds},
        "threads_per_rank": threads,
    }


def _row(settings: LayerBench, name: str, stats: dict[tuple[str, str], Stats], gemm_gflops: float) -> dict[str, Any]:
    ep = KINDS[name].ep_of(settings)
    ours = OursAlone.name if ep == 1 else Ours.name
    total = stats[name, "total"]
    gflops = settings.flops * 1e-6 / total["median_ms"]
    row: dict[str, Any] = {"ep": ep}
    row |= {f"{phase}_ms": stats[name, phase]["median_ms"] for phase in ("forward", "backward", "total")}
    row |= {"total_min_ms": total["min_ms"], "total_p90_ms": total["p90_ms"]}
    row |= {"gflops": gflops, "gemm_fraction": gflops / gemm_gflops}
    if name != ours:
        row["speedup"] = total["median_ms"] / stats[ours, "total"]["median_ms"]
    if KINDS[name].note:
        row["note"] = KINDS[name].note
    return row


def peak_memory(settings: LayerBench, name: str) -> dict[str, float]:
    """Peak memory of one contestant alone in new processes, above what the process held with its input; MiB.

    Weights, gradients, activations, buffers and shared memory; the rank with the most.
    """
    if settings.device == "cuda" or settings.ranks > 1:
        return on_ranks(_memory_of, (settings, name), settings.ranks, settings.device) or {}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(on_ranks, _memory_of, (settings, name), 1, settings.device).result() or {}


def _memory_of(task: tuple[LayerBench, str], threads: int) -> dict[str, float]:
    settings, name = task
    rank = dist.get_rank()
    _iterate(replace(settings, tokens=8, hidden=64, ffn=64), name, 1)  # loads libraries, which are not the layer's
    x_TD, grad_TD = _inputs(settings, rank)
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
    everyone: list[Any] = [None] * settings.ranks
    dist.all_gather_object(everyone, peak - before)
    return {"peak_memory_mib": max(everyone)}


def _iterate(settings: LayerBench, name: str, iterations: int, *inputs: Tensor) -> None:
    rank = dist.get_rank()
    turn = Turn(KINDS[name](settings, rank), *(inputs or _inputs(settings, rank)))
    try:
        for _ in range(iterations):
            turn.forward()
            turn.backward()
            turn.drop()
    finally:
        turn.contestant.close()


def main(settings: LayerBench, json_out: str | None = None) -> dict[str, Any]:
    """Measure, print a table, write JSON; the body of ``moe-comm bench layer``.

    Starts the ranks, or takes part in those that torchrun started; then only rank 0 prints.

    Args:
        json_out: file for the JSON object; ``-`` is standard output.
    """
    report.check_writable(json_out)
    facts = machine.facts(settings.device)
    found = on_ranks(run, settings, settings.ranks, settings.device)
    if found is None:
        return {}
    found["machine"] = facts
    if settings.memory and under_torchrun():
        found["skipped"]["memory"] = "needs ranks of its own; run without torchrun"
    elif settings.memory:
        for name, row in found["contestants"].items():
            row |= peak_memory(settings, name)
    report.write_json(found, json_out)
    report.show(report.layer_tables(found), json_out)
    return found
