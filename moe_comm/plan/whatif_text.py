"""What stragglers cost a run, as text, as JSON, and as a page with a heat map of its workers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from moe_comm.errors import MissingDependency
from moe_comm.plan.whatif import WhatIf

TRUSTED = 0.05
"""Replays that are further from what was measured say little about what could have been (2505.05713, section 3)."""
OPERATIONS, PLACES = 8, 4
"""Lines of each kind; the rest is in the JSON."""
SLOW = 1.01


def summary(found: WhatIf) -> dict[str, Any]:
    """Everything as plain numbers and lists, NaN as None."""
    return {
        "steps": list(found.steps),
        "slowdown": found.slowdown,
        "waste": found.waste,
        "routing": _number(found.routing),
        "rest": _number(found.slowdown / found.routing),
        "measured_s": found.measured_S.tolist(),
        "replayed_s": found.replayed_S.tolist(),
        "ideal_s": found.ideal_S.tolist(),
        "replay_error": found.replay_error,
        "graph_error": found.graph_error,
        "by_operation": dict(found.by_operation),
        "by_place": {name: list(values) for name, values in found.by_place.items()},
        "worker": found.worker_DP.tolist(),
        "worst_ranks": list(found.worst_ranks),
        "mended_workers": _number(found.mended_workers),
        "mended_last_stage": _number(found.mended_last_stage),
        "correlation": _number(found.correlation),
    }


def text(found: WhatIf) -> str:
    """For people."""
    mean_s, ideal_s = (float(values.mean()) for values in (found.measured_S, found.ideal_S))
    lines = [
        f"{len(found.steps)} steps, {1e3 * mean_s:.1f} ms each; {1e3 * ideal_s:.1f} ms if nothing had been slower than "
        f"its like: slowdown {found.slowdown:.3f}, {100 * found.waste:.1f}% wasted",
        f"the replay of what was errs by {100 * found.replay_error:.1f}% without the gaps between operations, by "
        f"{100 * found.graph_error:.1f}% with them",
    ]
    if found.replay_error > TRUSTED:
        lines.append(
            f"  above {100 * TRUSTED:.0f}%: much was waited for that no span tells of; take the rest with care"
        )
    if not math.isnan(found.routing):
        lines.append(f"uneven routing alone {found.routing:.3f}, the rest {found.slowdown / found.routing:.3f}")
    shown = [(name, value) for name, value in found.by_operation.items() if value >= SLOW][:OPERATIONS]
    lines += [f"  {value:6.3f}  {name}" for name, value in shown] or ["  no kind of operation alone costs 1%"]
    told: set[tuple[float, ...]] = set()
    for dimension, values in found.by_place.items():
        worst = sorted(range(len(values)), key=lambda place: -values[place])[:PLACES]
        parts = [f"{place}: {values[place]:.3f}" for place in worst if values[place] >= SLOW]
        if parts and len(values) > 1 and values not in told:  # the same ranks by another name
            lines.append(f"by {dimension}  {'  '.join(parts)}")
            told.add(values)
    stages = len(found.by_place.get("pp", ()))
    for share, who in (
        (found.mended_workers, f"the slowest ranks ({', '.join(map(str, found.worst_ranks[:8]))}) were mended"),
        (found.mended_last_stage if stages > 1 else math.nan, "the last pipeline stage were mended"),
    ):
        if not math.isnan(share) and found.slowdown >= SLOW:
            lines.append(f"{100 * share:.0f}% of it would go if {who}")
    return "\n".join(lines)


def write_json(found: WhatIf, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary(found), indent=2, allow_nan=False) + "\n")


def write_page(found: WhatIf, path: Path, title: str) -> None:
    """One file of HTML that needs no network: slowdown by worker (data-parallel rank by pipeline stage), by operation,
    and over steps.

    Raises:
        MissingDependency: without plotly.
    """
    try:
        from plotly import graph_objects as go
        from plotly.subplots import make_subplots
    except ImportError:
        raise MissingDependency("pages need plotly; pip install 'moe_comm[observe]'") from None
    page = make_subplots(
        rows=3,
        cols=1,
        subplot_titles=("Slowdown by worker", "Slowdown by kind of operation", "Milliseconds by step"),
        vertical_spacing=0.12,
    )
    page.add_trace(
        go.Heatmap(
            z=found.worker_DP.T,
            zmin=1.0,
            zmax=max(1.5, float(found.worker_DP.max())),
            colorscale="YlOrRd",
            colorbar={"title": "S", "len": 0.25, "y": 0.89},
            hovertemplate="data-parallel rank %{x}, stage %{y}: %{z:.3f}<extra></extra>",
        ),
        row=1,
        col=1,
    )
    names = list(found.by_operation)[: 2 * OPERATIONS][::-1]
    page.add_trace(
        go.Bar(
            x=[found.by_operation[name] - 1 for name in names], y=names, base=1.0, orientation="h", showlegend=False
        ),
        row=2,
        col=1,
    )
    for name, seconds in (("measured", found.measured_S), ("replayed", found.replayed_S), ("ideal", found.ideal_S)):
        page.add_trace(go.Scatter(x=found.steps, y=1e3 * seconds, name=name, mode="lines+markers"), row=3, col=1)
    page.update_xaxes(title_text="data-parallel rank", dtick=1, row=1, col=1)
    page.update_yaxes(title_text="pipeline stage", dtick=1, row=1, col=1)
    page.update_xaxes(title_text="step", row=3, col=1)
    wasted = f"slowdown {found.slowdown:.3f}, {100 * found.waste:.1f}% wasted"
    page.update_layout(title_text=f"{title}: {wasted}", height=1000, template="plotly_white")
    path.parent.mkdir(parents=True, exist_ok=True)
    page.write_html(path, include_plotlyjs=True, full_html=True)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
