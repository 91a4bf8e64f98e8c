"""``moe-comm bench overlap``: time that overlapped operators hide, between hosts with links of a given rate.

For each operator, direction and ratio of communication to compute, these are interleaved:

    compute      the GEMMs only, with all rows present
    comm         the communication only, with its gathers and sums
    wire         the transfers of ``comm`` only
    serial       communication and GEMMs in sequence, without the overlapped operator
    overlapped   the overlapped operator
    chunked_comm the overlapped operator with the narrowest GEMMs: its messages only

    hidden = (compute + chunked_comm - overlapped) / min(compute, chunked_comm)      1: the shorter one is hidden

Then ``measure_pairs`` compares serial and overlapped: ``vs_serial_paired`` is the median ratio, ``vs_serial_range`` its
95% confidence interval.

The ratio is set by the width that is not sent, which changes the GEMM times but not the transferred bytes. The width
is computed from measured rates, so the measured ratio differs from the requested one. MoE layers are measured too
(``layer.py``), and timelines are recorded if files for them are given.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import torch

from moe_comm.bench.common import machine, report
from moe_comm.bench.common.interleave import measure_interleaved
from moe_comm.bench.common.ranks import on_ranks, say
from moe_comm.bench.hosts.namespaces import Hosts, unavailable_reason
from moe_comm.bench.hosts.on_hosts import LINK_BYTES, TIMEOUT_S
from moe_comm.bench.hosts.ranks import measure_links, run_on_hosts
from moe_comm.bench.overlap import timeline_files
from moe_comm.bench.overlap.contest import (
    DIRECTIONS,
    SWEEP,
    MeasuredRates,
    OperatorContest,
    OverlapBench,
    fitting,
    measure,
)
from moe_comm.bench.overlap.experts import DispatchMatmulContest, MatmulCombineContest
from moe_comm.bench.overlap.layer import OverlapLayerContest, widths
from moe_comm.bench.overlap.linear import GatherMatmulContest, MatmulScatterContest
from moe_comm.bench.overlap.timeline import TimelineStep, record
from moe_comm.errors import ConfigError

__all__ = ["SWEEP", "OverlapBench", "main"]

GEMM_SIZE, GEMM_ROUNDS = 1024, 5
CONTESTS: dict[str, type[OperatorContest]] = {
    kind.operator: kind
    for kind in (GatherMatmulContest, MatmulScatterContest, DispatchMatmulContest, MatmulCombineContest)
}


def run(task: tuple[OverlapBench, float, bool], threads: int) -> tuple[dict[str, Any], list[TimelineStep]]:
    """Run the benchmark on this rank. Return the results and the timelines, the same on every rank.

    Args:
        task: settings, rate of the link in bytes/s, and whether to record timelines.
        threads: number of threads of this rank.
    """
    bench, link, traced = task
    a, b = (
        torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.float32, device="cpu"),
        torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.float32, device="cpu"),
    )
    gemm = measure_interleaved({"gemm": (("total", lambda: torch.mm(a, b)),)}, 1, GEMM_ROUNDS)["gemm", "total"]
    rates = MeasuredRates(2 * GEMM_SIZE**3 / (gemm["median_ms"] * 1e-3), link)
    results: list[dict[str, Any]] = []
    result: dict[str, Any] = {"results": results, "layer": [], "gemm_gflops": rates.flops_per_s * 1e-9}
    steps: list[TimelineStep] = []
    for operator, direction, ratio in itertools.product(bench.operators, DIRECTIONS, bench.ratios):
        kind = CONTESTS[operator]
        say(f"{operator} {direction}, ratio {ratio:g}: choosing the width, then measuring")
        other = fitting(kind, direction, ratio, bench, rates)
        for rows in bench.rows:
            contest = kind(direction, bench, rows, other)
            contest.check()
            case = {"op": operator, "direction": direction, "ratio": ratio, "rows": rows, "other_width": other}
            results.append(case | measure(contest))
            if traced and rows == max(bench.rows) and ratio == min(bench.ratios, key=lambda r: abs(r - 1)):
                parts = contest.parts()
                steps += [record(contest.name, name, parts[name]) for name in ("serial", "overlapped")]
    if bench.layer:
        for ffn in widths(bench, rates):
            say(f"MoE layer, F {ffn}: comparing results, then measuring")
            layer = OverlapLayerContest(bench, ffn)
            try:
                layer.check()
                result["layer"].append(layer.measure())
                steps += layer.timelines() if traced else []
            finally:
                layer.close()
    return result, steps


def slowest(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the largest paired ratio of overlapped to serial and its case: ``slowest_vs_serial``, ``slowest_case``."""
    if not results:
        return {"slowest_vs_serial": None, "slowest_case": None}
    worst = max(results, key=lambda row: row["vs_serial_paired"])
    case = {key: worst[key] for key in ("op", "direction", "ratio", "rows")}
    return {"slowest_vs_serial": worst["vs_serial_paired"], "slowest_case": case}


def main(
    bench: OverlapBench, json_out: str | None = None, trace: str | None = None, png: str | None = None
) -> dict[str, Any]:
    """Run ``moe-comm bench overlap``: create the hosts, measure, print a table, write files.

    Args:
        bench: settings of the benchmark.
        json_out: file for the JSON object; ``-`` is standard output.
        trace, png: files for timelines, as a Perfetto trace and as a picture.

    Raises:
        ConfigError: the hosts cannot be created (not root, or no iproute2).
        MissingDependency: the package that writes ``trace`` or ``png`` is not installed.
        WrongAnswer: the results of overlapped and serial differ.
    """
    for out in (json_out, trace, png):
        report.check_writable(out)
    timeline_files.check_packages(trace, png)
    if problem := unavailable_reason():
        raise ConfigError(f"cannot create {bench.hosts} hosts: {problem}")
    info = machine.machine_info("cpu")
    say(f"creating {bench.hosts} hosts and measuring their links")
    with Hosts(bench.hosts, bench.link_gbit) as hosts:
        links = measure_links(hosts, LINK_BYTES)
        # The ranks of a host share its link.
        link = min(links) * 1e9 / 8 / bench.ranks_per_host
        args = (run, (bench, link, bool(trace or png)), bench.world, "cpu")
        measured, steps = run_on_hosts(on_ranks, args, hosts, bench.ranks_per_host, TIMEOUT_S)[0]
    result = {
        "benchmark": "overlap",
        **measured,
        **slowest(measured["results"]),
        "link_gbit_measured": links,
        "settings": asdict(bench),
        "machine": info,
    }
    report.write_json(result, json_out)
    timeline_files.write(steps, trace, png)
    report.show(report.overlap_tables(result), json_out)
    return result
