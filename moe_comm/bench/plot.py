"""A sweep as a picture: SVG in plain Python, and an interactive page where plotly is installed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

COLORS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#6f5e9e", "#3d3d3d", "#00a6a6", "#a65e2e", "#999999", "#e377c2")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 520, 70, 280, 40, 50


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside [low, high], or both ends where there are none."""
    found = [10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    return [tick for tick in found if low <= tick <= high] or [low, high]


def svg(found: dict[str, Any]) -> str:
    """Milliseconds over the swept value, both axes logarithmic; the dotted line is proportional growth."""
    values, lines = found["values"], found["milliseconds"]
    low_x, high_x = values[0] / 1.1, values[-1] * 1.1
    flat = [time for times in lines.values() for time in times]
    low_y, high_y = min(flat) / 1.5, max(flat) * 1.5

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / low_x) / math.log(high_x / low_x)

    def y(time: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(time / low_y) / math.log(high_y / low_y)

    def text(left: float, top: float, words: str, extra: str = "") -> str:
        return f'<text x="{left:.1f}" y="{top:.1f}" {extra}>{escape(words)}</text>'

    def path(points: list[tuple[float, float]], style: str) -> str:
        joined = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        return f'<polyline points="{joined}" fill="none" {style}/>'

    s = found["settings"]
    other = "hidden" if found["axis"] == "tokens" else "tokens"
    title = (
        f"{found['benchmark']}: {s['ranks']} ranks, {other} {s[other]}, {s['experts']} experts, top-{s['top_k']}, "
        f"{s['dtype']}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 22, title, 'font-size="14"'),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, f"{found['axis']} a rank", 'text-anchor="middle"'),
        text(12, TOP - 8, "ms"),
    ]
    for tick in _ticks(low_y, high_y):
        parts.append(path([(LEFT, y(tick)), (WIDTH - RIGHT, y(tick))], 'stroke="#ddd"'))
        parts.append(text(LEFT - 6, y(tick) + 4, f"{tick:g}", 'text-anchor="end"'))
    for value in values:
        parts.append(path([(x(value), TOP), (x(value), HEIGHT - BOTTOM)], 'stroke="#eee"'))
        parts.append(text(x(value), HEIGHT - BOTTOM + 16, str(value), 'text-anchor="middle"'))
    for index, (name, times) in enumerate(lines.items()):
        color = COLORS[index % len(COLORS)]
        dash = ' stroke-dasharray="6 3"' if name.startswith("limit") else ""
        points = [(x(value), y(time)) for value, time in zip(values, times, strict=True)]
        parts.append(path(points, f'stroke="{color}" stroke-width="2"{dash}'))
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{color}"/>' for px, py in points]
        if index == 0:
            start = times[-1] * values[0] / values[-1]
            ends = [(values[0], max(start, low_y)), (values[-1], times[-1])]
            parts.append(path([(x(v), y(t)) for v, t in ends], 'stroke="#000" stroke-dasharray="1 4"'))
        top = TOP + 18 * index
        parts.append(
            path([(WIDTH - RIGHT + 12, top), (WIDTH - RIGHT + 36, top)], f'stroke="{color}" stroke-width="2"{dash}')
        )
        slope = found["linearity"][name]["log_slope"]
        parts.append(text(WIDTH - RIGHT + 42, top + 4, f"{name} (slope {slope:.2f})"))
    return "\n".join([*parts, "</svg>", ""])


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
