"""A planned mapping as one file of HTML: its step, memory, bytes, and the mappings that it was chosen over."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_comm.observe.report.page import Panel, block, panel_section
from moe_comm.plan.pages import html_page
from moe_comm.plan.pages.page_data import SHOWN, data_of, label, table
from moe_comm.plan.pages.timeline import Timeline
from moe_comm.plan.search.question import Candidate, Question
from moe_comm.plan.step.simulate import Simulated


def write_page(
    question: Question,
    candidate: Candidate,
    timeline: Timeline,
    candidates: Sequence[Candidate],
    path: Path,
    simulated: Simulated | None = None,
) -> None:
    """Write the page about ``candidate``; it opens without a network.

    Args:
        timeline: of the candidate's step.
        candidates: of a search, the best first; the page says why the others lose. Empty: there was none.
        simulated: with slow ranks, to show who waits for them.

    Raises:
        MissingDependency: plotly is not installed.
        OSError: the file cannot be written.
    """
    html_page.write(render(question, candidate, timeline, candidates, simulated), path)


def render(
    question: Question,
    candidate: Candidate,
    timeline: Timeline,
    candidates: Sequence[Candidate],
    simulated: Simulated | None = None,
) -> str:
    """The page; see ``write_page``."""
    data = data_of(question, candidate, timeline, candidates, simulated)
    parts = [block("summary", "In short", f'<dl class="tiles" id="tiles"></dl>{_fit(candidate)}', wide=True)]
    if len(candidates) > 1:
        parts.append(block("candidates", "Candidates", _table(table(candidates[:SHOWN])), wide=True))
    parts += [panel_section(panel) for panel in panels(data, timeline)]
    load, cluster = question.load, question.cluster
    heading = f"{question.shape.name} on {cluster.gpus:,} x {cluster.accelerator.name}"
    about = (
        f"{label(candidate.mapping)}. {question.global_batch:,} sequences of {load.seq_len:,} tokens a step in "
        f"{load.dtype}, hosts of {cluster.host_size}. A prediction."
    )
    title = f"{heading} – moe-comm plan"  # noqa: RUF001
    return html_page.make("plan_page.js", title, heading, about, parts, data)


def panels(data: dict[str, Any], timeline: Timeline) -> tuple[Panel, ...]:
    """The charts of a page."""
    views = tuple((str(number), one["positions"]) for number, one in enumerate(data["operators"]))
    numbers = "; numbers are those of the candidates" if len(data["time"]["labels"]) > 1 else ""
    cut = f"{timeline.cut.capitalize()}. " if timeline.cut else ""
    found = (
        Panel("step", "The step", f"Passes of each pipeline position. {data['step']['said']}".strip(), wide=True),
        Panel(
            "operators",
            "Operators of a micro-batch",
            f"{cut}The first micro-batch on a position's first stage, by stream. Transfers that lie beside compute "
            "are hidden.",
            views,
            wide=True,
        ),
        Panel("time", "Where time goes", f"Of the busiest position{numbers}."),
        Panel("memory", "Memory", "Of the fullest rank of each position, when it holds the most."),
        Panel("links", "Bytes per link", "Of the busiest position.", empty="Nothing is sent."),
    )
    if data["ranks"] is None:
        return found
    ranks = Panel(
        "ranks",
        "Slow ranks",
        "Every rank replayed. A slow one waits least, and those that meet it wait for it.",
        (("wait", "waiting"), ("compute", "computing")),
    )
    return (*found, ranks)


def _fit(candidate: Candidate) -> str:
    return f'<p class="hint">Memory: {html.escape(str(candidate.fit))}.</p>'


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ([html.escape(cell) for cell in row] for row in rows)
    shown = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body)
    named = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Candidates">'
        f'<table id="candidates"><thead><tr>{named}</tr></thead><tbody>{shown}</tbody></table></div>'
    )
