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
is computed from measured rates, so the measured ratio differs from the requested one. MoE layers are measured too,
and timelines are recorded if files for them are given.

The layers are overlapped, serial, and Hugging Face's expert parallelism: forward and backward, including the router,
with the same weights and inputs. ``compute`` is the experts only, ``comm`` is dispatch and combine only, both with
their backward passes.

    serial                  d  c c c  d    d  c c c c c c  d         c: one GEMM of all rows, d: one transfer of them
    overlapped, at best     max(3 c, 2 d)  max(6 c, 2 d)             the gain is largest if d is 2 to 3 times c
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn

from moe_comm.bench.common import report
from moe_comm.bench.common.inputs import check_result
from moe_comm.bench.common.interleave import Phases, measure_interleaved
from moe_comm.bench.common.ranks import on_hosts, run_benchmark, say
from moe_comm.bench.common.settings import LayerBench, OverlapBench
from moe_comm.bench.layer import benchmark as layers
from moe_comm.bench.layer.peers import HuggingFaceEPLayer, LayerWeights, MoeCommLayer
from moe_comm.bench.overlap.contest import (
    DIRECTIONS,
    MeasuredRates,
    OperatorContest,
    fitting,
    hidden_of,
    measure,
)
from moe_comm.bench.overlap.operators import (
    DispatchMatmulContest,
    GatherMatmulContest,
    MatmulCombineContest,
    MatmulScatterContest,
)
from moe_comm.bench.overlap.timeline import TimelineStep, check_packages, record, write_timelines
from moe_comm.overlap.options import TILE

GEMM_SIZE, GEMM_ROUNDS = 1024, 5
CONTESTS: dict[str, type[OperatorContest]] = {
    kind.operator: kind
    for kind in (GatherMatmulContest, MatmulScatterContest, DispatchMatmulContest, MatmulCombineContest)
}
GEMMS_PER_TRANSFER = 2.5
"""d / c of the layer (see above) if no width is given."""
WIDTH_MULTIPLE = 64
HF_EP = HuggingFaceEPLayer.name


class Serial(MoeCommLayer):
    """``MoELayer`` without overlap."""

    name = "serial"


class Overlapped(MoeCommLayer):
    """``MoELayer`` with overlap."""

    name = "overlapped"

    def __init__(self, settings: LayerBench, rank: int, bench: OverlapBench) -> None:
        self._overlap = bench.overlap
        super().__init__(settings, rank)

    def build(self, weights: LayerWeights) -> nn.Module:
        module: Any = super().build(weights)
        module.overlap = self._overlap
        return module  # type: ignore[no-any-return]


def settings_of(bench: OverlapBench, ffn: int) -> LayerBench:
    """Return the settings of ``bench layer`` for the layers, with a backend that uses the link."""
    return LayerBench(
        ranks=bench.world,
        tokens=bench.tokens,
        hidden=bench.hidden,
        experts=bench.num_experts,
        top_k=bench.top_k,
        seed=bench.seed,
        ffn=ffn,
        backend="all_to_all",
        memory=False,
    )


def widths(bench: OverlapBench, machine: MeasuredRates) -> tuple[int, ...]:
    """Return the expert widths to measure: ``bench.ffn``, or the width with the ratio ``GEMMS_PER_TRANSFER``."""
    if bench.ffn:
        return bench.ffn
    balanced = machine.balanced(bench.world) / GEMMS_PER_TRANSFER
    return (max(WIDTH_MULTIPLE, round(balanced / WIDTH_MULTIPLE) * WIDTH_MULTIPLE),)


