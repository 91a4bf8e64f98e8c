"""``moe-comm bench plan``: predicted steps against measured ones, and the mapping that planning picks against the best.

For each number of ranks: this machine is calibrated, steps of ``moe-comm train`` are measured with every mapping, and
each is predicted from the calibration, the model and how routing spreads tokens over experts, which is read from the
first mapping's steps: it is a property of the model and the text, whatever the mapping.

regret: how much longer the mapping with the least predicted step really takes than the one that really took least.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from moe_comm.bench.calibrate.fit import shape_of
from moe_comm.bench.calibrate.machine import calibrate
from moe_comm.bench.calibrate.steps import imbalance
from moe_comm.bench.common import machine, report
from moe_comm.bench.hosts.namespaces import Hosts, why_not
from moe_comm.bench.hosts.ranks import run_on_hosts
from moe_comm.bench.plan.ranks import TIMEOUT_S, Measured, measure
from moe_comm.bench.plan.settings import MODEL_KEYS, Case, PlanBench
from moe_comm.plan.machine.hardware import Cluster
from moe_comm.plan.machine.hardware_file import to_json
from moe_comm.plan.model.load import Load
from moe_comm.plan.model.mapping import Place
from moe_comm.plan.step.step import Step, StepModel

TOLERATED, REGRET = 0.15, 0.05
"""Error of a prediction, and regret, that are aimed at."""
Say = Callable[[str], None]


def predict(bench: PlanBench, case: Case, cluster: Cluster, slots_LE: Sequence[Sequence[int]]) -> Step:
    """A step with ``case`` on paper."""
    mapping = case.parsed()
    shape = replace(shape_of({key: getattr(bench, key) for key in MODEL_KEYS}), name="bench")
    load = Load(bench.seq_len, "fp32", imbalance=imbalance(slots_LE, mapping.parallel.ep))
    return StepModel(shape, Place(mapping, cluster), load, bench.batch).predict()


def run(bench: PlanBench, say: Say = print) -> dict[str, Any]:
    """Calibrate, measure and predict; what the file of ``moe-comm bench plan`` holds.

    Raises:
        ConfigError: a mapping does not fit the model or the batch. RankFailed: a rank raised or was killed.
    """
    reason = why_not() if any(case.hosts > 1 for case in bench.cases) else ""
    skipped = {f"{case} on {case.hosts} hosts": reason for case in bench.cases if reason and case.hosts > 1}
    groups: dict[tuple[int, int], list[Case]] = {}
    for case in bench.cases:
        if not (reason and case.hosts > 1):
            groups.setdefault((case.ranks, case.hosts), []).append(case)
    found: list[dict[str, Any]] = []
    known: dict[int, Cluster] = {}
    with tempfile.TemporaryDirectory(prefix="moe_comm-plan-") as folder:
        for (ranks, hosts), cases in groups.items():
            where = f"{ranks} ranks" + (f" on {hosts} hosts" if hosts > 1 else "")
            say(f"{where}: calibrating")
            cluster = calibrated(bench, ranks, hosts, known.get(ranks))
            known[ranks] = cluster
            say(f"{where}: {len(cases)} mappings")
            found.append(_group(bench, cases, cluster, measure(bench, cases, Path(folder))))
    rows = [row for group in found for row in group["mappings"]]
    errors = [abs(row["error"]) for row in rows]
    return {
        "benchmark": "plan",
        "groups": found,
        "median_error": median(errors),
        "worst_error": max(errors),
        "within": sum(error <= TOLERATED for error in errors),
        "mappings": len(rows),
        "worst_regret": max(group["regret"] for group in found),
        "skipped": skipped,
        "settings": bench.to_dict(),
        "command": shlex.join(sys.argv),
    }


def calibrated(bench: PlanBench, ranks: int, hosts: int, host: Cluster | None = None) -> Cluster:
    """This machine as ``ranks`` ranks; with the link of ``bench`` between several hosts. host: as measured before."""
    if hosts == 1:
        return calibrate(ranks)
    with Hosts(hosts, bench.link_gbit) as made:

        def on_hosts(function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
            return run_on_hosts(function, args, made, 1, TIMEOUT_S)

        return calibrate(ranks, on_hosts=on_hosts, hosts=hosts, link=f"{bench.link_gbit:g} Gbit/s", host=host)


def _group(bench: PlanBench, cases: Sequence[Case], cluster: Cluster, measured: Sequence[Measured]) -> dict[str, Any]:
    """Mappings on the same ranks, best first, and what picking by prediction costs."""
    slots = measured[0].loads
    rows = [
        _row(bench, case, one, predict(bench, case, cluster, slots)) for case, one in zip(cases, measured, strict=True)
    ]
    rows.sort(key=lambda row: row["step_ms"])
    pick = min(rows, key=lambda row: row["predicted_ms"])
    return {
        "ranks": cases[0].ranks,
        "hosts": cases[0].hosts,
        "mappings": rows,
        "best": rows[0]["mapping"],
        "pick": pick["mapping"],
        "regret": pick["step_ms"] / rows[0]["step_ms"] - 1,
        "hardware": to_json(cluster),
    }


def _row(bench: PlanBench, case: Case, one: Measured, step: Step) -> dict[str, Any]:
    return {
        "mapping": str(case),
        "case": asdict(case),
        "imbalance": imbalance(one.loads, case.parsed().parallel.ep),
        "step_ms": one.seconds * 1e3,
        "step_min_ms": one.fastest * 1e3,
        "processor_ms": one.processor * 1e3,
        "communication_ms": one.communication * 1e3,
        "predicted_ms": step.seconds * 1e3,
        "error": step.seconds / one.seconds - 1,
        "tokens_per_s": bench.tokens / one.seconds,
        "breakdown_ms": {name: seconds * 1e3 for name, seconds in step.breakdown.items()},
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """For people."""
    s = found["settings"]
    title = (
        f"{s['layers']} layers, D {s['hidden']}, F {s['ffn']}, E {s['experts']}, K {s['top_k']}, "
        f"{s['batch']} sequences of {s['seq_len']}, fp32; {found['machine']['cpu']}, {found['machine']['cores']} cores"
    )
    shown: list[Table] = []
    for group in found["groups"]:
        hosts = f", {group['hosts']} hosts at {s['link_gbit']:g} Gbit/s" if group["hosts"] > 1 else ""
        table = Table(
            title=f"{group['ranks']} ranks{hosts}; {title}" if not shown else f"{group['ranks']} ranks{hosts}",
            caption=f"planning picks {group['pick']}: its step takes {group['regret']:.1%} longer than the fastest's",
            title_justify="left",
            caption_justify="left",
        )
        for name in ("mapping", "measured, ms", "least, ms", "predicted, ms", "predicted off by"):
            table.add_column(name, justify="left" if name == "mapping" else "right", no_wrap=True)
        for row in group["mappings"]:
            cells = (f"{row[key]:,.0f}" for key in ("step_ms", "step_min_ms", "predicted_ms"))
            table.add_row(row["mapping"], *cells, f"{row['error']:+.1%}")
        shown.append(table)
    shown[-1].caption = (
        f"{shown[-1].caption}\nerrors: {found['median_error']:.1%} in the median, {found['worst_error']:.1%} at worst, "
        f"{found['within']} of {found['mappings']} within {TOLERATED:.0%}; worst regret {found['worst_regret']:.1%}"
    )
    return shown


def main(bench: PlanBench, json_out: str | None = None) -> dict[str, Any]:
    """Measure, print tables, write JSON; the body of ``moe-comm bench plan``.

    Args:
        json_out: file for the JSON object; ``-`` is standard output.
    """
    report.check_writable(json_out)
    facts = machine.facts("cpu")
    found = run(bench, lambda text: print(text, file=sys.stderr, flush=True)) | {"machine": facts}
    report.write_json(found, json_out)
    report.show(tables(found), json_out)
    return found
