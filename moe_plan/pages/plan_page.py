"""An HTML page about a planned mapping: its step, memory, bytes, and the mappings that it was chosen over."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_comm.observe.report.page import Panel, block, panel_section
from moe_plan.pages import html_page
from moe_plan.pages.page_data import SHOWN, data_of, label, table
from moe_plan.pages.timeline import StepTimeline
from moe_plan.search.request import PlanCandidate, PlanRequest
from moe_plan.step.simulate import SimulatedStep


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
    html_page.write(render(request, candidate, timeline, candidates, simulated), path)


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
    return html_page.make("plan_page.js", title, heading, about, parts, data)


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
