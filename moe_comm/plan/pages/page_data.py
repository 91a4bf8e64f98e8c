"""What the page about a mapping draws: small lists, whatever the number of positions, micro-batches and ranks.

    passes       at most PASSES bars: of longer steps the first and the last ones, and one bar for what is between
    operators    those of one micro-batch, once for all positions that do the same; with passes at most OPERATORS
    ranks        [positions, ranks of each], neighbours joined so that there are at most about CELLS

Everything here is plain JSON; numbers have five digits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_comm.plan.model.mapping import Mapping
from moe_comm.plan.model.memory import RankMemory, memory
from moe_comm.plan.pages.timeline import Piece, Timeline
from moe_comm.plan.search.answer import bubble_share, exposed_share, runners_up
from moe_comm.plan.search.question import Candidate, Question
from moe_comm.plan.step.blocks import LINKS
from moe_comm.plan.step.simulate import Simulated

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
"""How a step's causes are joined into few, by how their names begin."""


def data_of(
    question: Question,
    candidate: Candidate,
    timeline: Timeline,
    candidates: Sequence[Candidate],
    simulated: Simulated | None,
) -> dict[str, Any]:
    """All of it, for ``plan_page.js``."""
    step = _step(timeline)
    passes = sum(len(columns[0]) for columns in step["bars"].values())
    return {
        "summary": _summary(question, candidate, simulated),
        "step": step,
        "operators": _operators(timeline, OPERATORS - round(1.4 * passes)),  # a pass takes more letters
        "memory": _memory(question, candidate),
        "time": _time(candidates or (candidate,)),
        "links": _links(candidate),
        "ranks": _ranks(candidate, simulated),
    }


def label(mapping: Mapping) -> str:
    """A mapping in few letters: what is 1 or none is left out."""
    p = mapping.parallel
    degrees = {**{axis: p.sizes[axis] for axis in ("tp", "cp", "dp", "pp")}, "vpp": mapping.virtual}
    degrees |= {"ep": p.ep, "etp": p.etp, "micro-batch": mapping.micro_batch}
    found = [f"{axis} {size}" for axis, size in degrees.items() if size > 1] + [mapping.sharding]
    found[-1:-1] = [mapping.pipeline] if mapping.pipeline else []
    found += [f"recompute {mapping.recompute}"] if mapping.recompute != "none" else []
    found += [f"overlap {mapping.overlap}"] if mapping.overlap != "none" else []
    found += [f"dispatcher {mapping.dispatcher}"] if mapping.dispatcher != "all_to_all" else []
    return ", ".join(found)


def table(candidates: Sequence[Candidate]) -> list[list[str]]:
    """Rows of cells, the head first: the candidates, the best one first, and why the others lose."""
    rows = [["", "Mapping", "Step, s", "Tokens/s", "MFU", "Memory, GiB", "Why it is slower"]]
    for place, (one, why) in enumerate(runners_up(candidates)):
        held = f"{one.fit.worst.total / GIB:.1f} of {one.fit.available / GIB:.1f}"
        step = one.step
        numbers = [f"{step.seconds:.4g}", f"{step.tokens_per_s:,.0f}", f"{step.mfu:.1%}"]
        held += "" if one.fit else ", too much"
        rows.append([str(place + 1), label(one.mapping), *numbers, held, why or ""])
    return rows


def _summary(question: Question, candidate: Candidate, simulated: Simulated | None) -> list[dict[str, Any]]:
    step, fit = candidate.step, candidate.fit
    far = sum(links["between"] + links["across"] for links in step.sent.values()) / 1e9
    found: list[tuple[str, float, str]] = [
        ("Step", step.seconds, "s"),
        ("Tokens a second", step.tokens_per_s, ""),
        ("Model FLOPs utilisation", step.mfu, "%"),
        ("Accelerators", question.cluster.gpus, ""),
        ("Memory of the fullest rank", fit.worst.total / GIB, "GiB"),
        ("There is for tensors", fit.available / GIB, "GiB"),
        ("Waiting for the pipeline", bubble_share(step), "%"),
        ("Transfers that nothing hides", exposed_share(step), "%"),
        ("Sent to other hosts, a rank", far, "GB"),
    ]
    if simulated is not None:
        found.append(("With slow ranks, times longer", simulated.slowdown, ""))
    return [{"name": name, "value": _short(value), "unit": unit} for name, value, unit in found]


