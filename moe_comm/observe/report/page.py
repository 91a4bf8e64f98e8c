"""Render a report as one HTML file that contains its data, scripts and styles.

Content of record files never becomes markup: text in HTML is escaped, data is JSON in which no tag can begin, and the
content security policy of the page allows only the scripts of this package.
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

from moe_comm.errors import MissingDependency, pip_install
from moe_comm.observe.report.figures import text


@dataclass(frozen=True)
class Panel:
    """A chart of the page. views: value and label of each option of its control. empty: text shown without data."""

    name: str
    title: str
    hint: str = ""
    views: tuple[tuple[str, str], ...] = ()
    empty: str = "Nothing was recorded."
    wide: bool = False


USE = "Drag over a chart to zoom; double-click to reset."
SCALES = (("linear", "linear scale"), ("log", "logarithmic scale"))
PANELS = (
    Panel("loss", "Loss", views=SCALES),
    Panel("gradient", "Gradient norm", views=SCALES),
    Panel("throughput", "Tokens per second"),
    Panel("mfu", "Model FLOPs utilisation"),
    Panel(
        "split",
        "Time of a step",
        "Rank 0. Communication is exposed communication, including waiting for other ranks.",
        (("mean", "means"), ("time", "over steps")),
    ),
    Panel(
        "health",
        "Expert health",
        "Median and 95th percentile of all layers, or the layer chosen above.",
        (
            ("imbalance", "busiest expert"),
            ("least", "idlest expert"),
            ("mean", "average load"),
            ("dead_share", "dead experts"),
            ("diversity", "routing entropy"),
            ("dropped", "dropped slots"),
            ("balance", "balance loss"),
            ("rows_fixed", "busiest rank, experts at home"),
            ("rows_lent", "busiest rank, as computed"),
            ("lent_experts", "lent experts"),
            ("resident_share", "resident copies"),
            ("copied_bytes", "bytes of copies"),
        ),
    ),
    Panel(
        "experts",
        "Expert load",
        "Load relative to the mean load of the layer. Choose a layer above to show it over all steps.",
        wide=True,
        empty="No per-expert loads were recorded (observe.every).",
    ),
    Panel(
        "owners",
        "Ranks of the experts",
        "The home of each expert. Choose a layer above to show its switches over time.",
        wide=True,
        empty="No placement decisions were recorded (placement.kind).",
    ),
    Panel(
        "stragglers",
        "Stragglers",
        "Mean compute time of a rank relative to the median of its pipeline stage.",
        (("mapping", "data-parallel rank by pipeline stage"), ("host", "host by rank")),
        empty="No rank records were written (observe.events).",
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
        empty="No rank records were written (observe.events).",
    ),
    Panel("memory", "Memory"),
    Panel(
        "tiers",
        "Offloaded state, activations and weights",
        "Rank 0. The update and the passes wait when no chunk is in memory; transfers may also continue after them.",
        (("time", "seconds of a step"), ("moved", "bytes of a step"), ("stored", "bytes stored and in memory")),
        empty="Nothing was offloaded (offload.optimizer, offload.activations, offload.weights).",
    ),
    Panel(
        "lengths",
        "Work of mixed lengths",
        "Predicted work of the slowest and the idlest rank of dp and cp, relative to the mean.",
        empty="Lengths were not balanced (parallel.lengths).",
    ),
    Panel("stalls", "Checkpoint stalls", "Time waiting for the copy of the state and for the save."),
    Panel(
        "timeline",
        "Starts and faults",
        "",
        wide=True,
        empty="No starts of the ranks and no faults were recorded.",
    ),
)


def render(runs: Sequence[dict[str, Any]]) -> str:
    """Return the page of one run, or comparing two, from the results of ``panels``."""
    names = " and ".join(str(run["name"]) for run in runs)
    return document(
        _asset("page.html"),
        {"charts": _asset("charts.js"), "page": _asset("page.js")},
        title=html.escape(f"{names} – moe-comm"),  # noqa: RUF001
        heading=html.escape(names),
        about=html.escape(f"{'; '.join(_about(run) for run in runs)}. {USE}"),
        sections=_sections(runs),
        data=embedded({"runs": list(runs)}),
    )


def document(template: str, scripts: Mapping[str, str], **texts: str) -> str:
    """Return ``template`` filled with ``texts``, ``scripts`` by name, Plotly, and the shared script and style.

    The content security policy allows only these scripts. The template also has $policy, $style, $plotly and $draw.
    """
    scripts = {"plotly": plotly_script(), "draw": _asset("draw.js"), **scripts}
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts.values())
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    return Template(template).substitute(scripts, policy=policy, style=_asset("page.css"), **texts)


def plotly_script() -> str:
    """Return the script of the installed Plotly package."""
    try:
        script = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    except ModuleNotFoundError:
        raise MissingDependency(f"plotly is not installed; run: {pip_install('observe')}") from None
    return script.replace("\r\n", "\n").replace("</script", "<\\/script")


def embedded(value: Any) -> str:
    """Return JSON for a script element, in which no tag, comment or line separator can begin."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


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
        head = block("summary", "Summary", '<dl class="tiles" id="tiles"></dl>' + _timeline_text(runs[0]), wide=True)
    parts = [head, *(panel_section(panel, len(runs)) for panel in PANELS)]
    notes = [(run["name"], note) for run in runs for note in run["notes"]]
    if notes:
        items = "".join(
            f"<li>{html.escape(f'{name}: {note}' if len(runs) > 1 else str(note))}</li>" for name, note in notes
        )
        parts.append(block("notes", "Missing data", f'<ul class="notes" id="notes">{items}</ul>', wide=True))
    return "\n".join(parts)


def _timeline_text(run: dict[str, Any]) -> str:
    timeline = run["timeline"]
    effective = f"{timeline['text'].capitalize()}. " if timeline["text"] else ""
    return (
        f'<p class="hint">{html.escape(effective)}{timeline["fault_count"]} fault(s) detected, '
        f"{timeline['injected_count']} injected.</p>"
    )


def block(name: str, title: str, body: str, wide: bool) -> str:
    """Return a titled section; ``body`` is HTML."""
    return (
        f'<section id="panel-{name}" aria-labelledby="title-{name}"{" class=wide" if wide else ""}>'
        f'<h2 id="title-{name}">{title}</h2>{body}</section>'
    )


def panel_section(panel: Panel, runs: int = 1) -> str:
    """Return the section of a chart with its controls and table. runs: number of runs on the page."""
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
