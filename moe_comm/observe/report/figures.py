"""Reduce the arrays of a run to small lists for the panels of a report.

    steps   1,000,000 ─▶ at most POINTS buckets: mean, minimum and maximum
    ranks x steps     ─▶ [ranks, bins] means, at most CELLS numbers
    experts           ─▶ at most WIDE columns, each the mean load of neighboring experts

All results are JSON values. Numbers have five digits; missing values are null (in ``loads_of``: -1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_comm.errors import CorruptFile
from moe_comm.observe.effective import EffectiveTime, effective_time
from moe_comm.observe.records import ATTEMPTS, METRICS, Attempt, PlacementLine
from moe_comm.observe.report.lines import RankLines
from moe_comm.observe.report.read import ALL_CURVES, CURVES, HEALTH, PARTS, Curves, Loads, Run

Floats = NDArray[np.float64]

POINTS, CELLS, WIDE, MATRIX, MARKS, TEXT = 800, 40_000, 512, 128, 300, 300
"""Largest number of points of a curve, cells of a map, columns, rows of a matrix, events, and characters of a text."""
LAYER_NUMBERS = 60_000
"""Largest number of values of the per-layer metrics, over all metrics, layers and points."""
SHOWN = ("compute", "checkpoint", "memory_bytes")
BANDS = ("loss", "grad_norm", "checkpoint")
MEANS = ("tokens_per_s", "mfu", "total", "memory_bytes", "lr", *(part for part in PARTS if part != "checkpoint"))


def short(values: Floats) -> list[Any]:
    """Return nested lists of numbers with five digits; null for NaN and infinity."""
    if values.ndim > 1:
        return [short(value) for value in values]
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]


def panels(run: Run) -> dict[str, Any]:
    """Return the data of all panels of one run."""
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
        "placements": placements_of(run.placements),
        "ranks": stragglers,
        "links": links_of(run.ranks),
        "timeline": timeline,
    }


def text(value: object) -> str:
    """Return ``value`` as text, truncated to ``TEXT`` characters."""
    result = str(value)
    return result if len(result) <= TEXT else result[: TEXT - 1] + "…"


def buckets(count: int, most: int) -> NDArray[np.int64]:
    """Return the start indices of at most ``most`` buckets of ``count`` elements."""
    return np.unique(np.linspace(0, count, min(most, count), endpoint=False).astype(np.int64))


def reduce_to(values: Floats, starts: NDArray[np.int64], how: str) -> Floats:
    """Return the mean, minimum ("low") or maximum ("high") of each bucket along the first axis, ignoring NaN."""
    finite = np.isfinite(values)
    if how == "mean":
        counts = np.add.reduceat(finite, starts, dtype=np.int64)
        sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    neutral = math.inf if how == "low" else -math.inf
    result = (np.minimum if how == "low" else np.maximum).reduceat(np.where(finite, values, neutral), starts)
    return np.where(np.isfinite(result), result, np.nan)


def curves_of(curves: Curves) -> dict[str, Any]:
    """Return loss, gradient norm, throughput and times over steps."""
    count = len(curves.steps_S)
    if not count:
        return {"step": [], "values": {}, "low": {}, "high": {}, "skipped": [], "validation": []}
    starts = buckets(count, POINTS)
    complete = len(starts) == count
    optional = [name for name in ALL_CURVES[len(CURVES) :] if np.isfinite(curves.values[name]).any()]
    return {
        "step": short(curves.steps_S[starts]),
        "per_point": -(-count // len(starts)),
        "values": {name: short(reduce_to(curves.values[name], starts, "mean")) for name in (*BANDS, *MEANS, *optional)},
        "low": {} if complete else {name: short(reduce_to(curves.values[name], starts, "low")) for name in BANDS},
        "high": {} if complete else {name: short(reduce_to(curves.values[name], starts, "high")) for name in BANDS},
        "skipped": [[step, text(why)] for step, why in curves.skipped[:MARKS]],
        "validation": [[step, float(f"{loss:.5g}")] for step, loss in _sampled(curves.validation, POINTS)],
    }


def _sampled(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` of the items, evenly, with the first and the last."""
    return [items[i] for i in np.linspace(0, len(items) - 1, min(most, len(items))).astype(int)]


