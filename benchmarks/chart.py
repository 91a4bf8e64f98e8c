"""Line charts as SVG in plain Python, without dependencies and with readable diffs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLORS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#6f5e9e", "#3d3d3d", "#00a6a6", "#a65e2e", "#999999", "#e377c2")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 520, 70, 280, 40, 50


@dataclass(frozen=True)
class Line:
    """A line with its name in the legend. A ``guide`` is thin and dotted, without name and marks."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    dashed: bool = False
    marks: bool = True
    guide: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines with common axes. ``log``: both axes are logarithmic. ``x_ticks``: tick values; None: round numbers."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log: bool = False
    x_ticks: Sequence[float] | None = None

    def svg(self) -> str:
        """Return the chart as SVG."""
        shown = [line for line in self.lines if not line.guide]
        x = _axis([v for line in shown for v in line.xs], LEFT, WIDTH - RIGHT, self.log)
        y = _axis([v for line in shown for v in line.ys], HEIGHT - BOTTOM, TOP, self.log)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            _text(LEFT, 22, self.title, 'font-size="14"'),
            _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, self.x_label, 'text-anchor="middle"'),
            _text(12, TOP - 8, self.y_label),
        ]
        for tick in y.ticks:
            parts.append(_path([(LEFT, y.at(tick)), (WIDTH - RIGHT, y.at(tick))], 'stroke="#ddd"'))
            parts.append(_text(LEFT - 6, y.at(tick) + 4, f"{tick:g}", 'text-anchor="end"'))
        for tick in x.ticks if self.x_ticks is None else self.x_ticks:
            parts.append(_path([(x.at(tick), TOP), (x.at(tick), HEIGHT - BOTTOM)], 'stroke="#eee"'))
            parts.append(_text(x.at(tick), HEIGHT - BOTTOM + 16, f"{tick:g}", 'text-anchor="middle"'))
        for line in self.lines:
            points = [(x.at(px), y.at(py)) for px, py in zip(line.xs, line.ys, strict=True)]
            if line.guide:
                parts.append(_path(points, 'stroke="#000" stroke-dasharray="1 4"'))
                continue
            index = shown.index(line)
            color, dash = COLORS[index % len(COLORS)], ' stroke-dasharray="6 3"' if line.dashed else ""
            parts.append(_path(points, f'stroke="{color}" stroke-width="2"{dash}'))
            if line.marks:
                parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{color}"/>' for px, py in points]
            top, left = TOP + 18 * index, WIDTH - RIGHT
            parts.append(_path([(left + 12, top), (left + 36, top)], f'stroke="{color}" stroke-width="2"{dash}'))
            parts.append(_text(left + 42, top + 4, line.name))
        return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True)
class _Axis:
    at: Callable[[float], float]
    ticks: Sequence[float]


def _axis(values: Sequence[float], begin: float, end: float, log: bool) -> _Axis:
    if log:
        low, high = min(values) / 1.3, max(values) * 1.3
        return _Axis(lambda v: begin + (end - begin) * math.log(v / low) / math.log(high / low), _powers(low, high))
    low, high = min(values), max(values)
    margin = 0.03 * (high - low) or 1.0
    low, high = low - margin, high + margin
    return _Axis(lambda v: begin + (end - begin) * (v - low) / (high - low), _round(low, high))


def _powers(low: float, high: float) -> list[float]:
    """Return the powers of ten in [low, high], or both ends if there are none."""
    ticks = [10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    return [tick for tick in ticks if low <= tick <= high] or [low, high]


def _round(low: float, high: float) -> list[float]:
    """Return four to ten round numbers in [low, high]."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (5, 2, 1) if (high - low) / (step * factor) >= 4)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _text(left: float, top: float, words: str, extra: str = "") -> str:
    return f'<text x="{left:.1f}" y="{top:.1f}" {extra}>{escape(words)}</text>'


def _path(points: Sequence[tuple[float, float]], style: str) -> str:
    joined = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    return f'<polyline points="{joined}" fill="none" {style}/>'
