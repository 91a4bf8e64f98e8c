"""Results of what-if analysis as text and JSON; ``whatif_page`` makes an HTML page of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_plan.arrays import Floats
from moe_plan.whatif.analysis import WhatIf

TRUSTED = 0.05
"""Replays with a larger error are not reliable (arXiv 2505.05713, section 3)."""
OPERATIONS, COORDINATES = 8, 4
"""Number of lines of each kind; the JSON has all."""
ROWS, COLUMNS = 16, 16
"""Size of a heat map in text; the page shows all."""
SLOW = 1.01
"""Slowdowns below this are not listed."""
ONE_STEP = (
    "one step is not representative of a run: read these numbers with care, and record more steps (observe.every) or "
    "select more (--steps)"
)
_SHADES = " ░▒▓█"
_DARKEST = 1.5


@dataclass(frozen=True)
class HeatMap:
    """Slowdown by worker. rows, columns: labels. slowdown: [rows, columns], NaN where there is no worker."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    slowdown: Floats


def stage_heat(analysis: WhatIf) -> HeatMap:
    """Return data-parallel ranks by pipeline stage.

    A cell is the slowdown of its rank, or with several ranks the smaller S of the two coordinates, as in the study.
    """
    dp, pp = analysis.worker_DP.shape
    slowdown = analysis.worker_DP.T.copy()
    if len(analysis.ranks) == dp * pp:
        for worker in analysis.ranks:
            slowdown[worker.coordinates.get("pp", 0), worker.coordinates.get("dp", 0)] = worker.slowdown
    return HeatMap(tuple(f"pp {at}" for at in range(pp)), tuple(f"dp {at}" for at in range(dp)), slowdown)


def rank_heat(analysis: WhatIf) -> HeatMap | None:
    """Return data-parallel ranks by other coordinates (tp, cp, pp); None if stages and dp identify ranks."""
    rest = [name for name in ("pp", "cp", "tp") if any(worker.coordinates.get(name, 0) for worker in analysis.ranks)]
    if not set(rest) - {"pp"}:
        return None
    named = {worker.rank: tuple(worker.coordinates[name] for name in rest) for worker in analysis.ranks}
    rows = {coordinates: row for row, coordinates in enumerate(sorted(set(named.values())))}
    slowdown = np.full((len(rows), analysis.worker_DP.shape[0]), np.nan)
    for worker in analysis.ranks:
        slowdown[rows[named[worker.rank]], worker.coordinates.get("dp", 0)] = worker.slowdown
    labels = tuple(
        ", ".join(f"{name} {at}" for name, at in zip(rest, coordinates, strict=True)) for coordinates in rows
    )
    return HeatMap(labels, tuple(f"dp {at}" for at in range(slowdown.shape[1])), slowdown)


def summary(analysis: WhatIf) -> dict[str, Any]:
    """Return everything as plain numbers and lists, with NaN as None."""
    return {
        "steps": list(analysis.steps),
        "slowdown": analysis.slowdown,
        "waste": analysis.waste,
        "routing": _or_none(analysis.routing),
        "rest": _or_none(analysis.slowdown / analysis.routing),
        "measured_s": analysis.measured_S.tolist(),
        "replayed_s": analysis.replayed_S.tolist(),
        "ideal_s": analysis.ideal_S.tolist(),
        "even_s": [_or_none(seconds) for seconds in analysis.even_S.tolist()],
        "replay_error": analysis.replay_error,
        "graph_error": analysis.graph_error,
        "by_operation": dict(analysis.by_operation),
        "by_place": {name: list(values) for name, values in analysis.by_coordinate.items()},
        "by_group": {
            name: [{"ranks": list(ranks), "slowdown": value} for ranks, value in groups.items()]
            for name, groups in analysis.by_group.items()
        },
        "by_rank": [
            {"rank": worker.rank, **worker.coordinates, "slowdown": worker.slowdown}
            for worker in sorted(analysis.ranks, key=lambda worker: worker.rank)
        ],
        "worker": analysis.worker_DP.tolist(),
        "worst_ranks": list(analysis.worst_ranks),
        "mended_workers": _or_none(analysis.slowest_ranks_share),
        "mended_last_stage": _or_none(analysis.last_stage_share),
        "correlation": _or_none(analysis.correlation),
        "caution": ONE_STEP if len(analysis.steps) == 1 else None,
    }