def health_of(curves: Curves, loads: Loads) -> dict[str, Any]:
    """Return per-layer metrics over steps, and their median and 95th percentile over layers."""
    if not len(curves.layer_steps_N):
        return {"step": [], "layers": [], "values": {}, "across": {}}
    count = curves.layers[HEALTH[0]].shape[1]
    starts = buckets(len(curves.layer_steps_N), max(LAYER_NUMBERS // (max(count, 1) * len(HEALTH)), 20))
    names = loads.names if len(loads.names) == count else tuple(f"MoE layer {i}" for i in range(count))
    return {
        "step": short(curves.layer_steps_N[starts]),
        "layers": [text(name) for name in names],
        "values": {name: short(reduce_to(values, starts, "mean").T) for name, values in curves.layers.items()},
        "across": {name: short(reduce_to(values, starts, "mean").T) for name, values in curves.across.items()},
    }


def loads_of(loads: Loads) -> dict[str, Any]:
    """Return load relative to the layer's mean load in percent, [steps][layers][columns] with ``per`` experts each.

    -1: no load was recorded.
    """
    steps, layers, experts = loads.slots_TLE.shape
    if not steps * layers * experts:
        return {"step": [], "layers": [], "experts": 0, "per": 1, "ratio": []}
    finite = np.isfinite(loads.slots_TLE)
    counts_TL1 = finite.sum(2, keepdims=True)
    sums_TL1 = np.where(finite, loads.slots_TLE, 0.0).sum(2, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_TLE = np.where(sums_TL1 > 0, loads.slots_TLE * counts_TL1 / sums_TL1, np.where(finite, 1.0, np.nan))
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


def placements_of(lines: Sequence[PlacementLine]) -> dict[str, Any]:
    """Return the owners of experts after the first decision and after each switch, [layers][switches][experts].

    An owner is a rank, or a list with the home first if the expert has copies. Evenly sampled to ``CELLS`` experts.
    """
    by_layer: dict[str, list[PlacementLine]] = {}
    for line in lines:
        chosen = by_layer.setdefault(line.layer, [])
        if line.switched or not chosen:
            chosen.append(line)
    most = max(CELLS // max(sum(len(chosen[0].owners) for chosen in by_layer.values()), 1), 1)
    for layer, chosen in by_layer.items():
        by_layer[layer] = _sampled(chosen, most)
    return {
        "layers": [text(name) for name in by_layer],
        "ranks": max((line.world for line in lines), default=0),
        "step": [[line.step for line in chosen] for chosen in by_layer.values()],
        "ratio": [[_ratios(line) for line in chosen] for chosen in by_layer.values()],
        "owners": [
            [[ranks if len(ranks) != 1 else ranks[0] for ranks in line.owners[:WIDE]] for line in chosen]
            for chosen in by_layer.values()
        ],
    }


def _ratios(line: PlacementLine) -> list[float | None]:
    return [ratio if math.isfinite(ratio) else None for ratio in (line.ratio_before, line.ratio_after)]


def ranks_of(run: Run) -> dict[str, Any]:
    """Return [ranks][bins] means of times and memory (maximum for checkpoints), positions and slowdown of ranks."""
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
        finite = np.isfinite(value_N)
        sums = np.bincount(cell_N[finite], value_N[finite], count * bins)
        counts = np.bincount(cell_N[finite], minlength=count * bins)
        values[name] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan).reshape(count, bins)
    # Use the maximum: a stall affects single steps, which a mean over many steps would hide.
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
        "sent": {kind: short(of_rank) for kind, of_rank in lines.sent.items()},
        "waits": {kind: short(of_rank) for kind, of_rank in lines.waits.items()},
    }


def places(run: Run) -> tuple[list[int], list[int]]:
    """Return the pipeline stage and the data-parallel rank of each rank."""
    lines, mapping = run.ranks, run.mapping
    if mapping is None or (lines.ranks and lines.ranks[-1] >= mapping.world):
        return [0] * len(lines.ranks), list(range(len(lines.ranks)))
    coordinates = [mapping.place(rank) for rank in lines.ranks]
    return [int(coordinate["pp"]) for coordinate in coordinates], [int(coordinate["dp"]) for coordinate in coordinates]


def slowdown(compute_RB: Floats, stage: Sequence[int]) -> Floats:
    """Return [R] mean compute time of each rank relative to the median of its pipeline stage; NaN if missing."""
    finite = np.isfinite(compute_RB)
    mean_R = np.where(finite, compute_RB, 0).sum(1) / np.maximum(finite.sum(1), 1)
    mean_R = np.where(finite.any(1) & (mean_R > 0), mean_R, np.nan)
    stages = np.array(stage)
    result = np.full(len(mean_R), np.nan)
    for stage_id in np.unique(stages):
        members = stages == stage_id
        if np.isfinite(mean_R[members]).any():
            result[members] = mean_R[members] / np.nanmedian(mean_R[members])
    return result


def links_of(lines: RankLines) -> dict[str, Any]:
    """Return bytes per step between ranks (or ranges of ranks) and between hosts, and probe seconds between hosts."""
    count = len(lines.ranks)
    per = max(-(-count // MATRIX), 1)
    hosts = list(dict.fromkeys(lines.hosts))
    place_of = {host: i for i, host in enumerate(hosts)}
    host_of_rank = [place_of[host] for host in lines.hosts]
    per_host = max(-(-len(hosts) // MATRIX), 1)
    labels = [str(rank) for rank in lines.ranks]
    host_rows, host_labels = [host // per_host for host in host_of_rank], _axis_labels(hosts, per_host)
    return {
        "rank": _matrix(lines.peers, [i // per for i in range(count)], _axis_labels(labels, per), "sum"),
        "host": _matrix(lines.peers, host_rows, host_labels, "sum"),
        "probe": _matrix(lines.probes, host_rows, host_labels, "worst"),
    }


def _axis_labels(labels: Sequence[str], per: int) -> list[str]:
    if per == 1:
        return [text(label) for label in labels]
    ends = [(i, min(i + per, len(labels)) - 1) for i in range(0, len(labels), per)]
    return [text(f"{labels[first]} to {labels[last]}") for first, last in ends]


def _matrix(pairs: Mapping[tuple[int, int], float], place: Sequence[int], labels: list[str], how: str) -> Any:
    if not pairs:
        return {"labels": [], "values": []}
    result = np.full((len(labels), len(labels)), np.nan)
    for (source, destination), value in pairs.items():
        cell = place[source], place[destination]
        before = result[cell]
        if math.isfinite(value):
            added = before + value if how == "sum" else max(before, value)
            result[cell] = value if math.isnan(before) else added
    return {"labels": labels, "values": short(result)}


def timeline_of(run: Run) -> dict[str, Any]:
    """Return starts of the ranks, faults and the effective training time; times are seconds since the first start."""
    lines = run.ranks
    ends_N = lines.begin_N + lines.values.get("total", np.zeros(0))
    begun = [attempt.started_s for attempt in run.attempts]
    # First begin and last end of the steps.
    bounds = [*lines.begin_N[:1].tolist(), *([float(np.nanmax(ends_N))] if _has_finite(ends_N) else [])]
    moments = [*begun, *bounds, *(attempt.ready_s for attempt in run.attempts), *(fault.time_s for fault in run.faults)]
    # The end that the run has written, unless that is of an earlier start.
    ended = run.ended_s >= max(moments, default=math.inf)
    moments = [moment for moment in [*moments, *[run.ended_s] * ended] if math.isfinite(moment)]
    begin, end = min(moments, default=0.0), max(moments, default=0.0)
    spent = _effective(run, end if bounds or ended else None)
    if spent is not None:
        end = max(end, begin + spent.wall_s)
    attempts = []
    for i, attempt in enumerate(run.attempts[:MARKS]):
        before = run.attempts[i - 1] if i else attempt
        after = run.attempts[i + 1] if i + 1 < len(run.attempts) else None
        # ``after.last_s`` is the end of the last step before ``after``. It belongs to an earlier attempt if this one
        # completed no step.
        stop = end if after is None else after.last_s if after.last_s >= attempt.ready_s else after.started_s
        attempts.append(
            {
                "number": attempt.number,
                "begin": _seconds_since(attempt.started_s, begin),
                "ready": _seconds_since(attempt.ready_s, begin),
                "end": _seconds_since(max(stop, attempt.ready_s), begin),
                "source": text(attempt.source),
                "world": attempt.world,
                "first_step": attempt.first_step,
                "mapping": _mapping_text(attempt),
                "remapped": (attempt.world, attempt.mapping) != (before.world, before.mapping),
            }
        )
    return {
        "wall_s": round(end - begin, 3),
        "effective": None if spent is None or not spent.wall_s else spent.ratio,
        "text": "" if spent is None else str(spent),
        "attempts": attempts,
        "faults": [
            {
                "at": _seconds_since(fault.time_s, begin),
                "step": fault.step,
                "kind": text(fault.kind),
                "ranks": fault.ranks[:64],
                "action": text(fault.action),
                "what": text(fault.what),
                "noticed_s": fault.noticed_s if math.isfinite(fault.noticed_s) else None,
            }
            for fault in run.faults[:MARKS]
        ],
        "fault_count": len(run.faults),
        "injected": [
            {
                "at": _seconds_since(injection.time_s, begin),
                "step": injection.step,
                "kind": text(injection.kind),
                "ranks": [injection.rank],
                "what": text(injection.what or injection.fault),
            }
            for injection in run.injected[:MARKS]
        ],
        "injected_count": len(run.injected),
    }


def _mapping_text(attempt: Attempt) -> str:
    degrees = " ".join(f"{name}{size}" for name, size in attempt.mapping.items() if size != 1)
    return text(f"{attempt.world} ranks{', ' * bool(degrees)}{degrees}")


def _effective(run: Run, end_s: float | None) -> EffectiveTime | None:
    """Return the effective training time; None if its files are missing or corrupted."""
    if not all((run.path / name).is_file() for name in (ATTEMPTS, METRICS)):
        return None
    try:
        return effective_time(run.path, end_s)
    except (CorruptFile, OSError, OverflowError):
        return None


def _seconds_since(moment: float, begin: float) -> float | None:
    return round(moment - begin, 3) if math.isfinite(moment) else None


def _has_finite(values: Floats) -> bool:
    return bool(np.isfinite(values).any())


def _reduce_finite(values: Floats | None, how: str) -> float | None:
    if values is None or not _has_finite(values):
        return None
    finite = values[np.isfinite(values)]
    return float(np.median(finite) if how == "median" else finite.max() if how == "max" else finite.mean())


def summary_of(run: Run, timeline: Mapping[str, Any], ranks: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return key numbers of the run: name, value, unit, and whether higher is better (1), worse (-1) or neutral (0)."""
    curves, values = run.curves, run.curves.values
    loss = values.get("loss", np.zeros(0))
    memory = run.ranks.values.get("memory_bytes")
    memory = memory if memory is not None and len(memory) else values.get("memory_bytes")
    peak_bytes = _reduce_finite(memory, "max")
    slowdowns = [value for value in ranks.get("slowdown", []) if value is not None]
    imbalance = curves.layers.get("imbalance")
    dead = curves.layers.get("dead_share")
    worst_imbalance = None if imbalance is None or not imbalance.size else _reduce_finite(imbalance[-1], "max")
    dead_share = None if dead is None or not dead.size else _reduce_finite(dead[-1], "max")
    rows: list[tuple[str, float | None, str, int]] = [
        ("Last step", float(curves.steps_S[-1]) if len(curves.steps_S) else None, "", 0),
        ("Ranks", float(run.attempts[-1].world if run.attempts else len(run.ranks.ranks)) or None, "", 0),
        ("Loss, last 10 steps", _reduce_finite(loss[-10:], "mean"), "nats/token", -1),
        ("Validation loss, last", curves.validation[-1][1] if curves.validation else None, "nats/token", -1),
        ("Gradient norm, median", _reduce_finite(values.get("grad_norm"), "median"), "", 0),
        ("Throughput, median", _reduce_finite(values.get("tokens_per_s"), "median"), "tokens/s", 1),
        ("MFU, median", _reduce_finite(values.get("mfu"), "median"), "%", 1),
        ("Step, median", _reduce_finite(values.get("total"), "median"), "s", -1),
        *((f"{name.capitalize()}, mean", _reduce_finite(values.get(name), "mean"), "s/step", -1) for name in PARTS),
        ("Memory, maximum of a rank", peak_bytes / 2**30 if peak_bytes is not None else None, "GiB", -1),
        ("Busiest expert, worst layer, last step", worst_imbalance, "x mean", -1),
        ("Dead experts, worst layer, last step", dead_share, "%", -1),
        ("Slowest rank's compute", max(slowdowns) if len(slowdowns) > 1 else None, "x median", -1),
        ("Effective training time", timeline["effective"], "%", 1),
        ("Starts of the ranks", float(len(run.attempts)) or None, "", -1),
        ("Faults", float(len(run.faults)), "", -1),
        ("Skipped steps", float(len(curves.skipped)), "", -1),
    ]
    return [
        {"name": name, "value": None if value is None else float(f"{value:.5g}"), "unit": unit, "better": better}
        for name, value, unit, better in rows
    ]
