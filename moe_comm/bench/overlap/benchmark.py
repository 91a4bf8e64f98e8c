"""``moe-comm bench overlap``: what the fused operators hide, between hosts whose link has a given rate.

For each operator, direction and ratio (communication over compute) these take turns in every round:

    compute    the products alone, all rows at hand          comm         what moves the rows alone
    serial     one after the other, as it is without         overlapped   the operator
               the operator

    hidden = (serial - overlapped) / min(compute, comm)       1: all of the smaller one

Then serial and overlapped alone take turns call by call, each first in every other pair: ``vs_serial_paired`` is the
median of the ratios of such pairs, and ``vs_serial_range`` where the true one is with 95% probability.

A fifth, ``wire``, is the transfers of ``comm`` without what the processor does for them: gathers, sums.

The ratio comes from the width that is not sent: its products take longer, its bytes stay the same. It is chosen by the
machine's measured rates and what the parts take; the times that were measured, not the ratio asked for, are exact.
Then whole MoE layers (``layer.py``), and, if files for them are given, timelines of one step of everything.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import torch

from moe_comm.bench.common import machine, report
from moe_comm.bench.common.race import race
from moe_comm.bench.common.ranks import on_ranks
from moe_comm.bench.hosts.namespaces import Hosts, why_not
from moe_comm.bench.hosts.ranks import measure_links, run_on_hosts
from moe_comm.bench.overlap import timeline_files
from moe_comm.bench.overlap.case import DIRECTIONS, SWEEP, Contest, Machine, OverlapBench, fitting, measure
from moe_comm.bench.overlap.experts import DispatchMatmul, MatmulCombine
from moe_comm.bench.overlap.layer import LayerContest, widths
from moe_comm.bench.overlap.linear import GatherMatmul, MatmulScatter
from moe_comm.bench.overlap.timeline import Step, record
from moe_comm.errors import ConfigError

__all__ = ["SWEEP", "OverlapBench", "main"]

GEMM_SIZE, GEMM_ROUNDS = 1024, 5
LINK_BYTES = 32 << 20
"""Sent to measure the links; far more than what passes at once."""
TIMEOUT_S = 3600.0
CONTESTS: dict[str, type[Contest]] = {
    kind.operator: kind for kind in (GatherMatmul, MatmulScatter, DispatchMatmul, MatmulCombine)
}


def run(task: tuple[OverlapBench, float, bool], threads: int) -> tuple[dict[str, Any], list[Step]]:
    """One rank's part. Of the task: what to measure, the link's bytes/s, whether to take down timelines.

    Returns the results and timelines, on every rank.
    """
    bench, link, traced = task
    a, b = torch.randn(GEMM_SIZE, GEMM_SIZE), torch.randn(GEMM_SIZE, GEMM_SIZE)
    gemm = race({"gemm": (("total", lambda: torch.mm(a, b)),)}, 1, GEMM_ROUNDS)["gemm", "total"]
    here = Machine(2 * GEMM_SIZE**3 / (gemm["median_ms"] * 1e-3), link)
    results: list[dict[str, Any]] = []
    found: dict[str, Any] = {"results": results, "layer": [], "gemm_gflops": here.flops_per_s * 1e-9}
    steps: list[Step] = []
    for operator, direction, ratio in itertools.product(bench.operators, DIRECTIONS, bench.ratios):
        kind = CONTESTS[operator]
        other = fitting(kind, direction, ratio, bench, here)
        for rows in bench.rows:
            contest = kind(direction, bench, rows, other)
            contest.check()
            results.append(_asked(contest, ratio) | measure(contest))
            if traced and rows == max(bench.rows) and ratio == min(bench.ratios, key=lambda r: abs(r - 1)):
                parts = contest.parts()
                steps += [record(contest.name, name, parts[name]) for name in ("serial", "overlapped")]
    if bench.layer:
        for ffn in widths(bench, here):
            layer = LayerContest(bench, ffn)
            try:
                layer.check()
                found["layer"].append(layer.measure())
                steps += layer.timelines() if traced else []
            finally:
                layer.close()
    return found, steps


def _asked(contest: Contest, ratio: float) -> dict[str, Any]:
    return {
        "op": contest.operator,
        "direction": contest.direction,
        "ratio": ratio,
        "rows": contest.rows,
        "other_width": contest.other,
    }


def slowest(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Where an operator does worst against one step after the other: ``slowest_vs_serial``, 1.03 being 3% slower.

    By calls next to each other: medians of few rows scatter more than that.
    """
    if not results:
        return {"slowest_vs_serial": None, "slowest_case": None}
    worst = max(results, key=lambda row: row["vs_serial_paired"])
    case = {key: worst[key] for key in ("op", "direction", "ratio", "rows")}
    return {"slowest_vs_serial": worst["vs_serial_paired"], "slowest_case": case}


def main(
    bench: OverlapBench, json_out: str | None = None, trace: str | None = None, png: str | None = None
) -> dict[str, Any]:
    """Make the hosts, measure, print a table, write files; the body of ``moe-comm bench overlap``.

    Args:
        json_out: file for the JSON object; ``-`` is standard output.
        trace, png: files for timelines, as a Perfetto trace and as a picture.

    Raises:
        ConfigError: hosts cannot be made here (not root, no iproute2).
        MissingDependency: a file for timelines is wanted and the package that writes it is not there.
        WrongAnswer: an operator does not give what its parts give.
    """
    for out in (json_out, trace, png):
        report.check_writable(out)
    timeline_files.check_packages(trace, png)
    if problem := why_not():
        raise ConfigError(f"cannot make {bench.hosts} hosts: {problem}")
    facts = machine.facts("cpu")
    with Hosts(bench.hosts, bench.link_gbit) as hosts:
        links = measure_links(hosts, LINK_BYTES)
        # A host's ranks share its link.
        link = min(links) * 1e9 / 8 / bench.ranks_per_host
        args = (run, (bench, link, bool(trace or png)), bench.world, "cpu")
        measured, steps = run_on_hosts(on_ranks, args, hosts, bench.ranks_per_host, TIMEOUT_S)[0]
    found = {
        "benchmark": "overlap",
        **measured,
        **slowest(measured["results"]),
        "link_gbit_measured": links,
        "settings": asdict(bench),
        "machine": facts,
    }
    report.write_json(found, json_out)
    timeline_files.write(steps, trace, png)
    report.show(report.overlap_tables(found), json_out)
    return found
