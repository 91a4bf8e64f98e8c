"""What a report's panels draw: small lists from a run's arrays, whatever the number of steps, ranks and experts.

    steps   1,000,000 ─▶ at most POINTS buckets: mean, smallest and largest
    ranks x steps     ─▶ [ranks, bins] means, at most CELLS numbers
    experts           ─▶ at most WIDE columns, the loads of neighbours averaged

Everything here is plain JSON; numbers have five digits, and what is not known is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_comm.errors import CorruptFile
from moe_comm.observe.effective import EffectiveTime, effective_time
from moe_comm.observe.records import ATTEMPTS, METRICS
from moe_comm.observe.report.rank_lines import RankLines
from moe_comm.observe.report.read import HEALTH, PARTS, Curves, Loads, Run

Floats = NDArray[np.float64]

POINTS, CELLS, WIDE, MATRIX, MARKS, TEXT = 800, 40_000, 512, 128, 300, 300
LAYER_NUMBERS = 60_000
SHOWN = ("compute", "checkpoint", "memory_bytes")
BANDS = ("loss", "grad_norm", "checkpoint")
MEANS = ("tokens_per_s", "mfu", "total", "memory_bytes", "lr", *(part for part in PARTS if part != "checkpoint"))


def short(values: Floats) -> list[Any]:
    """Nested lists with five digits; null for NaN and infinities."""
    if values.ndim > 1:
        return [short(one) for one in values]
    return [float(f"{one:.5g}") if math.isfinite(one) else None for one in values.tolist()]


def panels(run: Run) -> dict[str, Any]:
    """All of one run, for the page."""
    timeline = timeline_of(run)
    stragglers = ranks_of(run)
    return {
        "name": text(run.name),
        "status": text(run.status),
        "mapping": str(run.mapping) if run.mapping else "",
        "notes": [text(note) for note in run.notes],
        "summary": summary_of(run, timeline, stragglers),
        "curves": curves_of(run.curves),
        "health": health_of(run.curves, run.loads),
        "loads": loads_of(run.loads),
        "ranks": stragglers,
        "links": links_of(run.ranks),
        "timeline": timeline,
    }


def text(value: object) -> str:
    """What a file says, not too long for a page."""
    said = str(value)
    return said if len(said) <= TEXT else said[: TEXT - 1] + "…"


def buckets(count: int, most: int) -> NDArray[np.int64]:
    """Where each of at most ``most`` runs of neighbours begins, among ``count`` things."""
    return np.unique(np.linspace(0, count, min(most, count), endpoint=False).astype(np.int64))


def reduce_to(values: Floats, starts: NDArray[np.int64], how: str) -> Floats:
    """Mean, smallest or largest of each run along the first axis, without what is NaN; NaN where there is nothing."""
    known = np.isfinite(values)
    if how == "mean":
        counts = np.add.reduceat(known, starts, dtype=np.int64)
        sums = np.add.reduceat(np.where(known, values, 0.0), starts)
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    worst = math.inf if how == "low" else -math.inf
    found = (np.minimum if how == "low" else np.maximum).reduceat(np.where(known, values, worst), starts)
    return np.where(np.isfinite(found), found, np.nan)


def curves_of(curves: Curves) -> dict[str, Any]:
    """Loss, gradient norm, rates and seconds over steps."""
    count = len(curves.steps_S)
    if not count:
        return {"step": [], "values": {}, "low": {}, "high": {}, "skipped": []}
    starts = buckets(count, POINTS)
    whole = len(starts) == count
    return {
        "step": short(curves.steps_S[starts]),
        "per_point": -(-count // len(starts)),
        "values": {name: short(reduce_to(curves.values[name], starts, "mean")) for name in (*BANDS, *MEANS)},
        "low": {} if whole else {name: short(reduce_to(curves.values[name], starts, "low")) for name in BANDS},
        "high": {} if whole else {name: short(reduce_to(curves.values[name], starts, "high")) for name in BANDS},
        "skipped": [[step, text(why)] for step, why in curves.skipped[:MARKS]],
    }


def health_of(curves: Curves, loads: Loads) -> dict[str, Any]:
    """Each layer's numbers over steps, and what the median and the 95% layer have."""
    if not len(curves.layer_steps_N):
        return {"step": [], "layers": [], "values": {}, "across": {}}
    count = curves.layers[HEALTH[0]].shape[1]
    starts = buckets(len(curves.layer_steps_N), max(LAYER_NUMBERS // (max(count, 1) * len(HEALTH)), 20))
    names = loads.names if len(loads.names) == count else tuple(f"MoE layer {i}" for i in range(count))
    return {
        "step": short(curves.layer_steps_N[starts]),
        "layers": [text(name) for name in names],
        "values": {name: short(reduce_to(one, starts, "mean").T) for name, one in curves.layers.items()},
        "across": {name: short(reduce_to(one, starts, "mean").T) for name, one in curves.across.items()},
    }


def loads_of(loads: Loads) -> dict[str, Any]:
    """Load over the layer's mean load, in hundredths, [steps][layers][columns]; a column is ``per`` experts."""
    steps, layers, experts = loads.slots_TLE.shape
    if not steps * layers * experts:
        return {"step": [], "layers": [], "experts": 0, "per": 1, "ratio": []}
    known = np.isfinite(loads.slots_TLE)
    counts_TL1 = known.sum(2, keepdims=True)
    sums_TL1 = np.where(known, loads.slots_TLE, 0.0).sum(2, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_TLE = np.where(sums_TL1 > 0, loads.slots_TLE * counts_TL1 / sums_TL1, np.where(known, 1.0, np.nan))
    per = -(-experts // WIDE)
    starts = np.arange(0, experts, per)
    ratio_TLC = np.moveaxis(reduce_to(np.moveaxis(ratio_TLE, 2, 0), starts, "mean"), 0, 2)
    hundredths = np.where(np.isfinite(ratio_TLC), np.round(ratio_TLC * 100), -1).astype(np.int64).tolist()
    return {
        "step": list(loads.steps),
        "layers": [text(name) for name in loads.names],
        "experts": experts,
        "per": per,
        "ratio": hundredths,
    }


def ranks_of(run: Run) -> dict[str, Any]:
    """[ranks][bins] means of each rank's seconds and memory (longest checkpoints), where it sits, how slow it is."""
    lines = run.ranks
    count = len(lines.ranks)
    if not count or not len(lines.steps_N):
        return {"rank": [], "host": [], "bins": [], "values": {}}
    first, last = float(lines.steps_N.min()), float(lines.steps_N.max())
    bins = int(min(max(CELLS // count, 4), last - first + 1, 400))
    width = (last - first + 1) / bins
    bin_N = np.clip(((lines.steps_N - first) // width).astype(np.int64), 0, bins - 1)
    cell_N = lines.index_N * bins + bin_N
    hosts = list(dict.fromkeys(lines.hosts))
    place_of = {host: i for i, host in enumerate(hosts)}
    pp, dp = places(run)
    values = {}
    for name, value_N in lines.values.items():
        known = np.isfinite(value_N)
        sums = np.bincount(cell_N[known], value_N[known], count * bins)
        counts = np.bincount(cell_N[known], minlength=count * bins)
        values[name] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan).reshape(count, bins)
    # A stall is a matter of single steps: a mean over a hundred would hide it.
    stalls = np.full(count * bins, np.nan)
    np.fmax.at(stalls, cell_N, lines.values["checkpoint"])
    values["checkpoint"] = stalls.reshape(count, bins)
    return {
        "rank": list(lines.ranks),
        "hosts": [text(host) for host in hosts],
        "host": [place_of[host] for host in lines.hosts],
        "pp": pp,
        "dp": dp,
        "bins": short(first + width * np.arange(bins, dtype=np.float64)),
        "width": width,
        "values": {name: short(values[name]) for name in SHOWN},
        "slowdown": short(slowdown(values["compute"], pp)),
        "sent": {kind: short(one) for kind, one in lines.sent.items()},
        "waits": {kind: short(one) for kind, one in lines.waits.items()},
    }


def places(run: Run) -> tuple[list[int], list[int]]:
    """Of each rank its pipeline stage, and which of the stage's data-parallel ranks it is part of."""
    lines, mapping = run.ranks, run.mapping
    if mapping is None or (lines.ranks and lines.ranks[-1] >= mapping.world):
        return [0] * len(lines.ranks), list(range(len(lines.ranks)))
    found = [mapping.place(rank) for rank in lines.ranks]
    return [int(one["pp"]) for one in found], [int(one["dp"]) for one in found]


def slowdown(compute_RB: Floats, stage: Sequence[int]) -> Floats:
    """[R]: a rank's mean compute over the median of its pipeline stage's; NaN where it is not known."""
    known = np.isfinite(compute_RB)
    mean_R = np.where(known, compute_RB, 0).sum(1) / np.maximum(known.sum(1), 1)
    mean_R = np.where(known.any(1) & (mean_R > 0), mean_R, np.nan)
    stages = np.array(stage)
    found = np.full(len(mean_R), np.nan)
    for one in np.unique(stages):
        of = stages == one
        if np.isfinite(mean_R[of]).any():
            found[of] = mean_R[of] / np.nanmedian(mean_R[of])
    return found


def links_of(lines: RankLines) -> dict[str, Any]:
    """Bytes a step from rank to rank (or, of many, from one run of neighbours to another) and from host to host; and
    seconds of probes between hosts."""
    count = len(lines.ranks)
    per = max(-(-count // MATRIX), 1)
    hosts = list(dict.fromkeys(lines.hosts))
    place_of = {host: i for i, host in enumerate(hosts)}
    host = [place_of[one] for one in lines.hosts]
    per_host = max(-(-len(hosts) // MATRIX), 1)
    labels = [str(one) for one in lines.ranks]
    return {
        "rank": _matrix(lines.peers, [i // per for i in range(count)], _named(labels, per), "sum"),
        "host": _matrix(lines.peers, [one // per_host for one in host], _named(hosts, per_host), "sum"),
        "probe": _matrix(lines.probes, [one // per_host for one in host], _named(hosts, per_host), "worst"),
    }


def _named(labels: Sequence[str], per: int) -> list[str]:
    if per == 1:
        return [text(label) for label in labels]
    ends = [(i, min(i + per, len(labels)) - 1) for i in range(0, len(labels), per)]
    return [text(f"{labels[first]} to {labels[last]}") for first, last in ends]


def _matrix(pairs: Mapping[tuple[int, int], float], place: Sequence[int], labels: list[str], how: str) -> Any:
    if not pairs:
        return {"labels": [], "values": []}
    found = np.full((len(labels), len(labels)), np.nan)
    for (source, destination), value in pairs.items():
        cell = place[source], place[destination]
        before = found[cell]
        if math.isfinite(value):
            added = before + value if how == "sum" else max(before, value)
            found[cell] = value if math.isnan(before) else added
    return {"labels": labels, "values": short(found)}


def timeline_of(run: Run) -> dict[str, Any]:
    """Starts of the ranks, faults, and what share of the time became steps that count; seconds since the start."""
    lines = run.ranks
    ends_N = lines.begin_N + lines.values.get("total", np.zeros(0))
    begun = [one.started_s for one in run.attempts]
    known = [*lines.begin_N[:1].tolist(), *([float(np.nanmax(ends_N))] if _any(ends_N) else [])]
    moments = [*begun, *known, *(one.ready_s for one in run.attempts), *(one.time_s for one in run.faults)]
    moments = [one for one in moments if math.isfinite(one)]
    begin, end = min(moments, default=0.0), max(moments, default=0.0)
    spent = _effective(run, end if known else None)
    if spent is not None:
        end = max(end, begin + spent.wall_s)
    attempts = []
    for i, one in enumerate(run.attempts[:MARKS]):
        after = run.attempts[i + 1] if i + 1 < len(run.attempts) else None
        # A start that never came to a step has no last one either.
        stop = end if after is None else after.last_s if after.last_s >= one.ready_s else after.started_s
        attempts.append(
            {
                "number": one.number,
                "begin": _since(one.started_s, begin),
                "ready": _since(one.ready_s, begin),
                "end": _since(max(stop, one.ready_s), begin),
                "source": text(one.source),
                "world": one.world,
                "first_step": one.first_step,
            }
        )
    return {
        "wall_s": round(end - begin, 3),
        "effective": None if spent is None or not spent.wall_s else spent.ratio,
        "said": "" if spent is None else str(spent),
        "attempts": attempts,
        "faults": [
            {
                "at": _since(one.time_s, begin),
                "step": one.step,
                "kind": text(one.kind),
                "ranks": one.ranks[:64],
                "action": text(one.action),
                "what": text(one.what),
                "noticed_s": one.noticed_s if math.isfinite(one.noticed_s) else None,
            }
            for one in run.faults[:MARKS]
        ],
        "fault_count": len(run.faults),
        "injected": [
            {
                "at": _since(one.time_s, begin),
                "step": one.step,
                "kind": text(one.kind),
                "ranks": [one.rank],
                "what": text(one.what or one.fault),
            }
            for one in run.injected[:MARKS]
        ],
        "injected_count": len(run.injected),
    }


def _effective(run: Run, end_s: float | None) -> EffectiveTime | None:
    """None where it is not known, or what it is made of is damaged."""
    if not all((run.path / name).is_file() for name in (ATTEMPTS, METRICS)):
        return None
    try:
        return effective_time(run.path, end_s)
    except (CorruptFile, OSError, OverflowError):
        return None


def _since(moment: float, begin: float) -> float | None:
    return round(moment - begin, 3) if math.isfinite(moment) else None


def _any(values: Floats) -> bool:
    return bool(np.isfinite(values).any())


def _typical(values: Floats | None, how: str) -> float | None:
    if values is None or not _any(values):
        return None
    known = values[np.isfinite(values)]
    return float(np.median(known) if how == "median" else known.max() if how == "max" else known.mean())


def summary_of(run: Run, timeline: Mapping[str, Any], ranks: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The run in a few numbers: name, value, unit, and whether more is better (1), worse (-1) or neither (0)."""
    curves, values = run.curves, run.curves.values
    loss = values.get("loss", np.zeros(0))
    memory = run.ranks.values.get("memory_bytes")
    memory = memory if memory is not None and len(memory) else values.get("memory_bytes")
    most = _typical(memory, "max")
    slow = [one for one in ranks.get("slowdown", []) if one is not None]
    imbalance = curves.layers.get("imbalance")
    dead = curves.layers.get("dead_share")
    last_health = None if imbalance is None or not imbalance.size else _typical(imbalance[-1], "max")
    rows: list[tuple[str, float | None, str, int]] = [
        ("Last step", float(curves.steps_S[-1]) if len(curves.steps_S) else None, "", 0),
        ("Ranks", float(run.attempts[-1].world if run.attempts else len(run.ranks.ranks)) or None, "", 0),
        ("Loss, last 10 steps", _typical(loss[-10:], "mean"), "nats/token", -1),
        ("Gradient norm, median", _typical(values.get("grad_norm"), "median"), "", 0),
        ("Throughput, median", _typical(values.get("tokens_per_s"), "median"), "tokens/s", 1),
        ("MFU, median", _typical(values.get("mfu"), "median"), "%", 1),
        ("Step, median", _typical(values.get("total"), "median"), "s", -1),
        *((f"{name.capitalize()}, mean", _typical(values.get(name), "mean"), "s/step", -1) for name in PARTS),
        ("Memory, most of a rank", most / 2**30 if most is not None else None, "GiB", -1),
        ("Busiest expert, worst layer now", last_health, "x mean", -1),
        (
            "Dead experts, worst layer now",
            None if dead is None or not dead.size else _typical(dead[-1], "max"),
            "%",
            -1,
        ),
        ("Slowest rank's compute", max(slow) if len(slow) > 1 else None, "x median", -1),
        ("Effective training time", timeline["effective"], "%", 1),
        ("Starts of the ranks", float(len(run.attempts)) or None, "", -1),
        ("Faults", float(len(run.faults)), "", -1),
        ("Skipped steps", float(len(curves.skipped)), "", -1),
    ]
    return [
        {"name": name, "value": None if value is None else float(f"{value:.5g}"), "unit": unit, "better": better}
        for name, value, unit, better in rows
    ]
