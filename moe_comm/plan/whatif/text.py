"""What stragglers cost a run, as text and as JSON; ``whatif_page`` makes a page of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_comm.plan.arrays import Floats
from moe_comm.plan.whatif.analysis import WhatIf

TRUSTED = 0.05
"""Replays that are further from what was measured say little about what could have been (2505.05713, section 3)."""
OPERATIONS, PLACES = 8, 4
"""Lines of each kind; the rest is in the JSON."""
ROWS, COLUMNS = 16, 16
"""Of a heat map in text; the rest is on the page."""
SLOW = 1.01
_SHADES = " ░▒▓█"
_DARKEST = 1.5


@dataclass(frozen=True)
class Heat:
    """Slowdown by worker. rows, columns: what they are, of each. slowdown: [rows, columns], NaN where nobody is."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    slowdown: Floats


def stage_heat(found: WhatIf) -> Heat:
    """Data-parallel rank by pipeline stage: of a rank its own, of several the smaller S of the two, as the study has
    it."""
    dp, pp = found.worker_DP.shape
    slowdown = found.worker_DP.T.copy()
    if len(found.ranks) == dp * pp:
        for worker in found.ranks:
            slowdown[worker.places.get("pp", 0), worker.places.get("dp", 0)] = worker.slowdown
    return Heat(tuple(f"pp {at}" for at in range(pp)), tuple(f"dp {at}" for at in range(dp)), slowdown)


def rank_heat(found: WhatIf) -> Heat | None:
    """Data-parallel rank by what else tells ranks apart (tp, cp, pp); None where stages and dp do already."""
    rest = [name for name in ("pp", "cp", "tp") if any(worker.places.get(name, 0) for worker in found.ranks)]
    if not set(rest) - {"pp"}:
        return None
    named = {worker.rank: tuple(worker.places[name] for name in rest) for worker in found.ranks}
    rows = {places: row for row, places in enumerate(sorted(set(named.values())))}
    slowdown = np.full((len(rows), found.worker_DP.shape[0]), np.nan)
    for worker in found.ranks:
        slowdown[rows[named[worker.rank]], worker.places.get("dp", 0)] = worker.slowdown
    labels = tuple(", ".join(f"{name} {at}" for name, at in zip(rest, places, strict=True)) for places in rows)
    return Heat(labels, tuple(f"dp {at}" for at in range(slowdown.shape[1])), slowdown)


def summary(found: WhatIf) -> dict[str, Any]:
    """Everything as plain numbers and lists, NaN as None."""
    return {
        "steps": list(found.steps),
        "slowdown": found.slowdown,
        "waste": found.waste,
        "routing": _or_none(found.routing),
        "rest": _or_none(found.slowdown / found.routing),
        "measured_s": found.measured_S.tolist(),
        "replayed_s": found.replayed_S.tolist(),
        "ideal_s": found.ideal_S.tolist(),
        "even_s": [_or_none(seconds) for seconds in found.even_S.tolist()],
        "replay_error": found.replay_error,
        "graph_error": found.graph_error,
        "by_operation": dict(found.by_operation),
        "by_place": {name: list(values) for name, values in found.by_place.items()},
        "by_group": {
            name: [{"ranks": list(ranks), "slowdown": value} for ranks, value in groups.items()]
            for name, groups in found.by_group.items()
        },
        "by_rank": [
            {"rank": worker.rank, **worker.places, "slowdown": worker.slowdown}
            for worker in sorted(found.ranks, key=lambda worker: worker.rank)
        ],
        "worker": found.worker_DP.tolist(),
        "worst_ranks": list(found.worst_ranks),
        "mended_workers": _or_none(found.mended_workers),
        "mended_last_stage": _or_none(found.mended_last_stage),
        "correlation": _or_none(found.correlation),
    }


def text(found: WhatIf) -> str:
    """For people."""
    mean_s, ideal_s = (float(values.mean()) for values in (found.measured_S, found.ideal_S))
    steps = "1 step," if len(found.steps) == 1 else f"{len(found.steps)} steps,"
    lines = [
        f"{steps} {1e3 * mean_s:.1f} ms each; {1e3 * ideal_s:.1f} ms if nothing had been slower than its like: "
        f"slowdown {found.slowdown:.3f}, {100 * found.waste:.1f}% wasted",
        f"the replay of what was errs by {100 * found.replay_error:.1f}% without the gaps between operations, by "
        f"{100 * found.graph_error:.1f}% with them",
    ]
    if found.replay_error > TRUSTED:
        lines.append(
            f"  above {100 * TRUSTED:.0f}%: much was waited for that no span tells of; take the rest with care"
        )
    if not math.isnan(found.routing):
        lines.append(f"uneven routing alone {found.routing:.3f}, the rest {found.slowdown / found.routing:.3f}")
    slow = found.slowdown_S
    if len(found.steps) > 1 and slow.max() >= SLOW:
        lines.append(
            f"slowdown by step: {slow.min():.3f} to {slow.max():.3f}, median {np.median(slow):.3f}; slowest: "
            + "  ".join(f"{found.steps[at]}: {slow[at]:.3f}" for at in np.argsort(-slow, kind="stable")[:PLACES])
        )
    # Names come from files: nothing in them may steer a terminal.
    names = {"".join(one if one.isprintable() else "?" for one in name): name for name in found.by_operation}
    slowest = [(name, found.by_operation[whole]) for name, whole in names.items()]
    shown = [(name[:80], value) for name, value in slowest if value >= SLOW][:OPERATIONS]
    lines.append("slowdown by kind of operation, if only that kind had been as slow as it was (1.000: costs nothing)")
    lines += [f"  {value:6.3f}  {name}" for name, value in shown] or ["  no kind of operation alone costs 1%"]
    if places := _places(found):
        lines.append("slowdown by place, if only the ranks there had been as slow (place: slowdown, the slowest first)")
        lines += places
    stages = len(found.by_place.get("pp", ()))
    for share, who in (
        (found.mended_workers, f"the slowest ranks ({', '.join(map(str, found.worst_ranks[:8]))}) were mended"),
        (found.mended_last_stage if stages > 1 else math.nan, "the last pipeline stage were mended"),
    ):
        if share >= SLOW - 1 and found.slowdown >= SLOW:
            lines.append(f"{100 * share:.0f}% of it would go if {who}")
    if len(found.ranks) > 1:
        lines += _map(rank_heat(found) or stage_heat(found))
    return "\n".join(lines)


def _places(found: WhatIf) -> list[str]:
    """Of each dimension its slowest places, of ranks and groups those that are slow."""
    told: set[tuple[float, ...]] = set()
    lines = []
    named: list[tuple[str, Sequence[tuple[object, float]]]] = [
        (f"by {name}", tuple(enumerate(values))) for name, values in found.by_place.items()
    ]
    named += [
        (f"by {name} group", tuple((f"({', '.join(map(str, ranks[:8]))})", one) for ranks, one in groups.items()))
        for name, groups in found.by_group.items()
    ]
    named.append(("by rank", tuple((worker.rank, worker.slowdown) for worker in found.ranks)))
    for name, values in named:
        worst = sorted(values, key=lambda one: -one[1])[:PLACES]
        parts = [f"{place}: {value:.3f}" for place, value in worst if value >= SLOW]
        key = tuple(value for _, value in values)
        if parts and len(values) > 1 and key not in told:  # the same ranks by another name
            lines.append(f"  {name}  {'  '.join(parts)}")
            told.add(key)
    return lines


def _map(heat: Heat) -> list[str]:
    """A cell is its slowdown and a shade, as dark as it is slow."""
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
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
