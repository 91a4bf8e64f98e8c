"""``moe-comm bench dispatch``: dispatch and combine against torch + gloo, torch + MPICH, and bare copies.

All contestants in one set of processes are interleaved, so that noise affects them equally. MPI needs its own launcher,
so its ranks run afterwards, with the same inputs, cores, clock and checks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from moe_comm.bench.common import report
from moe_comm.bench.common.clock import Clock, Summary, gather, summarize, times_of
from moe_comm.bench.common.inputs import (
    RankInputs,
    check_result,
    expected_dweights,
    expected_dx,
    expected_rows,
    expected_y,
    make_inputs,
)
from moe_comm.bench.common.ranks import on_ranks, run_benchmark, say, threads_per_rank
from moe_comm.bench.common.settings import DISPATCH_PEERS, DispatchBench
from moe_comm.bench.dispatch import mpi_ranks
from moe_comm.bench.dispatch.contestants import BareCopies, Contestant, GlooExchange, TimedPhase, TorchPeer, measure
from moe_comm.dispatch import make_dispatcher
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.types import Dispatched

GLOO_PEERS = {"torch_gloo": False, "torch_gloo_tuned": True}
MOE_COMM = "moe_comm"
PHASES = ("dispatch", "combine", "combine_backward", "dispatch_backward")


class MoeCommDispatch(Contestant):
    """A dispatcher of this library, forward and backward."""

    name = MOE_COMM

    def __init__(self, dispatcher: Dispatcher, settings: DispatchBench, inputs: RankInputs) -> None:
        self.dispatcher, self.settings, self.inputs = dispatcher, settings, inputs
        local = dispatcher.local_experts
        self.scale_L = inputs.scale_E[local.start : local.stop]
        self.x_TD = inputs.x_TD.clone().requires_grad_(settings.backward)
        self.weights_TK = inputs.weights_TK.clone().requires_grad_(settings.backward)
        self.dispatched: Dispatched
        self.out_RD: Tensor
        self.grad_RD: Tensor
        self.y_TD: Tensor
        self.grads: list[Tensor]

    def _dispatch(self) -> None:
        self.dispatched = self.dispatcher.dispatch(self.x_TD, self.inputs.ids_TK)

    def _experts(self) -> None:
        self.out_RD = self._scaled(self.dispatched.rows_RD.detach()).requires_grad_(self.settings.backward)

    def _combine(self) -> None:
        self.y_TD = self.dispatcher.combine(self.out_RD, self.weights_TK, self.dispatched.handle)

    def _combine_backward(self) -> None:
        grads = torch.autograd.grad(self.y_TD, (self.out_RD, self.weights_TK), self.inputs.grad_TD)
        self.grads = list(grads)

    def _experts_backward(self) -> None:
        self.grad_RD = self._scaled(self.grads[0])

    def _dispatch_backward(self) -> None:
        self.grads += torch.autograd.grad(self.dispatched.rows_RD, self.x_TD, self.grad_RD)

    def _scaled(self, rows_RD: Tensor) -> Tensor:
        """Multiply each row by the scale of its expert, into a buffer from which peers read in place."""
        out_RD = self.dispatcher.empty_rows(len(rows_RD), rows_RD.shape[1], rows_RD.dtype, rows_RD.device)
        counts = torch.tensor(self.dispatched.handle.rows_per_expert, dtype=torch.int64, device=rows_RD.device)
        scale_R = self.scale_L.repeat_interleave(counts, output_size=len(rows_RD))
        return torch.mul(rows_RD, scale_R[:, None], out=out_RD)

    def _free(self) -> None:
        for name in ("dispatched", "out_RD", "grad_RD", "y_TD", "grads"):
            self.__dict__.pop(name, None)

    def steps(self) -> list[TimedPhase]:
        forward: list[TimedPhase] = [("dispatch", self._dispatch), (None, self._experts), ("combine", self._combine)]
        backward: list[TimedPhase] = [
            ("combine_backward", self._combine_backward),
            (None, self._experts_backward),
            ("dispatch_backward", self._dispatch_backward),
        ]
        return [*forward, *(backward if self.settings.backward else []), (None, self._free)]

    def check(self) -> dict[str, float]:
        for _, work in self.steps()[:-1]:
            work()
        inputs, rank = self.inputs, self.dispatcher.rank
        expected_RD = expected_rows(self.settings, rank).to(inputs.x_TD.device)
        check_result(self.name, "dispatch", self.dispatched.rows_RD.detach(), expected_RD, bits=True)
        # Results are bit-exact on the CPU; a GPU may fuse the multiplication and the addition.
        bits = inputs.x_TD.device.type == "cpu"
        errors = {"combine": check_result(self.name, "combine", self.y_TD.detach(), expected_y(inputs), bits=bits)}
        if self.settings.backward:
            # Row gradients are rounded to the dtype of the rows, so they are compared with a tolerance.
            errors["dx"] = check_result(self.name, "input gradient", self.grads[2], expected_dx(inputs), bits=False)
            expected_TK = expected_dweights(inputs).to(inputs.x_TD.dtype)
            errors["dweights"] = check_result(self.name, "routing gradient", self.grads[1], expected_TK, bits=False)
        self._free()
        return errors


def run(settings: DispatchBench, threads: int = 1) -> dict[str, Any]:
    """Run the benchmark on this rank and return the result, the same on every rank. Collective over the default group.

    Args:
        settings: settings; ``ranks`` must be the size of the group.
        threads: number of threads of this rank.
    """
    rank = dist.get_rank()
    group = dist.group.WORLD if settings.ranks > 1 else None
    inputs = make_inputs(settings, rank)
    dispatcher = make_dispatcher(settings.experts, group, backend=settings.backend, device=settings.device)
    try:
        contestants, skipped = _contestants(dispatcher, settings, rank, inputs, threads)
        names = ", ".join(contestant.name for contestant in contestants)
        say(f"{settings.tokens} tokens per rank: comparing results with plain torch: {names}")
        errors = {contestant.name: contestant.check() for contestant in contestants}
        say(f"measuring {settings.warmup} (discarded) + {settings.rounds} rounds of {names}")
        clock = Clock(settings.device)
        measure(contestants, clock, settings)
        by_rank = gather((dict(clock.times), errors))
    finally:
        dispatcher.close()
    result = dispatch_result(settings, summarize([times for times, _ in by_rank]), dispatcher.name)
    result["max_error"] = {
        name: {what: max(errors[name][what] for _, errors in by_rank) for what in whats}
        for name, whats in errors.items()
    }
    result["skipped"] = skipped
    result["threads_per_rank"] = threads
    return result


def _contestants(
    dispatcher: Dispatcher, settings: DispatchBench, rank: int, inputs: RankInputs, threads: int
) -> tuple[list[Contestant], dict[str, str]]:
    contestants: list[Contestant] = [MoeCommDispatch(dispatcher, settings, inputs)]
    skipped: dict[str, str] = {}
    if settings.device == "cuda":
        skipped |= dict.fromkeys((*settings.peers, "limit"), "available on CPU ranks only")
        return contestants, skipped
    for name in settings.peers:
        if name in GLOO_PEERS:
            contestants.append(TorchPeer(name, GlooExchange(), settings, rank, inputs, tuned=GLOO_PEERS[name]))
    try:
        # Imported here because the native core may not be built.
        from moe_comm import _C as native  # type: ignore[attr-defined,unused-ignore]

        if settings.top_k > BareCopies.MAX_TOP_K:
            skipped["limit"] = f"the bare sum supports at most {BareCopies.MAX_TOP_K} rows per token"
        else:
            contestants.append(BareCopies(native, settings, rank, inputs, threads))
    except ImportError as missing:
        skipped["limit"] = f"the native core is not built ({missing})"
    return contestants, skipped


def dispatch_result(settings: DispatchBench, stats: Summary, backend: str) -> dict[str, Any]:
    """Return the JSON object for statistics by (contestant, phase). Times are in milliseconds."""

    def ms(name: str, phase: str) -> float | None:
        return stats[name, phase]["median_ms"] if (name, phase) in stats else None

    result: dict[str, Any] = {"benchmark": "dispatch", "backend": backend}
    result |= {f"{phase}_ms": ms(MOE_COMM, phase) for phase in PHASES}
    result |= {f"{phase}_limit_ms": ms("limit", phase) for phase in PHASES[:2]}
    result["limit_ratio"] = result["overhead_us"] = None
    if ("limit", "dispatch") in stats:
        result["limit_ratio"] = _forward(result) / (result["dispatch_limit_ms"] + result["combine_limit_ms"])
        result["overhead_us"] = {
            phase: 1e3 * (result[f"{phase}_ms"] - result[f"{phase}_limit_ms"]) for phase in PHASES[:2]
        }
    result["peers"] = {}
    add_peers(result, stats, "interleaved with moe_comm")
    result["row_megabytes_per_rank"] = _bytes(settings) / 1e6
    result["settings"] = settings.to_dict() | {"iterations": settings.rounds}
    result["details"] = {}
    add_details(result, stats)
    return result


def _forward(times: dict[str, Any]) -> float:
    return float(times["dispatch_ms"] + times["combine_ms"])


def _bytes(settings: DispatchBench) -> int:
    return settings.tokens * settings.top_k * settings.hidden * settings.torch_dtype.itemsize


def add_peers(result: dict[str, Any], stats: Summary, when: str) -> None:
    """Add the peers in ``stats`` to a result, with the speedup of this library over each."""
    for name in (name for name in DISPATCH_PEERS if (name, "dispatch") in stats):
        times = {phase: stats[name, phase]["median_ms"] for phase in PHASES[:2]}
        peer: dict[str, Any] = {f"{phase}_ms": t for phase, t in times.items()}
        peer["speedup"] = _forward(peer) / _forward(result)
        peer |= {f"speedup_{phase}": t / result[f"{phase}_ms"] for phase, t in times.items()}
        result["peers"][name] = peer | {"measured": when}


def add_details(result: dict[str, Any], stats: Summary) -> None:
    """Add the statistics of each contestant and phase to a result."""
    for (name, phase), values in stats.items():
        result["details"].setdefault(name, {})[phase] = values


def main(settings: DispatchBench, json_out: str | None = None) -> dict[str, Any]:
    """Run ``moe-comm bench dispatch``, see ``run_benchmark``."""
    return run_benchmark(lambda: next(iter(measure_all([settings])), None), tables, json_out, settings.device)


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the table: this library, the bare copies and the peers."""

    def row(name: str, contestant: str, suffix: str = "", **values: str) -> report.Row:
        stats = result["details"][contestant]
        times = {
            key: value
            for p in PHASES[:2]
            if (of := stats.get(f"{p}{suffix}"))
            for key, value in times_of(of, p).items()
        }
        return {"name": name, "than": ""} | times | values

    rows = [row(f"moe_comm {result['backend']}", MOE_COMM)]
    if result["dispatch_backward_ms"] is not None:
        rows.append(row("  backward", MOE_COMM, "_backward"))
    if result["limit_ratio"] is not None:
        rows.append(row("bare copies", "limit", than=report.faster_or_slower(1 / result["limit_ratio"])))
        overhead = {f"{phase}_ms": report.number(us, unit=" µs") for phase, us in result["overhead_us"].items()}
        rows.append({"name": "  moe_comm minus these", "than": ""} | overhead)
    for name, peer in result["peers"].items():
        rows.append(row(name, name, than=report.faster_or_slower(peer["speedup"])))
    columns = (
        ("", "name"),
        *report.timed("dispatch ms", "dispatch"),
        *report.timed("combine ms", "combine"),
        ("than moe_comm", "than"),
    )
    return [report.make_table(report.heading(result), columns, rows, report.captions(report.skipped(result)))]


def measure_all(settings: list[DispatchBench]) -> list[dict[str, Any]]:
    """Measure several settings with the same number of ranks in the same processes and return their results.

    The result is empty on ranks of torchrun other than 0.
    """
    results = on_ranks(_run_each, settings, settings[0].ranks, settings[0].device) or []
    peers = [name for name in settings[0].peers if name in mpi_ranks.MPI_PEERS]
    if not results or not peers or settings[0].device != "cpu":
        return results
    reason = mpi_ranks.unavailable_reason()
    if reason is None:
        say(f"measuring {', '.join(peers)} in processes of their own")
        try:
            summaries = mpi_ranks.run_mpi(settings, threads_per_rank(settings[0].ranks))
            for result, stats in zip(results, summaries, strict=True):
                add_peers(result, stats, mpi_ranks.WHEN)
                add_details(result, stats)
        except RuntimeError as failed:
            reason = str(failed)
    if reason:
        for result in results:
            result["skipped"] |= dict.fromkeys(peers, reason)
    return results


def _run_each(settings: list[DispatchBench], threads: int) -> list[dict[str, Any]]:
    return [run(case, threads) for case in settings]
