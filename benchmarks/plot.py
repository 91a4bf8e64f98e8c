"""Plot a sweep: an SVG file, and an interactive page if plotly is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.chart import Chart, Line


def svg(result: dict[str, Any]) -> str:
    """Return a log-log plot of milliseconds over the swept value. The dotted line shows proportional growth."""
    values, lines, s = result["values"], result["milliseconds"], result["settings"]
    other = "hidden" if result["axis"] == "tokens" else "tokens"
    measured = [
        Line(f"{name} (slope {result['linearity'][name]['log_slope']:.2f})", values, times, name.startswith("limit"))
        for name, times in lines.items()
    ]
    first, lowest = next(iter(lines.values())), min(time for times in lines.values() for time in times)
    proportional = max(first[-1] * values[0] / values[-1], lowest)
    return Chart(
        title=f"{result['benchmark']}: {s['ranks']} ranks, {other} {s[other]}, {s['experts']} experts, "
        f"top-{s['top_k']}, {s['dtype']}",
        x_label=f"{result['axis']} per rank",
        y_label="ms",
        lines=[*measured, Line("", (values[0], values[-1]), (proportional, first[-1]), guide=True)],
        log=True,
        x_ticks=values,
    ).svg()


def html(result: dict[str, Any]) -> str:
    """Return a self-contained interactive page with the same lines."""
    from plotly import graph_objects

    lines = [
        graph_objects.Scatter(x=result["values"], y=times, name=name, mode="lines+markers")
        for name, times in result["milliseconds"].items()
    ]
    figure = graph_objects.Figure(lines)
    figure.update_layout(title=result["benchmark"], xaxis_title=f"{result['axis']} per rank", yaxis_title="ms")
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return str(figure.to_html(include_plotlyjs=True, full_html=True))


def write(result: dict[str, Any], stem: Path) -> list[Path]:
    """Write ``stem``.svg, and ``stem``.html if plotly is installed. Return the written paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = [stem.with_suffix(".svg")]
    written[0].write_text(svg(result))
    try:
        page = html(result)
    except ImportError:
        return written
    written.append(stem.with_suffix(".html"))
    written[1].write_text(page)
    return written
