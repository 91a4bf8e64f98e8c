"""``moe-comm bench overlap``: what the fused operators hide, between hosts whose link has a given rate.

For each operator, direction and ratio (communication over compute) four things take turns in every round:

    compute    the products alone, all rows at hand          comm         the collectives alone
    serial     the collectives, then the products, as        overlapped   the operator
               plain torch does it

    hidden = (serial - overlapped) / min(compute, comm)       1: all of the smaller one

The ratio comes from the width that is not sent: its products take longer, its bytes stay the same. It is computed from
the machine's measured GEMM rate and the link's, so the times that were measured, not the ratio asked for, are exact.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.bench import machine, report
from moe_comm.bench.case import require
from moe_comm.bench.clock import Clock, summarise, sync_group
from moe_comm.bench.host_ranks import measure_links, run_on_hosts
from moe_comm.bench.hosts import Hosts
from moe_comm.bench.ranks import on_ranks
from moe_comm.dispatch.channels import channel_of
from moe_comm.dispatch.plain import added_in_order
from moe_comm.kernels.row_invariant import TILE, row_invariant_mm
from moe_comm.overlap.chunked import Overlap
from moe_comm.overlap.gather_matmul import gather_matmul
from moe_comm.overlap.matmul_scatter import matmul_scatter

GEMM_SIZE = 1024
LINK_BYTES = 32 << 20
"""Sent to measure the links; far more than what passes at once."""
TIMEOUT_S = 900.0
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class OverlapBench:
    """Two-sided linear layers: each of ``rows`` rows a rank, ``width`` of what travels, float32. link_gbit: Gbit/s of
    each host's link. ratios: communication over compute."""

    hosts: int = 2
    ranks_per_host: int = 1
    link_gbit: float = 1.0
    rows: tuple[int, ...] = (2048,)
    width: int = 512
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    chunks: int = 8
    deterministic: bool = True
    warmup: int = 2
    rounds: int = 7
    seed: int = 0

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_per_host


Work = Callable[[], Tensor | tuple[Tensor, ...]]


class _Contest:
    """One operator in one direction: its parts, alone and together."""

    def __init__(self, operator: str, direction: str, bench: OverlapBench, own_rows: int, other: int) -> None:
        world, group = bench.world, dist.group.WORLD
        assert group is not None
        overlap = Overlap(bench.chunks, deterministic=bench.deterministic)
        generator = torch.Generator().manual_seed(bench.seed * 64 + dist.get_rank())

        def draw(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator)

        channel, ones = channel_of(group), [1] * world
        gathers = operator == "gather_matmul"
        rows = own_rows if gathers else own_rows * world
        inner, outputs = (bench.width, other) if gathers else (other, bench.width)
        x, w = draw(rows, inner).requires_grad_(), draw(outputs, inner).requires_grad_()
        operate = gather_matmul if gathers else matmul_scatter
        xd, wd = x.detach(), w.detach()
        forward = direction == "forward"
        whole = draw(own_rows * world, bench.width)
        grad = draw(own_rows * (world if gathers else 1), outputs)

        def gather(part: Tensor) -> Tensor:
            return channel.all_gather(part, "a gather").flatten(0, 1)

        def scatter(parts: Tensor) -> Tensor:
            return added_in_order(channel.all_to_all(parts.unflatten(0, (world, -1)), ones, ones, "a sum"))

        self.compute: Work
        if forward:
            source = whole if gathers else xd
            self.compute = lambda: row_invariant_mm(source, wd.t())
            self.comm: Work = (lambda: gather(xd)) if gathers else (lambda: scatter(whole))
            self.serial: Work = (
                (lambda: row_invariant_mm(gather(xd), wd.t()))
                if gathers
                else (lambda: scatter(row_invariant_mm(xd, wd.t())))
            )
            self.overlapped: Work = lambda: operate(xd, wd, group, overlap)
        elif gathers:
            self.compute = lambda: (row_invariant_mm(grad, wd), grad.t() @ whole)
            self.comm = lambda: (gather(xd), scatter(whole))
            self.serial = lambda: (scatter(row_invariant_mm(grad, wd)), grad.t() @ gather(xd))
        else:
            self.compute = lambda: (row_invariant_mm(whole, wd), whole.t() @ xd)
            self.comm = lambda: gather(grad)

            def serial() -> tuple[Tensor, Tensor]:
                everyone = gather(grad)
                return row_invariant_mm(everyone, wd), everyone.t() @ xd

            self.serial = serial
        if not forward:
            y = operate(x, w, group, overlap)
            self.overlapped = lambda: torch.autograd.grad(y, (x, w), grad, retain_graph=True)

    def parts(self) -> dict[str, Work]:
        return {name: getattr(self, name) for name in ("serial", "overlapped", "compute", "comm")}

    def check(self, name: str) -> None:
        """The operator gives what its parts give one after the other.

        Raises:
            WrongAnswer: it does not.
        """
        both = [found if isinstance(found, tuple) else (found,) for found in (self.overlapped(), self.serial())]
        for number, (got, want) in enumerate(zip(*both, strict=True)):
            require(name, f"result {number}", got, want, bits=number == 0)


