"""``moe-comm bench dispatch``: our dispatch and combine against torch + gloo, torch + MPICH, and the bare copies.

All contestants of a process set take turns inside every iteration, so that noise hits them alike. MPI needs its
own launcher, so its ranks run right after, with the same inputs, cores, clock and checks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.bench.common import machine, report
from moe_comm.bench.common.case import (
    Case,
    expected_dweights,
    expected_dx,
    expected_rows,
    expected_y,
    make_case,
    require,
)
from moe_comm.bench.common.clock import Clock, summarise, sync_alone, sync_group
from moe_comm.bench.common.ranks import on_ranks, threads_per_rank
from moe_comm.bench.common.settings import DISPATCH_PEERS, DispatchBench
from moe_comm.bench.dispatch import mpi_ranks
from moe_comm.bench.dispatch.contest import Contestant, Step, Summary, TorchPeer, measure
from moe_comm.bench.dispatch.limit import Limit
from moe_comm.bench.dispatch.permute import GlooExchange
from moe_comm.dispatch import make_dispatcher
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.types import Dispatched

GLOO_PEERS = {"torch_gloo": False, "torch_gloo_tuned": True}
OURS = "moe_comm"
PHASES = ("dispatch", "combine", "combine_backward", "dispatch_backward")


class Ours:
    """A dispatcher of this library, forward and backward."""

    name = OURS

    def __init__(self, dispatcher: Dispatcher, settings: DispatchBench, case: Case) -> None:
        self.dispatcher, self.settings, self.case = dispatcher, settings, case
        local = dispatcher.local_experts
        self.scale_L = case.scale_E[local.start : local.stop]
        self.x_TD = case.x_TD.clone().requires_grad_(settings.backward)
        self.weights_TK = case.weights_TK.clone().requires_grad_(settings.backward)
        self.routed: Dispatched
        self.results_RD: Tensor
        self.grad_RD: Tensor
        self.y_TD: Tensor
        self.grads: list[Tensor]

    def _dispatch(self) -> None:
        self.routed = self.dispatcher.dispatch(self.x_TD, self.case.ids_TK)

    def _experts(self) -> None:
        self.results_RD = self._scaled(self.routed.rows_RD.detach()).requires_grad_(self.settings.backward)

    def _combine(self) -> None:
        self.y_TD = self.dispatcher.combine(self.results_RD, self.weights_TK, self.routed.handle)

    def _combine_backward(self) -> None:
        grads = torch.autograd.grad(self.y_TD, (self.results_RD, self.weights_TK), self.case.grad_TD)
        self.grads = list(grads)

    def _experts_backward(self) -> None:
        self.grad_RD = self._scaled(self.grads[0])

    def _dispatch_backward(self) -> None:
        self.grads += torch.autograd.grad(self.routed.rows_RD, self.x_TD, self.grad_RD)

    def _scaled(self, rows_RD: Tensor) -> Tensor:
        """The stand-in experts: each row times its expert's scale, written where peers read it in place."""
        out_RD = self.dispatcher.empty_rows(len(rows_RD), rows_RD.shape[1], rows_RD.dtype, rows_RD.device)
        counts = torch.tensor(self.routed.handle.rows_per_expert, device=rows_RD.device)
        scale_R = self.scale_L.repeat_interleave(counts, output_size=len(rows_RD))
        return torch.mul(rows_RD, scale_R[:, None], out=out_RD)

    def _drop(self) -> None:
        for name in ("routed", "results_RD", "grad_RD", "y_TD", "grads"):
            self.__dict__.pop(name, None)

    def steps(self) -> list[Step]:
        forward: list[Step] = [("dispatch", self._dispatch), (None, self._experts), ("combine", self._combine)]
        backward: list[Step] = [
            ("combine_backward", self._combine_backward),
            (None, self._experts_backward),
            ("dispatch_backward", self._dispatch_backward),
        ]
        return [*forward, *(backward if self.settings.backward else []), (None, self._drop)]

    def check(self) -> dict[str, float]:
        for _, work in self.steps()[:-1]:
            work()
        case, rank = self.case, self.dispatcher.rank
        want_RD = expected_rows(self.settings, rank).to(case.x_TD.device)
        require(self.name, "dispatch", self.routed.rows_RD.detach(), want_RD, bits=True)
        # Bits on the CPU are the contract; a GPU may fuse the multiplication and the addition.
        bits = case.x_TD.device.type == "cpu"
        errors = {"combine": require(self.name, "combine", self.y_TD.detach(), expected_y(case), bits=bits)}
        if self.settings.backward:
            # Row gradients are rounded to the rows' dtype on the way, so only a tolerance is owed.
            errors["dx"] = require(self.name, "input gradient", self.grads[2], expected_dx(case), bits=False)
            want_TK = expected_dweights(case).to(case.x_TD.dtype)
            errors["dweights"] = require(self.name, "routing gradient", self.grads[1], want_TK, bits=False)
        self._drop()
        return errors


def run(settings: DispatchBench, threads: int = 1) -> dict[str, Any]:
    """One rank's part; collective over the default process group. Returns the same result on every rank.

    Args:
        settings: ``ranks`` must be the size of the group.
        threads: of this rank.

    Raises:
        WrongAnswer: a contestant does not give what plain torch gives.
    """
    rank = dist.get_rank()
    group = dist.group.WORLD if settings.ranks > 1 else None
    case = make_case(settings, rank)
    dispatcher = make_dispatcher(settings.experts, group, settings.backend, device=settings.device)
    try:
        contestants, skipped = _contestants(dispatcher, settings, rank, case, threads)
        errors = {contestant.name: contestant.check() for contestant in contestants}
        clock = Clock(sync_group if settings.ranks > 1 else sync_alone, settings.device)
        measure(contestants, clock, settings)
        everyone: list[Any] = [None] * settings.ranks
        dist.all_gather_object(everyone, (dict(clock.times), errors))
    finally:
        dispatcher.close()
    found = result(settings, summarise([times for times, _ in everyone]), dispatcher.name)
    found["max_error"] = {
        name: {what: max(errors[name][what] for _, errors in everyone) for what in whats}
        for name, whats in errors.items()
    }
    found["skipped"] = skipped
    found["threads_per_rank"] = threads
    return found


