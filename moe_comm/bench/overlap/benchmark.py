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
from rich.table import Table

from moe_comm.bench.common import report
from moe_comm.bench.common.interleave import measure_interleaved
from moe_comm.bench.common.ranks import on_hosts, run_benchmark, say
from moe_comm.bench.common.settings import OverlapBench
from moe_comm.bench.overlap.contest import (
    DIRECTIONS,
    MeasuredRates,
    OperatorContest,
    fitting,
    measure,
)
from moe_comm.bench.overlap.layer import OverlapLayerContest, widths
from moe_comm.bench.overlap.operators import (
    DispatchMatmulContest,
    GatherMatmulContest,
    MatmulCombineContest,
    MatmulScatterContest,
)
from moe_comm.bench.overlap.timeline import TimelineStep, check_packages, record, write_timelines

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
    """Run ``moe-comm bench overlap``, see ``run_benchmark``.

    Args:
        trace, png: files for timelines, as a Perfetto trace and as a picture.
    """

    timelines: list[TimelineStep] = []

    def measure() -> dict[str, Any]:
        def task(links: list[float]) -> tuple[OverlapBench, float, bool]:
            # The ranks of a host share its link.
            return bench, min(links) * 1e9 / 8 / bench.ranks_per_host, bool(trace or png)

        (measured, steps), links = on_hosts(run, task, bench.hosts, bench.ranks_per_host, bench.link_gbit)
        timelines.extend(steps)
        worst = slowest(measured["results"])
        settings = asdict(bench)
        return {"benchmark": "overlap", **measured, **worst, "link_gbit_measured": links, "settings": settings}

    for out in (trace, png):
        report.check_writable(out)
    check_packages(trace, png)
    result = run_benchmark(measure, tables, json_out)
    write_timelines(timelines, trace, png)  # after the results are stored
    return result


MESSAGES = (
    "comm: the messages of serial alone, one per pair of ranks; in chunks: those of overlapped alone. Several messages "
    "use a link better than one, so comm may be longer than all of overlapped"
)
HIDDEN = (
    "hidden: time saved by overlap, compared with compute and then comm in chunks, as a fraction of the shorter of "
    "the two; 1 is all of it, below 0 is a loss"
)
OPERATOR_COLUMNS: tuple[report.Column, ...] = (
    ("", lambda row: f"{row['op']}, {row['direction']}"),
    ("ratio", lambda row: f"{row['ratio']:g}"),
    ("rows", "rows"),
    ("compute ms", "compute_ms"),
    ("comm", "comm_ms"),
    ("in chunks", "chunked_comm_ms"),
    ("serial", "serial_ms"),
    *report.timed("overlapped", "overlapped"),
    ("than serial", lambda row: report.faster_or_slower(row["vs_serial_paired"])),
    ("hidden", lambda row: f"{row['hidden']:.2f}"),
)
LAYER_COLUMNS: tuple[report.Column, ...] = (
    ("F", "ffn"),
    ("", "phase"),
    ("compute ms", "compute_ms"),
    ("comm", "comm_ms"),
    ("in chunks", "chunked_comm_ms"),
    ("serial", "serial_ms"),
    ("overlapped", "overlapped_ms"),
    (report.SPREAD, lambda row: report.spread(row, "overlapped") if row["phase"] == "total" else ""),
    ("hf ep", "hf_ep_ms"),
    ("than serial", lambda row: _gain(row, "serial_ms")),
    ("than hf ep", lambda row: _gain(row, "hf_ep_ms")),
    ("hidden", lambda row: f"{row['hidden']:.2f}" if row["phase"] == "total" else ""),
)


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the tables of operators and of MoE layers: times of their parts, and the hidden fraction."""
    s, worst, caption = result["settings"], result["slowest_case"], report.captions(MESSAGES, HIDDEN)
    if worst is not None:
        where = f"{worst['op']}, {worst['direction']}, {worst['rows']} rows"
        least = (
            f"{report.faster_or_slower(result['slowest_vs_serial'])} than serial ({where}, ratio {worst['ratio']:g})"
        )
        caption = f"smallest gain of overlapped: {least}\n{caption}"
    links = report.hosts(s, result["link_gbit_measured"])
    heading = f"{links}, at most {s['chunks']} chunks; {report.machine(result)}"
    found = []
    if result["results"]:
        found.append(report.make_table(heading, OPERATOR_COLUMNS, result["results"], caption))
    if result["layer"]:
        experts = f"{s['experts']} experts" if s["experts"] else "8 experts per rank"
        heading = f"MoE layer: {s['tokens']} tokens per rank, D {s['hidden']}, {experts}, K {s['top_k']}"
        reasons = {row["skipped"] for row in result["layer"]} - {None}
        caption = report.captions(
            MESSAGES, HIDDEN, *(f"Hugging Face's expert parallelism: {reason}" for reason in reasons)
        )
        rows = [row for layer in result["layer"] for row in _layer_rows(layer)]
        found.append(report.make_table(heading, LAYER_COLUMNS, rows, caption))
    return found


def _layer_rows(layer: dict[str, Any]) -> list[report.Row]:
    """Return the lines of the forward pass, the backward pass and both of a layer."""
    rows: list[report.Row] = [
        {"ffn": layer["ffn"], "phase": phase}
        | {key.replace(f"_{phase}_ms", "_ms"): ms for key, ms in layer.items() if key.endswith(f"_{phase}_ms")}
        for phase in DIRECTIONS
    ]
    return [*rows, layer | {"phase": "total"}]


def _gain(row: report.Row, other: str) -> str:
    return "-" if row.get(other) is None else report.faster_or_slower(row["overlapped_ms"] / row[other])
