"""A sweep as a picture: SVG in plain Python, and an interactive page where plotly is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.chart import Chart, Line


def svg(found: dict[str, Any]) -> str:
    """Milliseconds over the swept value, both axes logarithmic; the dotted line is proportional growth."""
    values, lines, s = found["values"], found["milliseconds"], found["settings"]
    other = "hidden" if found["axis"] == "tokens" else "tokens"
    shown = [
        Line(f"{name} (slope {found['linearity'][name]['log_slope']:.2f})", values, times, name.startswith("limit"))
        for name, times in lines.items()
    ]
    first, lowest = next(iter(lines.values())), min(time for times in lines.values() for time in times)
    proportional = max(first[-1] * values[0] / values[-1], lowest)
    return Chart(
        title=f"{found['benchmark']}: {s['ranks']} ranks, {other} {s[other]}, {s['experts']} experts, "
        f"top-{s['top_k']}, {s['dtype']}",
        x_label=f"{found['axis']} a rank",
        y_label="ms",
        lines=[*shown, Line("", (values[0], values[-1]), (proportional, first[-1]), guide=True)],
        log=True,
        x_ticks=values,
    ).svg()


def html(found: dict[str, Any]) -> str:
    """One self-contained page with the same lines, to zoom and hover."""
    from plotly import graph_objects

    lines = [
        graph_objects.Scatter(x=found["values"], y=times, name=name, mode="lines+markers")
        for name, times in found["milliseconds"].items()
    ]
    figure = graph_objects.Figure(lines)
    figure.update_layout(title=found["benchmark"], xaxis_title=f"{found['axis']} a rank", yaxis_title="ms")
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return str(figure.to_html(include_plotlyjs=True, full_html=True))


def write(found: dict[str, Any], stem: Path) -> list[Path]:
    """Write ``stem``.svg, and ``stem``.html where plotly is installed; returns what was written."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = [stem.with_suffix(".svg")]
    written[0].write_text(svg(found))
    try:
        page = html(found)
    except ImportError:
        return written
    written.append(stem.with_suffix(".html"))
    written[1].write_text(page)
    return written