def _step(timeline: Timeline) -> dict[str, Any]:
    """Bars of each position: [position, begin, seconds, micro-batch, stage, passes in it] by what they are."""
    bars: dict[str, list[list[float]]] = defaultdict(list)
    each = max(2, PASSES // (2 * timeline.ranks))
    of: list[list[Piece]] = [[] for _ in range(timeline.ranks)]
    for one in timeline.pieces:
        if one.stream == "pass":
            of[one.rank].append(one)
        elif one.stage < 0:
            name = "optimizer" if one.name == "optimizer" else "gradients and weights"
            bars[name].append([one.rank, one.begin, one.seconds, -1, -1, 0])
    left_out = 0
    for rank, passes in enumerate(of):
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
    said = f"Of each position the first and the last {each} passes, one by one." if left_out else ""
    return {"positions": timeline.ranks, "bars": rows, "said": said}


def _operators(timeline: Timeline, most: int) -> list[dict[str, Any]]:
    """Those of the first micro-batch on the first stage of each position: stream, name, begin and length in
    milliseconds, and 1 for those of backward. Of what is too much, the first of forward and of backward."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for rank, pieces in _first_passes(timeline).items():
        streams = list(dict.fromkeys(one.stream for one in pieces if one.stream != "pass"))
        names = list(dict.fromkeys(one.name for one in pieces if one.stream != "pass"))
        rows, clock = [], 0.0
        for whole in (one for one in pieces if one.stream == "pass"):
            mine = [
                [
                    streams.index(one.stream),
                    names.index(one.name),
                    1e3 * (one.begin - whole.begin + clock),
                    1e3 * one.seconds,
                    int(whole.name != "forward"),
                ]
                for one in pieces
                if one.stream != "pass" and whole.begin <= one.begin and one.end <= whole.end
            ]
            rows += mine
            clock += whole.seconds
        # The same work at another time differs in the last digits.
        key = (*names, *(f"{row[3]:.3g}" for row in rows))
        found.setdefault(key, {"positions": [], "streams": streams, "names": names, "rows": rows})["positions"].append(
            rank
        )
    shown: list[dict[str, Any]] = []
    for one in found.values():
        rows = one["rows"]
        if shown and len(rows) > most:
            break
        if len(rows) > most:
            ways = [[row for row in rows if row[4] == way][: most // 2] for way in (0, 1)]
            rows = ways[0] + ways[1]
        most -= len(rows)
        positions = _ranges(one["positions"])
        said = f"position{'s' if len(one['positions']) > 1 else ''} {positions}"
        said += f", its first {len(rows)} of {len(one['rows'])}" if len(rows) < len(one["rows"]) else ""
        shown.append({**one, "positions": said, "rows": [_shorts(column) for column in zip(*rows, strict=True)]})
    return shown


def _first_passes(timeline: Timeline) -> dict[int, list[Piece]]:
    """Of each position, the pieces of its first stage and micro-batch."""
    stages: dict[int, int] = {}
    found: dict[int, list[Piece]] = defaultdict(list)
    for one in timeline.pieces:
        first = one.micro_batch == 0 and stages.setdefault(one.rank, one.stage) == one.stage
        if first and not one.stream.startswith("stage"):
            found[one.rank].append(one)
    return {rank: found[rank] for rank in sorted(found)}


def _memory(question: Question, candidate: Candidate) -> dict[str, Any]:
    """GiB of each term at each position, at its highest."""
    host = question.cluster.host_size
    held = memory(question.shape, candidate.mapping, question.load, question.global_batch, question.policy, host)
    terms: dict[str, list[float]] = defaultdict(list)
    for one in held:
        for name, count in _terms(one).items():
            terms[name].append(count / GIB)
    return {"terms": {name: _shorts(of) for name, of in terms.items()}, "available": candidate.fit.available / GIB}


def _terms(one: RankMemory) -> dict[str, int]:
    update = one.at_update > one.activations + one.buffers
    return {
        "weights": one.weights,
        "gradients": one.gradients,
        "optimizer": one.optimizer,
        "activations": 0 if update else one.activations,
        "buffers": 0 if update else one.buffers,
        "sums of gradients": one.at_update if update else 0,
    }


def _time(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Seconds of the busiest position of each candidate, by joined causes."""
    shown = candidates[:SHOWN]
    causes: dict[str, list[float]] = {name: [0.0] * len(shown) for name, _ in _CAUSES}
    for place, one in enumerate(shown):
        for cause, seconds in one.step.breakdown.items():
            causes[_joined(cause)][place] += seconds
    return {
        "labels": [label(one.mapping) for one in shown],
        "causes": {name: _shorts(of) for name, of in causes.items() if any(of)},
    }


def _joined(cause: str) -> str:
    for name, begins in _CAUSES:
        if begins and cause.startswith(begins):
            return name
    return "other layers' transfers"


def _links(candidate: Candidate) -> dict[str, Any]:
    """GB that a rank sends in a step, by operator over each kind of link."""
    sent = sorted(candidate.step.sent.items(), key=lambda item: sum(item[1].values()))
    return {
        "names": [name for name, _ in sent],
        "links": {link: _shorts([links[link] / 1e9 for _, links in sent]) for link in LINKS},
    }


def _ranks(candidate: Candidate, simulated: Simulated | None) -> dict[str, Any] | None:
    """Shares of the step that ranks compute and wait, [positions, columns of ``joined`` ranks]."""
    if simulated is None:
        return None
    pp = candidate.mapping.parallel.pp
    every = {"compute": simulated.compute, "wait": simulated.waiting}
    joined = -(-(len(simulated.waiting) // pp) // max(1, min(COLUMNS, CELLS // pp)))
    found: dict[str, Any] = {"joined": joined}
    for name, of in every.items():
        rows = of.reshape(pp, -1) / simulated.seconds
        starts = np.arange(0, rows.shape[1], joined)
        # Of joined ranks the one that holds the others: it computes most, and waits least.
        pick = np.maximum if name == "compute" else np.minimum
        found[name] = [_shorts(row) for row in pick.reduceat(rows, starts, axis=1).tolist()]
    return found


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    found: list[list[int]] = []
    for one in numbers:
        if found and one == found[-1][-1] + 1:
            found[-1][1:] = [one]
        else:
            found.append([one])
    return ", ".join("-".join(map(str, one)) for one in found)


def _short(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(f"{value:.5g}")


def _shorts(values: Sequence[float]) -> list[float | int]:
    return [_short(value) for value in values]
