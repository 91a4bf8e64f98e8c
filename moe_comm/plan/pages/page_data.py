"""Data of the page about a mapping: short lists for any number of positions, micro-batches and ranks.

    passes       at most PASSES bars: the first and the last passes of long steps, and one bar for the rest
    operators    of one micro-batch, once for all positions with equal operators; with passes at most OPERATORS
    ranks        [positions, ranks of each], adjacent ranks joined so that there are about CELLS cells at most

All data is plain JSON. Numbers have five digits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_comm.plan.model.mapping import Mapping
from moe_comm.plan.model.memory import PositionMemory, memory
from moe_comm.plan.pages.timeline import StepTimeline, TimelineSlice
from moe_comm.plan.search.plan_json import bubble_share, exposed_share, runners_up
from moe_comm.plan.search.request import PlanCandidate, PlanRequest
from moe_comm.plan.step.blocks import LINKS
from moe_comm.plan.step.simulate import SimulatedStep

PASSES, OPERATORS, CELLS, COLUMNS, SHOWN = 2000, 4000, 1500, 96, 10
GIB = 1 << 30
_CAUSES = (
    ("products", ("products",)),
    ("memory passes", ("memory passes",)),
    ("expert transfers", ("dispatch", "combine", "expert ")),
    ("other layers' transfers", ()),
    ("sharded weights", ("sharded weights",)),
    ("pipeline", ("pipeline",)),
    ("gradients and weights", ("gradients and weights",)),
    ("optimizer", ("optimizer",)),
)
"""Groups of a step's causes, by prefix of their names."""


def data_of(
    request: PlanRequest,
    candidate: PlanCandidate,
    timeline: StepTimeline,
    candidates: Sequence[PlanCandidate],
    simulated: SimulatedStep | None,
) -> dict[str, Any]:
    """Return all data for ``plan_page.js``."""
    step = _step(timeline)
    passes = sum(len(columns[0]) for columns in step["bars"].values())
    return {
        "summary": _summary(request, candidate, simulated),
        "step": step,
        "operators": _operators(timeline, OPERATORS - round(1.4 * passes)),  # a pass needs more characters
        "memory": _memory(request, candidate),
        "time": _time(candidates or (candidate,)),
        "links": _links(candidate),
        "ranks": _ranks(candidate, simulated),
    }


def label(mapping: Mapping) -> str:
    """Return a short description of a mapping, without degrees of 1 and settings of none."""
    p = mapping.parallel
    degrees = {**{axis: p.sizes[axis] for axis in ("tp", "cp", "dp", "pp")}, "vpp": mapping.virtual}
    degrees |= {"ep": p.ep, "etp": p.etp, "micro-batch": mapping.micro_batch}
    parts = [f"{axis} {size}" for axis, size in degrees.items() if size > 1]
    parts += ([mapping.pipeline] if mapping.pipeline else []) + [mapping.sharding]
    parts += [f"recompute {mapping.recompute}"] if mapping.recompute != "none" else []
    parts += [f"overlap {mapping.overlap}"] if mapping.overlap != "none" else []
    parts += [f"dispatcher {mapping.dispatcher}"] if mapping.dispatcher != "all_to_all" else []
    return ", ".join(parts)


def table(candidates: Sequence[PlanCandidate]) -> list[list[str]]:
    """Return rows of cells, with a header: the candidates, the best first, and why the others are slower."""
    rows = [["", "Mapping", "Step, s", "Tokens/s", "MFU", "Memory, GiB", "Why it is slower"]]
    for index, (one, why) in enumerate(runners_up(candidates)):
        held = f"{one.fit.fullest.total / GIB:.1f} of {one.fit.available / GIB:.1f}"
        step = one.step
        numbers = [f"{step.seconds:.4g}", f"{step.tokens_per_s:,.0f}", f"{step.mfu:.1%}"]
        held += "" if one.fit else ", too much"
        rows.append([str(index + 1), label(one.mapping), *numbers, held, why or ""])
    return rows


