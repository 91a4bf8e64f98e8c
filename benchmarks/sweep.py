"""Sweeps of ``bench dispatch``: small batches, where overhead shows, and growth, which must be linear."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moe_comm.bench.common import report
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
    """``moe-comm bench`` over one axis.

    axis: ``tokens`` or ``hidden``.
    values: points, increasing; each is ``base`` with that one setting changed.
    """

    base: DispatchBench
    axis: str
    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.axis not in ("tokens", "hidden"):
            raise ConfigError(f"a sweep is over tokens or hidden; got {self.axis!r}")
        if not self.values or list(self.values) != sorted(set(self.values)):
            raise ConfigError(f"the values of a sweep must increase; got {self.values}")

    def points(self) -> list[DispatchBench]:
        """The settings of each point."""
        if self.axis == "tokens":
            return [replace(self.base, tokens=value) for value in self.values]
        return [replace(self.base, hidden=value) for value in self.values]


def linearity(values: tuple[int, ...], times: list[float]) -> dict[str, float]:
    """How linear ``times`` grow: time per unit at the last point over that at the first, and the log-log slope.

    Both are 1 for exact proportionality; a fixed overhead makes both smaller, anything superlinear larger.
    """
    import numpy as np

    slope = float(np.polyfit(np.log(values), np.log(times), 1)[0]) if len(values) > 1 else 1.0
    return {"unit_cost_ratio": (times[-1] / values[-1]) / (times[0] / values[0]), "log_slope": slope}


def run(sweep: Sweep) -> dict[str, Any]:
    """Measure every point with the same processes; one JSON object. Empty on ranks of torchrun other than 0."""
    results = measure_all(sweep.points())
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
        "machine": results[0]["machine"],
        "skipped": results[0]["skipped"],
        "points": results,
    }


def small(base: DispatchBench, json_out: str | None = None) -> dict[str, Any]:
    """Batches of 1 to 64 tokens: microseconds of ours above the bare copy, forward. Prints tables and writes JSON.

    Twice: calls in a row, as one decoding step after the other makes them, and single calls after a barrier of
    another library, which leaves cold caches behind.
    """
    report.check_writable(json_out)
    base = replace(base, backward=False)
    found: dict[str, Any] = {"benchmark": "small batches"}
    for name, in_a_row in (("in_a_row", IN_A_ROW), ("after_a_barrier", 1)):
        swept = run(Sweep(replace(base, in_a_row=in_a_row), "tokens", SMALL))
        if not swept:
            return {}
        swept["overhead_us"] = {one["settings"]["tokens"]: one["overhead_us"] for one in swept["points"]}
        found[name] = swept
    report.write_json(found, json_out)
    report.show(
        [table for name in ("in_a_row", "after_a_barrier") for table in report.small_tables(found[name]["points"])],
        json_out,
    )
    return found
