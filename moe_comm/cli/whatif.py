"""``moe-comm whatif``: the cost of stragglers in a run, from replays with measured and with ideal durations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_comm.cli.options import JsonOut, echo, load
from moe_comm.errors import ConfigError

app = typer.Typer()


@app.command()
def whatif(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or a published straggler trace.")],
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only steps A to B.  [default: all with recorded spans]")
    ] = None,
    json_out: JsonOut = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page with a heat map of the workers to FILE.")
    ] = None,
) -> None:
    """Report how much slower a run was than without stragglers, and which operations and ranks caused it."""
    report, text = load("moe_comm.bench.common.report", "bench"), load("moe_plan.whatif.text", "observe")
    for path in (json_out, page):
        report.check_writable(None if path is None else str(path))
    what_if = load("moe_plan.whatif.analysis", "observe").what_if
    if run.is_dir():
        selected = None if steps is None else load("moe_comm.observe.trace", "observe").parse_steps(steps)
        trace = load("moe_plan.whatif.run_trace", "observe").read_run_trace(run, selected)
        analysis = what_if(trace.graph, trace.even_N)
    elif steps is not None:
        raise ConfigError("--steps applies only to runs of moe-comm, not to published traces")
    else:
        published = load("moe_plan.whatif.straggler_trace", "data")
        analysis = what_if(published.straggler_graph(published.read_straggler_trace(run)))
    report.write_json(text.summary(analysis), json_out)
    echo(text.text(analysis), err=json_out == "-")
    if page is not None:
        load("moe_plan.pages.whatif_page", "observe").write_page(analysis, page, run.absolute().name)
        echo(f"wrote {page} ({page.stat().st_size / 2**20:.1f} MiB)", err=json_out == "-")