def text(analysis: WhatIf) -> str:
    """Return a report for the terminal."""
    mean_s, ideal_s = (float(values.mean()) for values in (analysis.measured_S, analysis.ideal_S))
    steps = "1 step," if len(analysis.steps) == 1 else f"{len(analysis.steps)} steps,"
    lines = [
        f"{steps} {1e3 * mean_s:.1f} ms each; {1e3 * ideal_s:.1f} ms without stragglers: slowdown "
        f"{analysis.slowdown:.3f}, {100 * analysis.waste:.1f}% wasted",
        f"error of the replay: {100 * analysis.replay_error:.1f}% without the gaps between operations, "
        f"{100 * analysis.graph_error:.1f}% with them",
    ]
    if len(analysis.steps) == 1:
        lines.append(f"  {ONE_STEP}")
    if analysis.replay_error > TRUSTED:
        lines.append(
            f"  above {100 * TRUSTED:.0f}%: ranks waited for operations without spans; results may be inaccurate"
        )
    if not math.isnan(analysis.routing):
        lines.append(
            f"uneven routing alone {analysis.routing:.3f}, the rest {analysis.slowdown / analysis.routing:.3f}"
        )
    slow = analysis.slowdown_S
    if len(analysis.steps) > 1 and slow.max() >= SLOW:
        lines.append(
            f"slowdown by step: {slow.min():.3f} to {slow.max():.3f}, median {np.median(slow):.3f}; slowest: "
            + "  ".join(
                f"{analysis.steps[at]}: {slow[at]:.3f}" for at in np.argsort(-slow, kind="stable")[:COORDINATES]
            )
        )
    # Names come from files and must not contain terminal control characters.
    names = {"".join(one if one.isprintable() else "?" for one in name): name for name in analysis.by_operation}
    slowest = [(name, analysis.by_operation[whole]) for name, whole in names.items()]
    shown = [(name[:80], value) for name, value in slowest if value >= SLOW][:OPERATIONS]
    lines.append("slowdown by kind of operation, with only the measured durations of that kind (1.000: no cost)")
    lines += [f"  {value:6.3f}  {name}" for name, value in shown] or ["  no kind of operation alone costs 1%"]
    if coordinate_lines := _slowest_coordinates(analysis):
        lines.append("slowdown by coordinate, with only the measured durations of its ranks (largest first)")
        lines += coordinate_lines
    stages = len(analysis.by_coordinate.get("pp", ()))
    for share, subject in (
        (analysis.slowest_ranks_share, f"fixing the slowest ranks ({', '.join(map(str, analysis.worst_ranks[:8]))})"),
        (analysis.last_stage_share if stages > 1 else math.nan, "fixing the last pipeline stage"),
    ):
        if share >= SLOW - 1 and analysis.slowdown >= SLOW:
            lines.append(f"{subject} would save {100 * share:.0f}% of the lost time")
    if len(analysis.ranks) > 1:
        lines += _map(rank_heat(analysis) or stage_heat(analysis))
    return "\n".join(lines)


def _slowest_coordinates(analysis: WhatIf) -> list[str]:
    """Return the slowest coordinates of each dimension, and slow ranks and groups."""
    reported: set[tuple[float, ...]] = set()
    lines = []
    named: list[tuple[str, Sequence[tuple[object, float]]]] = [
        (f"by {name}", tuple(enumerate(values))) for name, values in analysis.by_coordinate.items()
    ]
    named += [
        (f"by {name} group", tuple((f"({', '.join(map(str, ranks[:8]))})", one) for ranks, one in groups.items()))
        for name, groups in analysis.by_group.items()
    ]
    named.append(("by rank", tuple((worker.rank, worker.slowdown) for worker in analysis.ranks)))
    for name, values in named:
        slowest = sorted(values, key=lambda one: -one[1])[:COORDINATES]
        parts = [f"{coordinate}: {value:.3f}" for coordinate, value in slowest if value >= SLOW]
        key = tuple(value for _, value in values)
        if parts and len(values) > 1 and key not in reported:  # skip the same ranks under another name
            lines.append(f"  {name}  {'  '.join(parts)}")
            reported.add(key)
    return lines


def _map(heat: HeatMap) -> list[str]:
    """Return the heat map. Each cell shows its slowdown and a shade that is darker for larger slowdowns."""
    rows, columns = (labels[:most] for labels, most in ((heat.rows, ROWS), (heat.columns, COLUMNS)))
    wide = max(map(len, rows))
    lines = ["slowdown by worker", " " * wide + "".join(f"{name:>9}" for name in columns)]
    for name, values in zip(rows, heat.slowdown, strict=False):
        cells = ("" if math.isnan(value) else f"{value:.3f} {_shade(value)}" for value in values[: len(columns)])
        lines.append((f"{name:<{wide}}" + "".join(f"{cell:>9}" for cell in cells)).rstrip())
    if len(rows) < len(heat.rows) or len(columns) < len(heat.columns):
        lines.append(f"the first of {len(heat.rows)} x {len(heat.columns)}; --page shows all")
    return lines


def _shade(value: float) -> str:
    share = (value - 1) / (_DARKEST - 1)
    return _SHADES[min(max(round(share * (len(_SHADES) - 1)), 0), len(_SHADES) - 1)]


def _or_none(value: float) -> float | None:
    """Replace NaN, which JSON does not support."""
    return value if math.isfinite(value) else None
