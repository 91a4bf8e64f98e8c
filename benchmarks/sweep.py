"""Sweeps of ``bench dispatch``: overhead of small batches, and scaling with tokens or hidden size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from moe_comm.bench.common import report
from moe_comm.bench.common.machine import machine_info
from moe_comm.bench.common.settings import SMALL_TOKENS, DispatchBench
from moe_comm.bench.dispatch.benchmark import measure_all
from moe_comm.errors import ConfigError

TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
HIDDEN = (128, 256, 512, 1024, 2048, 4096)
SMALL = (1, 2, 4, 8, 16, 32, SMALL_TOKENS)
IN_A_ROW = 50
PHASES = ("dispatch", "combine", "combine_backward", "dispatch_backward")


@dataclass(frozen=True)
class Sweep:
    """``bench dispatch`` with increasing values of one setting.

    Args:
        base: settings.
        axis: setting to change, ``tokens`` or ``hidden``.
        values: increasing values.
    """

    base: DispatchBench
    axis: str
    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.axis not in ("tokens", "hidden"):
            raise ConfigError(f"axis must be tokens or hidden; got {self.axis!r}")
        if not self.values or list(self.values) != sorted(set(self.values)):
            raise ConfigError(f"values must be increasing and not empty; got {self.values}")

    def points(self) -> list[DispatchBench]:
        """Return the settings of all points."""
        return [replace(self.base, **{self.axis: value}) for value in self.values]  # type: ignore[arg-type]


def linearity(values: tuple[int, ...], times: list[float]) -> dict[str, float]:
    """Return the ratio of the last to the first unit cost, and the log-log slope.

    Both are 1 for proportional times, smaller with a fixed overhead, and larger for superlinear growth.
    """
    import numpy as np

    slope = float(np.polyfit(np.log(values), np.log(times), 1)[0]) if len(values) > 1 else 1.0
    return {"unit_cost_ratio": (times[-1] / values[-1]) / (times[0] / values[0]), "log_slope": slope}


def run(sweep: Sweep) -> dict[str, Any]:
    """Measure all points in the same processes. Return the JSON object; empty on ranks of torchrun other than 0."""
    info = machine_info(sweep.base.device)
    results = [one | {"machine": info} for one in measure_all(sweep.points())]
    if not results:
        return {}
    lines: dict[str, list[float]] = {f"moe_comm {phase}": [one[f"{phase}_ms"] for one in results] for phase in PHASES}
    lines |= {f"limit {phase}": [one[f"{phase}_limit_ms"] for one in results] for phase in PHASES[:2]}
    for name in results[0]["peers"]:
        for phase in PHASES[:2]:
            lines[f"{name} {phase}"] = [one["peers"][name][f"{phase}_ms"] for one in results]
    lines = {name: times for name, times in lines.items() if None not in times}
    return {
        "benchmark": f"dispatch over {sweep.axis}",
        "axis": sweep.axis,
        "values": list(sweep.values),
        "milliseconds": lines,
        "linearity": {name: linearity(sweep.values, times) for name, times in lines.items()},
        "settings": results[0]["settings"],
        "machine": info,
        "skipped": results[0]["skipped"],
        "points": results,
    }


def small(base: DispatchBench, json_out: str | None = None) -> dict[str, Any]:
    """Measure the forward overhead over bare copies for batches of 1 to 64 tokens, print tables, write JSON.

    Measured twice: consecutive calls, as in decoding, and single calls after a barrier, with cold caches.
    """
    report.check_writable(json_out)
    base = replace(base, backward=False)
    result: dict[str, Any] = {"benchmark": "small batches"}
    for name, in_a_row in (("in_a_row", IN_A_ROW), ("after_a_barrier", 1)):
        sweep = run(Sweep(replace(base, in_a_row=in_a_row), "tokens", SMALL))
        if not sweep:
            return {}
        sweep["overhead_us"] = {one["settings"]["tokens"]: one["overhead_us"] for one in sweep["points"]}
        result[name] = sweep
    report.write_json(result, json_out)
    report.show([table(result[name]["points"]) for name in ("in_a_row", "after_a_barrier")], json_out)
    return result


def table(results: list[dict[str, Any]]) -> Table:
    """Return the table of small batches: this library, the bare copies, and the difference, in microseconds."""

    def microseconds(key: str) -> Callable[[report.Row], float | None]:
        return lambda row: None if row[key] is None else row[key] * 1e3

    columns: list[report.Column] = [("tokens", lambda row: str(row["settings"]["tokens"]))]
    for phase in PHASES[:2]:
        columns += [(f"{phase} µs", microseconds(f"{phase}_ms")), ("bare", microseconds(f"{phase}_limit_ms"))]
        columns.append(("overhead", lambda row, phase=phase: (row["overhead_us"] or {}).get(phase)))  # type: ignore[misc]
    in_a_row = results[0]["settings"]["in_a_row"]
    how = f"mean of {in_a_row} consecutive calls" if in_a_row > 1 else "one call after a barrier"
    title = f"{report.heading(results[0], tokens=False)}; {how}"
    return report.make_table(title, columns, results, report.skipped(results[0]))
