"""A report as one file of HTML: data, script and style in it, nothing from the network.

What comes from a run's files is text, never markup: names in the HTML are escaped, data is JSON in which no tag can
begin, and the page's content security policy lets no other script run than those that were put in.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from string import Template
from typing import Any

from moe_comm.errors import MissingDependency
from moe_comm.observe.report.figures import text


@dataclass(frozen=True)
class Panel:
    """A chart on the page. views: of a control of its own, value and label. empty: what to say where there is none."""

    name: str
    title: str
    hint: str = ""
    views: tuple[tuple[str, str], ...] = ()
    empty: str = "Nothing was recorded."
    wide: bool = False


USE = "Drag over a chart to zoom, double-click to go back."
SCALES = (("linear", "linear scale"), ("log", "logarithmic scale"))
PANELS = (
    Panel("loss", "Loss", views=SCALES),
    Panel("gradient", "Gradient norm", views=SCALES),
    Panel("throughput", "Tokens a second"),
    Panel("mfu", "Model FLOPs utilisation"),
    Panel(
        "split",
        "Where a step's time goes",
        "Rank 0. Exposed communication is what compute waited for, other ranks among it.",
        (("mean", "means"), ("time", "over steps")),
    ),
    Panel(
        "health",
        "Expert health",
        "Of all layers the median and the one that 95% are no worse than; or one layer, chosen above.",
        (
            ("imbalance", "busiest expert"),
            ("least", "idlest expert"),
            ("mean", "average load"),
            ("dead_share", "dead experts"),
            ("diversity", "routing entropy"),
            ("dropped", "dropped slots"),
            ("balance", "balance loss"),
        ),
    ),
    Panel(
        "experts",
        "Expert load",
        "Load over the mean load of its layer. Choose a layer above to see it over all steps.",
        wide=True,
        empty="No loads of single experts were recorded (observe.every).",
    ),
    Panel(
        "stragglers",
        "Stragglers",
        "Mean compute of a rank over the median of its pipeline stage.",
        (("mapping", "data-parallel rank by pipeline stage"), ("host", "host by rank")),
        empty="No lines of single ranks were recorded (observe.events).",
    ),
    Panel(
        "links",
        "Bytes per link",
        "",
        (
            ("kind", "sent by each rank"),
            ("waits", "waits of each rank"),
            ("rank", "from rank to rank"),
            ("host", "from host to host"),
            ("probe", "probe between hosts, time"),
        ),
        empty="No lines of single ranks were recorded (observe.events).",
    ),
    Panel("memory", "Memory"),
    Panel("stalls", "Checkpoint stalls", "Waiting for the copy of the state and the save."),
    Panel(
        "timeline",
        "Starts and faults",
        "",
        wide=True,
        empty="Neither starts of the ranks nor faults were recorded.",
    ),
)


def render(runs: Sequence[dict[str, Any]]) -> str:
    """The page about one run, or comparing two, from what ``panels`` made of them.

    Raises:
        MissingDependency: plotly is not installed.
    """
    names = " and ".join(str(run["name"]) for run in runs)
    return document(
        _asset("page.html"),
        {"charts": _asset("charts.js"), "page": _asset("page.js")},
        title=html.escape(f"{names} – moe-comm"),  # noqa: RUF001
        heading=html.escape(names),
        about=html.escape(
            "; ".join(_about(run) for run in runs) + ". Drag over a chart to zoom, double-click to go back."
        ),
        sections=_sections(runs),
        data=embedded({"runs": list(runs)}),
    )


def document(template: str, scripts: Mapping[str, str], **said: str) -> str:
    """A page of charts: ``template`` with ``said``, Plotly, what pages have in common, and ``scripts`` by name.

    Its policy lets no other script run. The template has $policy, $style, $plotly and $draw beside the names given.

    Raises:
        MissingDependency: plotly is not installed.
    """
    scripts = {"plotly": plotly_script(), "draw": _asset("draw.js"), **scripts}
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts.values())
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    return Template(template).substitute(scripts, policy=policy, style=_asset("page.css"), **said)


def plotly_script() -> str:
    """Plotly's own script, as its package brings it."""
    try:
        script = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    except ModuleNotFoundError:
        raise MissingDependency("plotly is not installed; run: pip install 'moe_comm[observe]'") from None
    return script.replace("\r\n", "\n").replace("</script", "<\\/script")


def embedded(value: Any) -> str:
    """JSON for the inside of a script element: no tag, comment or line separator can begin in it."""
    said = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return said.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _about(run: dict[str, Any]) -> str:
    mapping = f", {run['mapping']}" if run["mapping"] else ""
    return text(f"{run['name']}: {run['status']}{mapping}")


def _sections(runs: Sequence[dict[str, Any]]) -> str:
    if len(runs) > 1:
        caption = '<table id="differences" aria-labelledby="title-summary"></table>'
        head = block("summary", "Differences", caption, wide=True)
    else:
        head = block("summary", "In short", '<dl class="tiles" id="tiles"></dl>' + _timeline_text(runs[0]), wide=True)
    parts = [head, *(panel_section(panel, len(runs)) for panel in PANELS)]
    notes = [(run["name"], note) for run in runs for note in run["notes"]]
    if notes:
        items = "".join(
            f"<li>{html.escape(f'{name}: {note}' if len(runs) > 1 else str(note))}</li>" for name, note in notes
        )
        parts.append(block("notes", "What is missing", f'<ul class="notes" id="notes">{items}</ul>', wide=True))
    return "\n".join(parts)


def _timeline_text(run: dict[str, Any]) -> str:
    timeline = run["timeline"]
    said = f"{timeline['said'].capitalize()}. " if timeline["said"] else ""
    return (
        f'<p class="hint">{html.escape(said)}{timeline["fault_count"]} fault(s) noticed, '
        f"{timeline['injected_count']} made on purpose.</p>"
    )


def block(name: str, title: str, body: str, wide: bool) -> str:
    """A titled part of a page; ``body`` is HTML."""
    return (
        f'<section id="panel-{name}" aria-labelledby="title-{name}"{" class=wide" if wide else ""}>'
        f'<h2 id="title-{name}">{title}</h2>{body}</section>'
    )


def panel_section(panel: Panel, runs: int = 1) -> str:
    """The place of a chart, with its controls and its table. runs: that the page is about."""
    controls = ""
    if panel.views and (panel.name != "split" or runs > 1):
        options = "".join(f'<option value="{value}">{label}</option>' for value, label in panel.views)
        controls = f'<label>Show <select id="view-{panel.name}" data-view="{panel.name}">{options}</select></label>'
    if panel.name == "experts":
        controls = (
            '<label>Step <input id="slide" type="range" min="0" max="0" value="0" step="1"></label>'
            '<output id="slide-step" for="slide"></output>'
        )
    below = '<p class="hint" id="slowest"></p>' if panel.name == "stragglers" else ""
    hint = f'<p class="hint">{panel.hint}</p>' if panel.hint else ""
    return block(
        panel.name,
        panel.title,
        f'{hint}<div class="controls">{controls}</div>'
        f'<div class="chart" id="chart-{panel.name}" role="img" aria-label="{panel.title}"></div>'
        f'<p class="empty" id="empty-{panel.name}" hidden>{panel.empty}</p>{below}'
        f'<details id="table-{panel.name}"><summary>{panel.title} as a table</summary>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{panel.title} as a table"></div></details>',
        panel.wide,
    )