def _contestants(
    dispatcher: Dispatcher, settings: DispatchBench, rank: int, case: Case, threads: int
) -> tuple[list[Contestant], dict[str, str]]:
    found: list[Contestant] = [Ours(dispatcher, settings, case)]
    skipped: dict[str, str] = {}
    if settings.device == "cuda":
        skipped |= dict.fromkeys((*settings.peers, "limit"), "measured on CPU ranks only")
        return found, skipped
    for name in settings.peers:
        if name in GLOO_PEERS:
            found.append(TorchPeer(name, GlooExchange(), settings, rank, case, tuned=GLOO_PEERS[name]))
    try:
        # Imported here because the native core may not be built.
        from moe_comm import _C as native  # type: ignore[attr-defined,unused-ignore]

        if settings.top_k > Limit.MAX_TOP_K:
            skipped["limit"] = f"its bare sum takes at most {Limit.MAX_TOP_K} rows a token"
        else:
            found.append(Limit(native, settings, rank, case, threads))
    except ImportError as missing:
        skipped["limit"] = f"the native core is not built ({missing})"
    return found, skipped


def result(settings: DispatchBench, stats: Summary, backend: str) -> dict[str, Any]:
    """The JSON object, from medians by (contestant, phase); times in milliseconds."""

    def ms(name: str, phase: str) -> float | None:
        return stats[name, phase]["median_ms"] if (name, phase) in stats else None

    found: dict[str, Any] = {"benchmark": "dispatch", "backend": backend}
    found |= {f"{phase}_ms": ms(OURS, phase) for phase in PHASES}
    found |= {f"{phase}_limit_ms": ms("limit", phase) for phase in PHASES[:2]}
    found["limit_ratio"] = found["overhead_us"] = None
    if ("limit", "dispatch") in stats:
        found["limit_ratio"] = _forward(found) / (found["dispatch_limit_ms"] + found["combine_limit_ms"])
        found["overhead_us"] = {
            phase: 1e3 * (found[f"{phase}_ms"] - found[f"{phase}_limit_ms"]) for phase in PHASES[:2]
        }
    found["peers"] = {}
    add_peers(found, stats, "interleaved with ours")
    found["row_megabytes_per_rank"] = _bytes(settings) / 1e6
    found["settings"] = settings.to_dict() | {"iterations": settings.rounds}
    found["details"] = {}
    add_details(found, stats)
    return found


def _forward(times: dict[str, Any]) -> float:
    return float(times["dispatch_ms"] + times["combine_ms"])


def _bytes(settings: DispatchBench) -> int:
    return settings.tokens * settings.top_k * settings.hidden * settings.torch_dtype.itemsize


def add_peers(found: dict[str, Any], stats: Summary, when: str) -> None:
    """Put the peers among ``stats`` into a result, with how much faster ours is."""
    for name in (name for name in DISPATCH_PEERS if (name, "dispatch") in stats):
        times = {phase: stats[name, phase]["median_ms"] for phase in PHASES[:2]}
        peer: dict[str, Any] = {f"{phase}_ms": t for phase, t in times.items()}
        peer["speedup"] = _forward(peer) / _forward(found)
        peer |= {f"speedup_{phase}": t / found[f"{phase}_ms"] for phase, t in times.items()}
        found["peers"][name] = peer | {"measured": when}


def add_details(found: dict[str, Any], stats: Summary) -> None:
    """Put median, minimum and 90th percentile of each contestant's phases into a result."""
    for (name, phase), values in stats.items():
        found["details"].setdefault(name, {})[phase] = values


def main(settings: DispatchBench, json_out: str | None = None) -> dict[str, Any]:
    """Measure, print a table, write JSON; the body of ``moe-comm bench dispatch``.

    Starts the ranks, or takes part in those that torchrun started; then only rank 0 prints.

    Args:
        json_out: file for the JSON object; ``-`` is standard output.
    """
    report.check_writable(json_out)
    found = measure_all([settings])
    if not found:
        return {}
    report.write_json(found[0], json_out)
    report.show(report.dispatch_tables(found[0]), json_out)
    return found[0]


def measure_all(settings: list[DispatchBench]) -> list[dict[str, Any]]:
    """Results of several settings with the same number of ranks, measured by the same processes one after another.

    Empty on ranks of torchrun other than 0.
    """
    facts = machine.facts(settings[0].device)
    measured = on_ranks(_run_each, settings, settings[0].ranks, settings[0].device)
    if measured is None:
        return []
    results = [one | {"machine": facts} for one in measured]
    wanted = [name for name in settings[0].peers if name in mpi_ranks.MPI_PEERS]
    reason = mpi_ranks.why_not() if settings[0].device == "cpu" else None
    if wanted and settings[0].device == "cpu" and reason is None:
        try:
            stats = mpi_ranks.run_mpi(settings, threads_per_rank(settings[0].ranks))
            for one, found in zip(results, stats, strict=True):
                add_peers(one, found, mpi_ranks.WHEN)
                add_details(one, found)
        except RuntimeError as failed:
            reason = str(failed)
    if reason:
        for one in results:
            one["skipped"] |= dict.fromkeys(wanted, reason)
    return results


def _run_each(settings: list[DispatchBench], threads: int) -> list[dict[str, Any]]:
    return [run(one, threads) for one in settings]
