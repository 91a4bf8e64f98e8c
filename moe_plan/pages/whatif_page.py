"""An HTML page about the cost of stragglers: slowdown by worker, operation, coordinate and step."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import Any

from moe_comm.observe.report.page import Panel, block, panel_section
from moe_comm.runtime.safe_files import write_file
from moe_plan.arrays import Floats
from moe_plan.pages import make_page
from moe_plan.whatif.analysis import WhatIf
from moe_plan.whatif.text import ONE_STEP, HeatMap, rank_heat, stage_heat


def write_page(analysis: WhatIf, path: Path, title: str) -> None:
    """Write the page to ``path``. Raises MissingDependency without plotly, OSError if the file cannot be written."""
    write_file(path, render(analysis, title))


def render(analysis: WhatIf, title: str) -> str:
    """Return the page. ``title`` is plain text."""
    data = page_data(analysis)
    parts = [block("summary", "In short", '<dl class="tiles" id="tiles"></dl>', wide=True)]
    parts += [panel_section(panel) for panel in _panels(data)]
    steps = (
        f"step {analysis.steps[0]}"
        if len(analysis.steps) == 1
        else f"steps {analysis.steps[0]} to {analysis.steps[-1]}"
    )
    about = (
        f"What stragglers cost in {steps}. S is the time of the replayed steps relative to steps in which each "
        f"operation takes the mean time of its class. Both exclude the gaps between operations."
    )
    if len(analysis.steps) == 1:
        about += f" Caution: {ONE_STEP}."
    named = f"{title} – moe-comm whatif"  # noqa: RUF001
    return make_page("whatif_page.js", named, f"What if: {title}", about, parts, data)


def page_data(analysis: WhatIf) -> dict[str, Any]:
    """Return the data of the page's script, without NaN."""
    heats = {"data-parallel rank by pipeline stage": stage_heat(analysis)}
    if (heat_of_ranks := rank_heat(analysis)) is not None:
        heats = {"every rank": heat_of_ranks, **heats}
    return {
        "summary": _summary(analysis),
        "heats": [_heat(name, heat) for name, heat in heats.items()],
        "operations": [[name, value] for name, value in analysis.by_operation.items()],
        "places": _places(analysis),
        "steps": list(analysis.steps),
        "slowdown": _numbers(analysis.slowdown_S),
        "routing": _numbers(analysis.replayed_S / analysis.even_S),
        "measured_ms": _numbers(1e3 * analysis.measured_S),
        "replayed_ms": _numbers(1e3 * analysis.replayed_S),
        "even_ms": _numbers(1e3 * analysis.even_S),
        "ideal_ms": _numbers(1e3 * analysis.ideal_S),
    }


def _panels(data: dict[str, Any]) -> tuple[Panel, ...]:
    heats, places = (
        tuple((str(at), html.escape(one["name"])) for at, one in enumerate(data[key])) for key in ("heats", "places")
    )
    return (
        Panel("workers", "Slowdown by worker", "S with only this worker's measured durations.", heats, wide=True),
        Panel("operations", "Slowdown by operation", "S with only the measured durations of this kind of operation."),
        Panel(
            "places", "Slowdown by coordinate and group", "S with only the measured durations of these ranks.", places
        ),
        Panel("slowdown", "Slowdown by step", "S of each step, and the part that uneven routing causes, if known."),
        Panel("seconds", "Time by step", "Measured, replayed, and ideal."),
    )


def _summary(analysis: WhatIf) -> list[dict[str, Any]]:
    shown = (
        ("Slowdown S", analysis.slowdown, ""),
        ("Wasted", analysis.waste, "%"),
        ("S of uneven routing", analysis.routing, ""),
        ("S of the rest", analysis.slowdown / analysis.routing, ""),
        ("Saved of the waste by fixing the slowest ranks", analysis.slowest_ranks_share, "%"),
        ("Saved of the waste by fixing the last stage", analysis.last_stage_share, "%"),
        ("Error of the replay", analysis.replay_error, "%"),
        ("Steps", len(analysis.steps), ""),
    )
    return [
        {"name": name, "value": float(f"{value:.4g}") if math.isfinite(value) else None, "unit": unit}
        for name, value, unit in shown
    ]


def _places(analysis: WhatIf) -> list[dict[str, Any]]:
    places = [
        {"name": name, "labels": [f"{name} {index}" for index in range(len(values))], "values": list(values)}
        for name, values in analysis.by_coordinate.items()
        if len(values) > 1
    ]
    places += [
        {
            "name": f"{name} group",
            "labels": [f"ranks {', '.join(map(str, ranks[:8]))}{' ...' * (len(ranks) > 8)}" for ranks in groups],
            "values": list(groups.values()),
        }
        for name, groups in analysis.by_group.items()
    ]
    ranks = [worker for worker in analysis.ranks if math.isfinite(worker.slowdown)]
    rank_data = {"name": "rank", "labels": [f"rank {worker.rank}" for worker in ranks]}
    return [*places, rank_data | {"values": [worker.slowdown for worker in ranks]}]


def _heat(name: str, heat: HeatMap) -> dict[str, Any]:
    cells = [_numbers(row) for row in heat.slowdown]
    return {"name": name, "rows": list(heat.rows), "columns": list(heat.columns), "z": cells}


def _numbers(values: Floats) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