def run(task: tuple[OverlapBench, float], threads: int) -> list[dict[str, Any]]:
    """One rank's part. link: bytes/s. Returns the results on every rank."""
    bench, link = task
    world = bench.world
    clock = Clock(sync_group)
    a, b = torch.randn(GEMM_SIZE, GEMM_SIZE), torch.randn(GEMM_SIZE, GEMM_SIZE)
    for _ in range(5):
        clock.measure("gemm", ("total", lambda: torch.mm(a, b)))
    slowest = _everyone(clock)["gemm", "total"]["median_ms"] * 1e-3
    rate = 2 * GEMM_SIZE**3 / slowest
    # comm: (W - 1) S D 4 bytes in, compute: 2 W S D N operations; backward has two products, and gathers twice or once.
    balanced = 4 * (world - 1) * rate / (2 * world * link)
    results = []
    for operator in ("gather_matmul", "matmul_scatter"):
        for direction in DIRECTIONS:
            twice = 2 if operator == "matmul_scatter" and direction == "backward" else 1
            for ratio, rows in itertools.product(bench.ratios, bench.rows):
                other = max(TILE, round(balanced / (ratio * twice) / TILE) * TILE)
                contest = _Contest(operator, direction, bench, rows, other)
                contest.check(f"{operator} {direction}")
                asked: dict[str, Any] = {
                    "op": operator,
                    "direction": direction,
                    "ratio": ratio,
                    "rows": rows,
                    "other_width": other,
                }
                results.append(asked | _measure(contest, bench))
    return results


def _measure(contest: _Contest, bench: OverlapBench) -> dict[str, float]:
    clock = Clock(sync_group)
    parts = list(contest.parts().items())
    gc.disable()
    try:
        for turn in range(bench.warmup + bench.rounds):
            if turn == bench.warmup:
                clock.clear()
            shift = turn % len(parts)
            for name, work in parts[shift:] + parts[:shift]:
                clock.measure(name, ("total", work))
            gc.collect()
    finally:
        gc.enable()
    stats = _everyone(clock)
    times = {f"{name}_ms": stats[name, "total"]["median_ms"] for name, _ in parts}
    saved = times["serial_ms"] - times["overlapped_ms"]
    return times | {"hidden": saved / min(times["compute_ms"], times["comm_ms"])}


def _everyone(clock: Clock) -> dict[tuple[str, str], dict[str, float]]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, dict(clock.times))
    return summarise(every)


def main(bench: OverlapBench, json_out: str | None = None) -> dict[str, Any]:
    """Make the hosts, measure, print a table, write JSON; the body of ``moe-comm bench overlap``.

    Raises:
        ConfigError: hosts cannot be made here (not root, no iproute2).
        WrongAnswer: an operator does not give what its parts give.
    """
    report.check_writable(json_out)
    facts = machine.facts("cpu")
    with Hosts(bench.hosts, bench.link_gbit) as hosts:
        links = measure_links(hosts, LINK_BYTES)
        # A host's ranks share its link.
        link = min(links) * 1e9 / 8 / bench.ranks_per_host
        args = (run, (bench, link), bench.world, "cpu")
        results = run_on_hosts(on_ranks, args, hosts, bench.ranks_per_host, TIMEOUT_S)[0]
    found = {
        "benchmark": "overlap",
        "results": results,
        "link_gbit_measured": links,
        "settings": asdict(bench),
        "machine": facts,
    }
    report.write_json(found, json_out)
    report.show(report.overlap_tables(found), json_out)
    return found
