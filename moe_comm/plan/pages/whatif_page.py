"""What stragglers cost a run, as one file of HTML: slowdown by worker, operation, place and step."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import Any

from moe_comm.observe.report.page import Panel, block, panel_section
from moe_comm.plan.arrays import Floats
from moe_comm.plan.pages import html_page
from moe_comm.plan.whatif.analysis import WhatIf
from moe_comm.plan.whatif.text import Heat, rank_heat, stage_heat


def write_page(found: WhatIf, path: Path, title: str) -> None:
    """Write the page to ``path``.

    Raises:
        MissingDependency: plotly is not installed. OSError: the file cannot be written.
    """
    html_page.write(render(found, title), path)


def render(found: WhatIf, title: str) -> str:
    """The page's HTML; ``title`` is any text."""
    data = page_data(found)
    parts = [block("summary", "In short", '<dl class="tiles" id="tiles"></dl>', wide=True)]
    parts += [panel_section(panel) for panel in _panels(data)]
    steps = f"step {found.steps[0]}" if len(found.steps) == 1 else f"steps {found.steps[0]} to {found.steps[-1]}"
    about = (
        f"What stragglers cost in {steps}. S: the steps as they were over the same with each operation as long as "
        f"those like it are on average, both without the gaps between operations."
    )
    named = f"{title} – moe-comm whatif"  # noqa: RUF001
    return html_page.make("whatif_page.js", named, f"What if: {title}", about, parts, data)


def page_data(found: WhatIf) -> dict[str, Any]:
    """What the page's script draws; no NaN."""
    heats = {"data-parallel rank by pipeline stage": stage_heat(found)}
    if (single := rank_heat(found)) is not None:
        heats = {"every rank": single, **heats}
    return {
        "summary": _summary(found),
        "heats": [_heat(name, heat) for name, heat in heats.items()],
        "operations": [[name, value] for name, value in found.by_operation.items()],
        "places": _places(found),
        "steps": list(found.steps),
        "slowdown": _numbers(found.slowdown_S),
        "routing": _numbers(found.replayed_S / found.even_S),
        "measured_ms": _numbers(1e3 * found.measured_S),
        "replayed_ms": _numbers(1e3 * found.replayed_S),
        "even_ms": _numbers(1e3 * found.even_S),
        "ideal_ms": _numbers(1e3 * found.ideal_S),
    }


def _panels(data: dict[str, Any]) -> tuple[Panel, ...]:
    heats, places = (
        tuple((str(at), html.escape(one["name"])) for at, one in enumerate(data[key])) for key in ("heats", "places")
    )
    return (
        Panel("workers", "Slowdown by worker", "S if only this worker had been as it was.", heats, wide=True),
        Panel("operations", "Slowdown by operation", "S if only operations of this kind had been as they were."),
        Panel("places", "Slowdown by place and group", "S if only these ranks had been as they were.", places),
        Panel("slowdown", "Slowdown by step", "And the part of it that uneven routing makes, where that is known."),
        Panel("seconds", "Time by step", "As it was, replayed, and as it could have been."),
    )


def _summary(found: WhatIf) -> list[dict[str, Any]]:
    shown = (
        ("Slowdown S", found.slowdown, ""),
        ("Wasted", found.waste, "%"),
        ("S by uneven routing", found.routing, ""),
        ("S by the rest", found.slowdown / found.routing, ""),
        ("Gone if the slowest ranks were mended", found.mended_workers, "%"),
        ("Gone if the last stage were mended", found.mended_last_stage, "%"),
        ("Error of the replay", found.replay_error, "%"),
        ("Steps", len(found.steps), ""),
    )
    return [
        {"name": name, "value": float(f"{value:.4g}") if math.isfinite(value) else None, "unit": unit}
        for name, value, unit in shown
    ]


def _places(found: WhatIf) -> list[dict[str, Any]]:
    places = [
        {"name": name, "labels": [f"{name} {at}" for at in range(len(values))], "values": list(values)}
        for name, values in found.by_place.items()
        if len(values) > 1
    ]
    places += [
        {
            "name": f"{name} group",
            "labels": [f"ranks {', '.join(map(str, ranks[:8]))}{' ...' * (len(ranks) > 8)}" for ranks in groups],
            "values": list(groups.values()),
        }
        for name, groups in found.by_group.items()
    ]
    ranks = [worker for worker in found.ranks if math.isfinite(worker.slowdown)]
    one = {"name": "rank", "labels": [f"rank {worker.rank}" for worker in ranks]}
    return [*places, one | {"values": [worker.slowdown for worker in ranks]}]


def _heat(name: str, heat: Heat) -> dict[str, Any]:
    cells = [_numbers(row) for row in heat.slowdown]
    return {"name": name, "rows": list(heat.rows), "columns": list(heat.columns), "z": cells}


def _numbers(values: Floats) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