def _summary(request: PlanRequest, candidate: PlanCandidate, simulated: SimulatedStep | None) -> list[dict[str, Any]]:
    step, fit = candidate.step, candidate.fit
    far = sum(links["between"] + links["across"] for links in step.sent.values()) / 1e9
    result: list[tuple[str, float, str]] = [
        ("Step", step.seconds, "s"),
        ("Tokens a second", step.tokens_per_s, ""),
        ("Model FLOPs utilisation", step.mfu, "%"),
        ("Accelerators", request.cluster.gpus, ""),
        ("Memory of the fullest rank", fit.fullest.total / GIB, "GiB"),
        ("Memory available to tensors", fit.available / GIB, "GiB"),
        ("Waiting for the pipeline", bubble_share(step), "%"),
        ("Exposed transfers", exposed_share(step), "%"),
        ("Sent to other hosts by a rank", far, "GB"),
    ]
    if simulated is not None:
        result.append(("Slowdown with slow ranks", simulated.slowdown, ""))
    return [{"name": name, "value": _short(value), "unit": unit} for name, value, unit in result]


def _step(timeline: StepTimeline) -> dict[str, Any]:
    """Return bars of each position by kind: [position, begin, seconds, micro-batch, stage, number of passes]."""
    bars: dict[str, list[list[float]]] = defaultdict(list)
    each = max(2, PASSES // (2 * timeline.ranks))
    passes_of: list[list[TimelineSlice]] = [[] for _ in range(timeline.ranks)]
    for one in timeline.slices:
        if one.stream == "pass":
            passes_of[one.rank].append(one)
        elif one.stage < 0:
            name = "optimizer" if one.name == "optimizer" else "gradients and weights"
            bars[name].append([one.rank, one.begin, one.seconds, -1, -1, 0])
    left_out = 0
    for rank, passes in enumerate(passes_of):
        passes.sort(key=lambda one: one.begin)
        middle = passes[each:-each] if len(passes) > 2 * each + 1 else []
        if middle:
            left_out += len(middle)
            begin, end = middle[0].begin, middle[-1].end
            bars["forward and backward"].append([rank, begin, end - begin, -1, -1, len(middle)])
            passes = passes[:each] + passes[-each:]
        for one in passes:
            bars[one.name].append([rank, one.begin, one.seconds, one.micro_batch, one.stage, 1])
    order = ("forward", "backward", "input", "weight", "forward and backward", "gradients and weights", "optimizer")
    rows = {name: [_shorts(column) for column in zip(*bars[name], strict=True)] for name in order if name in bars}
    note = f"The first and the last {each} passes of each position are shown individually." if left_out else ""
    return {"positions": timeline.ranks, "bars": rows, "note": note}


def _operators(timeline: StepTimeline, most: int) -> list[dict[str, Any]]:
    """Return the operators of the first micro-batch on the first stage of each position.

    Rows are stream, name, begin and length in milliseconds, and 1 for backward. If there are too many, only the first
    ones of forward and backward are returned.
    """
    result: dict[tuple[Any, ...], dict[str, Any]] = {}
    for rank, slices in _first_passes(timeline).items():
        streams = list(dict.fromkeys(one.stream for one in slices if one.stream != "pass"))
        names = list(dict.fromkeys(one.name for one in slices if one.stream != "pass"))
        rows, clock = [], 0.0
        for each in (one for one in slices if one.stream == "pass"):
            mine = [
                [
                    streams.index(one.stream),
                    names.index(one.name),
                    1e3 * (one.begin - each.begin + clock),
                    1e3 * one.seconds,
                    int(each.name != "forward"),
                ]
                for one in slices
                if one.stream != "pass" and each.begin <= one.begin and one.end <= each.end
            ]
            rows += mine
            clock += each.seconds
        # Equal operators at different times differ in the last digits.
        key = (*names, *(f"{row[3]:.3g}" for row in rows))
        result.setdefault(key, {"positions": [], "streams": streams, "names": names, "rows": rows})["positions"].append(
            rank
        )
    shown: list[dict[str, Any]] = []
    for one in result.values():
        rows = one["rows"]
        if shown and len(rows) > most:
            break
        if len(rows) > most:
            directions = [[row for row in rows if row[4] == direction][: most // 2] for direction in (0, 1)]
            rows = directions[0] + directions[1]
        most -= len(rows)
        positions = _ranges(one["positions"])
        title = f"position{'s' if len(one['positions']) > 1 else ''} {positions}"
        title += f", its first {len(rows)} of {len(one['rows'])}" if len(rows) < len(one["rows"]) else ""
        shown.append({**one, "positions": title, "rows": [_shorts(column) for column in zip(*rows, strict=True)]})
    return shown


def _first_passes(timeline: StepTimeline) -> dict[int, list[TimelineSlice]]:
    """Return the slices of the first stage and micro-batch of each position."""
    stages: dict[int, int] = {}
    result: dict[int, list[TimelineSlice]] = defaultdict(list)
    for one in timeline.slices:
        first = one.micro_batch == 0 and stages.setdefault(one.rank, one.stage) == one.stage
        if first and not one.stream.startswith("stage"):
            result[one.rank].append(one)
    return {rank: result[rank] for rank in sorted(result)}


def _memory(request: PlanRequest, candidate: PlanCandidate) -> dict[str, Any]:
    """Return the peak memory of each position by term, in GiB."""
    host = request.cluster.host_size
    held = memory(request.shape, candidate.mapping, request.load, request.global_batch, request.policy, host)
    terms: dict[str, list[float]] = defaultdict(list)
    for one in held:
        for name, count in _terms(one).items():
            terms[name].append(count / GIB)
    return {"terms": {name: _shorts(of) for name, of in terms.items()}, "available": candidate.fit.available / GIB}


def _terms(one: PositionMemory) -> dict[str, int]:
    update = one.at_update > one.activations + one.buffers
    return {
        "weights": one.weights,
        "gradients": one.gradients,
        "optimizer": one.optimizer,
        "activations": 0 if update else one.activations,
        "buffers": 0 if update else one.buffers,
        "sums of gradients": one.at_update if update else 0,
    }


def _time(candidates: Sequence[PlanCandidate]) -> dict[str, Any]:
    """Return the seconds of the busiest position of each candidate by group of causes."""
    shown = candidates[:SHOWN]
    causes: dict[str, list[float]] = {name: [0.0] * len(shown) for name, _ in _CAUSES}
    for index, one in enumerate(shown):
        for cause, seconds in one.step.breakdown.items():
            causes[_group(cause)][index] += seconds
    return {
        "labels": [label(one.mapping) for one in shown],
        "causes": {name: _shorts(of) for name, of in causes.items() if any(of)},
    }


def _group(cause: str) -> str:
    for name, prefixes in _CAUSES:
        if prefixes and cause.startswith(prefixes):
            return name
    return "other layers' transfers"


def _links(candidate: PlanCandidate) -> dict[str, Any]:
    """Return the GB that a rank sends in a step, by operator and kind of link."""
    sent = sorted(candidate.step.sent.items(), key=lambda item: sum(item[1].values()))
    return {
        "names": [name for name, _ in sent],
        "links": {link: _shorts([links[link] / 1e9 for _, links in sent]) for link in LINKS},
    }


def _ranks(candidate: PlanCandidate, simulated: SimulatedStep | None) -> dict[str, Any] | None:
    """Return the shares of the step in which ranks compute and wait, [positions, columns of ``joined`` ranks]."""
    if simulated is None:
        return None
    pp = candidate.mapping.parallel.pp
    every = {"compute": simulated.compute, "wait": simulated.waiting}
    joined = -(-(len(simulated.waiting) // pp) // max(1, min(COLUMNS, CELLS // pp)))
    result: dict[str, Any] = {"joined": joined}
    for name, of in every.items():
        rows = of.reshape(pp, -1) / simulated.seconds
        starts = np.arange(0, rows.shape[1], joined)
        # The slowest of joined ranks represents them: it computes most and waits least.
        pick = np.maximum if name == "compute" else np.minimum
        result[name] = [_shorts(row) for row in pick.reduceat(rows, starts, axis=1).tolist()]
    return result


def _ranges(numbers: Sequence[int]) -> str:
    """Format [0, 1, 2, 5] as "0-2, 5"."""
    result: list[list[int]] = []
    for one in numbers:
        if result and one == result[-1][-1] + 1:
            result[-1][1:] = [one]
        else:
            result.append([one])
    return ", ".join("-".join(map(str, one)) for one in result)


def _short(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(f"{value:.5g}")


def _shorts(values: Sequence[float]) -> list[float | int]:
    return [_short(value) for value in values]
