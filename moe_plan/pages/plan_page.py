"""An HTML page about a planned mapping: its step, memory, bytes, and the mappings that it was chosen over.

The data are short lists for any number of positions, micro-batches and ranks:

    passes       at most PASSES bars: the first and the last passes of long steps, and one bar for the rest
    operators    of one micro-batch, once for all positions with equal operators; passes and operators are limited
                 together, to about OPERATORS bars
    ranks        [positions, ranks of each], adjacent ranks joined so that there are about CELLS cells at most

All data is plain JSON. Numbers have five digits.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_comm.observe.report.page import Panel, block, panel_section
from moe_comm.runtime.safe_files import write_file
from moe_plan.model.mapping import Mapping
from moe_plan.model.memory import PositionMemory, memory
from moe_plan.pages import make_page
from moe_plan.pages.timeline import StepTimeline, TimelineSlice
from moe_plan.search.plan_json import bubble_share, exposed_share, runners_up
from moe_plan.search.preference import STEP_ERROR, is_equal
from moe_plan.search.request import PlanCandidate, PlanRequest
from moe_plan.step.blocks import LINKS
from moe_plan.step.simulate import SimulatedStep

PASSES, OPERATORS, CELLS, COLUMNS, SHOWN = 2000, 4000, 1500, 96, 10
GIB = 1 << 30
_CAUSES = (
    ("products", ("products",)),
    ("memory passes", ("memory passes",)),
    ("expert transfers", ("dispatch", "combine", "expert ")),
    ("other layers' transfers", ()),
    ("sharded weights", ("sharded weights",)),
    ("documents", ("document ", "uneven lengths")),
    ("pipeline", ("pipeline",)),
    ("gradients and weights", ("gradients and weights",)),
    ("optimizer", ("optimizer",)),
    ("offloaded data", ("offloaded",)),
)
"""Name of each group of causes in the page, and the prefixes of the causes that it adds up."""


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
    parts += [f"replicas {mapping.replicas}"] if mapping.replicas > 1 else []
    parts += [f"recompute {mapping.recompute}"] if mapping.recompute != "none" else []
    parts += [f"overlap {mapping.overlap}"] if mapping.overlap != "none" else []
    parts += [f"dispatcher {mapping.dispatcher}"] if mapping.dispatcher != "all_to_all" else []
    return ", ".join(parts)


def table(candidates: Sequence[PlanCandidate]) -> list[list[str]]:
    """Return rows of cells, with a header: the candidates, the best first, and why the others are slower.

    "=" marks steps that are equal within the error of a prediction.
    """
    rows = [["", "Mapping", f"Step, s ± {STEP_ERROR:.0%}", "Tokens/s", "MFU", "Memory, GiB", "Why it is slower"]]
    for index, (candidate, why) in enumerate(runners_up(candidates)):
        memory_text = f"{candidate.fit.fullest.total / GIB:.1f} of {candidate.fit.available / GIB:.1f}"
        step = candidate.step
        numbers = [f"{step.seconds:.4g}", f"{step.tokens_per_s:,.0f}", f"{step.mfu:.1%}"]
        memory_text += "" if candidate.fit else ", too much"
        number = f"{index + 1}{' =' * is_equal(candidate, candidates)}"
        rows.append([number, label(candidate.mapping), *numbers, memory_text, why or ""])
    return rows


def _summary(request: PlanRequest, candidate: PlanCandidate, simulated: SimulatedStep | None) -> list[dict[str, Any]]:
    step, fit = candidate.step, candidate.fit
    remote_gb = sum(links["between"] + links["across"] for links in step.sent.values()) / 1e9
    result: list[tuple[str, float, str]] = [
        ("Step", step.seconds, "s"),
        ("Tokens a second", step.tokens_per_s, ""),
        ("Model FLOPs utilisation", step.mfu, "%"),
        ("Accelerators", request.cluster.gpus, ""),
        ("Memory of the fullest rank", fit.fullest.total / GIB, "GiB"),
        ("Memory available to tensors", fit.available / GIB, "GiB"),
        ("Waiting for the pipeline", bubble_share(step), "%"),
        ("Exposed transfers", exposed_share(step), "%"),
        ("Sent to other hosts by a rank", remote_gb, "GB"),
    ]
    if simulated is not None:
        result.append(("Slowdown with slow ranks", simulated.slowdown, ""))
    return [{"name": name, "value": _short(value), "unit": unit} for name, value, unit in result]


def _step(timeline: StepTimeline) -> dict[str, Any]:
    """Return bars of each position by kind: [position, begin, seconds, micro-batch, stage, number of passes]."""
    bars: dict[str, list[list[float]]] = defaultdict(list)
    shown_each_side = max(2, PASSES // (2 * timeline.ranks))
    passes_of: list[list[TimelineSlice]] = [[] for _ in range(timeline.ranks)]
    for slice_ in timeline.slices:
        if slice_.stream == "pass":
            passes_of[slice_.rank].append(slice_)
        elif slice_.stage < 0:
            name = "optimizer" if slice_.name == "optimizer" else "gradients and weights"
            bars[name].append([slice_.rank, slice_.begin, slice_.seconds, -1, -1, 0])
    left_out = 0
    for rank, passes in enumerate(passes_of):
        passes.sort(key=lambda slice_: slice_.begin)
        middle = passes[shown_each_side:-shown_each_side] if len(passes) > 2 * shown_each_side + 1 else []
        if middle:
            left_out += len(middle)
            begin, end = middle[0].begin, middle[-1].end
            bars["forward and backward"].append([rank, begin, end - begin, -1, -1, len(middle)])
            passes = passes[:shown_each_side] + passes[-shown_each_side:]
        for slice_ in passes:
            bars[slice_.name].append([rank, slice_.begin, slice_.seconds, slice_.micro_batch, slice_.stage, 1])
    order = ("forward", "backward", "input", "weight", "forward and backward", "gradients and weights", "optimizer")
    rows = {name: [_shorts(column) for column in zip(*bars[name], strict=True)] for name in order if name in bars}
    individual = f"The first and the last {shown_each_side} passes of each position are shown individually."
    note = individual if left_out else ""
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
        for pass_slice in (one for one in slices if one.stream == "pass"):
            pass_rows = [
                [
                    streams.index(one.stream),
                    names.index(one.name),
                    1e3 * (one.begin - pass_slice.begin + clock),
                    1e3 * one.seconds,
                    int(pass_slice.name != "forward"),
                ]
                for one in slices
                if one.stream != "pass" and pass_slice.begin <= one.begin and one.end <= pass_slice.end
            ]
            rows += pass_rows
            clock += pass_slice.seconds
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
    for slice_ in timeline.slices:
        first = slice_.micro_batch == 0 and stages.setdefault(slice_.rank, slice_.stage) == slice_.stage
        if first and not slice_.stream.startswith("stage"):
            result[slice_.rank].append(slice_)
    return {rank: result[rank] for rank in sorted(result)}


def _memory(request: PlanRequest, candidate: PlanCandidate) -> dict[str, Any]:
    """Return the peak memory of each position by term, in GiB."""
    host = request.cluster.host_size
    positions = memory(request.shape, candidate.mapping, request.load, request.global_batch, request.policy, host)
    terms: dict[str, list[float]] = defaultdict(list)
    for position in positions:
        for name, count in _terms(position).items():
            terms[name].append(count / GIB)
    return {"terms": {name: _shorts(gib) for name, gib in terms.items()}, "available": candidate.fit.available / GIB}


def _terms(position: PositionMemory) -> dict[str, int]:
    update = position.at_update > position.activations + position.buffers
    return {
        "weights": position.weights,
        "gradients": position.gradients,
        "optimizer": position.optimizer,
        "activations": 0 if update else position.activations,
        "buffers": 0 if update else position.buffers,
        "sums of gradients": position.at_update if update else 0,
    }


def _time(candidates: Sequence[PlanCandidate]) -> dict[str, Any]:
    """Return the seconds of the busiest position of each candidate by group of causes."""
    shown = candidates[:SHOWN]
    causes: dict[str, list[float]] = {name: [0.0] * len(shown) for name, _ in _CAUSES}
    for index, candidate in enumerate(shown):
        for cause, seconds in candidate.step.breakdown.items():
            causes[_group(cause)][index] += seconds
    return {
        "labels": [label(candidate.mapping) for candidate in shown],
        "causes": {name: _shorts(seconds_of) for name, seconds_of in causes.items() if any(seconds_of)},
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
    seconds_by_kind = {"compute": simulated.compute, "wait": simulated.waiting}
    joined = -(-(len(simulated.waiting) // pp) // max(1, min(COLUMNS, CELLS // pp)))
    result: dict[str, Any] = {"joined": joined}
    for name, seconds_W in seconds_by_kind.items():
        rows = seconds_W.reshape(pp, -1) / simulated.seconds
        starts = np.arange(0, rows.shape[1], joined)
        # The slowest of joined ranks represents them: it computes most and waits least.
        reduction = np.maximum if name == "compute" else np.minimum
        result[name] = [_shorts(row) for row in reduction.reduceat(rows, starts, axis=1).tolist()]
    return result


def _ranges(numbers: Sequence[int]) -> str:
    """Format [0, 1, 2, 5] as "0-2, 5"."""
    result: list[list[int]] = []
    for number in numbers:
        if result and number == result[-1][-1] + 1:
            result[-1][1:] = [number]
        else:
            result.append([number])
    return ", ".join("-".join(map(str, bounds)) for bounds in result)


def _short(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(f"{value:.5g}")


def _shorts(values: Sequence[float]) -> list[float | int]:
    return [_short(value) for value in values]


def write_page(
    request: PlanRequest,
    candidate: PlanCandidate,
    timeline: StepTimeline,
    candidates: Sequence[PlanCandidate],
    path: Path,
    simulated: SimulatedStep | None = None,
) -> None:
    """Write a self-contained page about ``candidate``.

    Args:
        timeline: the candidate's step.
        candidates: the candidates of a search, the best first. Empty: there was no search.
        simulated: the step with slow ranks.

    Raises:
        MissingDependency: plotly is not installed.
        OSError: the file cannot be written.
    """
    write_file(path, render(request, candidate, timeline, candidates, simulated))


def render(
    request: PlanRequest,
    candidate: PlanCandidate,
    timeline: StepTimeline,
    candidates: Sequence[PlanCandidate],
    simulated: SimulatedStep | None = None,
) -> str:
    """Return the page, see ``write_page``."""
    data = data_of(request, candidate, timeline, candidates, simulated)
    parts = [block("summary", "In short", f'<dl class="tiles" id="tiles"></dl>{_fit(candidate)}', wide=True)]
    if len(candidates) > 1:
        parts.append(block("candidates", "Candidates", _table(table(candidates[:SHOWN])), wide=True))
    parts += [panel_section(panel) for panel in panels(data, timeline)]
    load, cluster = request.load, request.cluster
    heading = f"{request.shape.name} on {cluster.gpus:,} x {cluster.accelerator.name}"
    about = (
        f"{label(candidate.mapping)}. {request.global_batch:,} sequences of {load.seq_len:,} tokens per step in "
        f"{load.dtype}, hosts of {cluster.host_size}. A prediction."
    )
    title = f"{heading} – moe-comm plan"  # noqa: RUF001
    return make_page("plan_page.js", title, heading, about, parts, data)


def panels(data: dict[str, Any], timeline: StepTimeline) -> tuple[Panel, ...]:
    """Return the charts of a page."""
    views = tuple((str(number), one["positions"]) for number, one in enumerate(data["operators"]))
    numbers = "; numbers refer to the candidates" if len(data["time"]["labels"]) > 1 else ""
    omitted = f"{timeline.omitted.capitalize()}. " if timeline.omitted else ""
    result = (
        Panel("step", "The step", f"Passes of each pipeline position. {data['step']['note']}".strip(), wide=True),
        Panel(
            "operators",
            "Operators of a micro-batch",
            f"{omitted}The first micro-batch on a position's first stage, by stream. Transfers that overlap with "
            "compute are hidden.",
            views,
            wide=True,
        ),
        Panel("time", "Where time goes", f"Seconds of the busiest position by cause{numbers}."),
        Panel("memory", "Memory", "Peak of the fullest rank of each position."),
        Panel("links", "Bytes per link", "Bytes that a rank of the busiest position sends.", empty="Nothing is sent."),
    )
    if data["ranks"] is None:
        return result
    ranks = Panel(
        "ranks",
        "Slow ranks",
        "From a replay of every rank. A slow rank waits least; the ranks that communicate with it wait for it.",
        (("wait", "waiting"), ("compute", "computing")),
    )
    return (*result, ranks)


def _fit(candidate: PlanCandidate) -> str:
    return f'<p class="hint">Memory: {html.escape(str(candidate.fit))}.</p>'


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ([html.escape(cell) for cell in row] for row in rows)
    shown = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body)
    named = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Candidates">'
        f'<table id="candidates"><thead><tr>{named}</tr></thead><tbody>{shown}</tbody></table></div>'
    )