class OverlapLayerContest:
    """The layers of one width. ``skipped`` is the reason why Hugging Face's layer is missing, or None."""

    def __init__(self, bench: OverlapBench, ffn: int) -> None:
        self.bench, self.ffn = bench, ffn
        settings, rank = settings_of(bench, ffn), dist.get_rank()
        self.skipped = HuggingFaceEPLayer.unavailable_reason(settings) if bench.peers else "peers=False"
        contestants: list[Any] = [Serial(settings, rank), Overlapped(settings, rank, bench)]
        if self.skipped is None:
            contestants.append(HuggingFaceEPLayer(settings, rank))
        inputs = layers.make_inputs(settings, rank)
        self.runners = {contestant.name: layers.ContestantRun(contestant, *inputs) for contestant in contestants}
        self._inputs = inputs
        # Sends the messages of the overlapped layer and computes next to nothing.
        self.narrow = layers.ContestantRun(Overlapped(settings_of(bench, TILE), rank, bench), *inputs)

    def check(self) -> None:
        """Compare the results: serial and overlapped in bits, Hugging Face's with a tolerance. Collective."""
        results = []
        for name in (Serial.name, Overlapped.name):
            runner = self.runners[name]
            runner.forward()
            runner.backward()
            results.append(runner.results())
            runner.free()
        for what, expected in results[0].items():
            check_result("MoE layer", what, results[1][what], expected, bits=True)
        if HF_EP in self.runners:
            layers.check([self.runners[Serial.name], self.runners[HF_EP]])

    def measure(self) -> dict[str, Any]:
        """Return the times in milliseconds and the speedups. Collective."""
        phases = {
            name: (("forward", runner.forward), ("backward", runner.backward)) for name, runner in self.runners.items()
        }
        contestants: dict[str, Phases] = {**phases, "compute": self._compute(), "comm": self._comm()}
        contestants["chunked_comm"] = (("forward", self.narrow.forward), ("backward", self.narrow.backward))

        def on_done(name: str) -> None:
            if name in self.runners:
                self.runners[name].free()
            elif name == "chunked_comm":
                self.narrow.free()

        stats = measure_interleaved(
            contestants, self.bench.warmup, self.bench.rounds, seconds=self.bench.seconds, on_done=on_done
        )
        row: dict[str, Any] = {"op": "moe_layer", "direction": "forward and backward", "ffn": self.ffn}
        for name in contestants:
            key = "hf_ep" if name == HF_EP else name
            for phase in ("forward", "backward", "total"):
                row[f"{key}_ms" if phase == "total" else f"{key}_{phase}_ms"] = stats[name, phase]["median_ms"]
        for which in ("min_ms", "p90_ms"):
            row |= {f"{name}_{which}": stats[name, "total"][which] for name in (Serial.name, Overlapped.name)}
        row |= hidden_of(row)
        row["comm_share"] = row["comm_ms"] / row["serial_ms"]
        row["speedup_vs_serial"] = row["serial_ms"] / row["overlapped_ms"]
        hf_ms = row.get("hf_ep_ms")
        row["speedup_vs_hf_ep"] = None if hf_ms is None else hf_ms / row["overlapped_ms"]
        return row | {"rounds": stats[Serial.name, "total"]["iterations"], "skipped": self.skipped}

    def timelines(self) -> list[TimelineStep]:
        """Record one step of the serial and of the overlapped layer. Collective."""
        steps = []
        for name in (Serial.name, Overlapped.name):
            runner = self.runners[name]

            def step(runner: layers.ContestantRun = runner) -> None:
                runner.forward()
                runner.backward()
                runner.free()

            steps.append(record(f"MoE layer of width {self.ffn}", name, step))
        return steps

    def close(self) -> None:
        """Release the resources of the layers. Collective."""
        for runner in (*self.runners.values(), self.narrow):
            runner.contestant.close()

    def _compute(self) -> Phases:
        """Return forward and backward of the experts only."""
        module: Any = self.runners[Serial.name].contestant.module
        with torch.no_grad():
            routing = module.router(self._inputs[0], 1)
            dispatched = module.dispatcher.dispatch(self._inputs[0], routing.ids_TK)
        rows, sizes = dispatched.rows_RD.detach().requires_grad_(), dispatched.handle.rows_per_expert
        grad, leaves = torch.ones_like(rows), (rows, module.experts.w13, module.experts.w2)
        return _phases(lambda: module.experts(rows, sizes), leaves, lambda: grad)

    def _comm(self) -> Phases:
        """Return forward and backward of dispatch and combine only."""
        module: Any = self.runners[Serial.name].contestant.module
        x_TD, grad_TD = self._inputs
        with torch.no_grad():
            routing = module.router(x_TD, 1)
        x, weights = x_TD.clone().requires_grad_(), routing.weights_TK.detach().requires_grad_()

        def forward() -> Tensor:
            dispatched = module.dispatcher.dispatch(x, routing.ids_TK)
            y: Tensor = module.dispatcher.combine(dispatched.rows_RD, weights, dispatched.handle)
            return y

        return _phases(forward, (x, weights), lambda: grad_TD)


def _phases(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], grad: Callable[[], Tensor]) -> Phases:
    """Return the phases forward and backward."""
    outputs: list[Tensor] = []

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs.pop(), leaves, grad())

    return ("forward", lambda: outputs.append(forward())), ("backward", backward)


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
