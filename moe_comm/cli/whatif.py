"""``moe-comm whatif``: what stragglers cost a run, by replaying it as it was and as it could have been."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_comm.cli.options import JsonOut, load
from moe_comm.errors import ConfigError

app = typer.Typer()


@app.command()
def whatif(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a published straggler trace.")],
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only steps A to B.  [default: all whose spans were written]")
    ] = None,
    json_out: JsonOut = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page of HTML with a heat map of the workers to FILE.")
    ] = None,
) -> None:
    """Say how much slower a run was than if nothing had been slower than its like, and what made it so."""
    report, told = load("moe_comm.bench.common.report", "bench"), load("moe_comm.plan.whatif.text", "observe")
    for path in (json_out, page):
        report.check_writable(None if path is None else str(path))
    what_if = load("moe_comm.plan.whatif.analysis", "observe").what_if
    if run.is_dir():
        chosen = None if steps is None else load("moe_comm.observe.trace", "observe").parse_steps(steps)
        trace = load("moe_comm.plan.whatif.run_trace", "observe").read_run_trace(run, chosen)
        found = what_if(trace.graph, trace.even_N)
    elif steps is not None:
        raise ConfigError("--steps is for runs of moe-comm; a published trace is taken as a whole")
    else:
        published = load("moe_comm.plan.whatif.straggler_trace", "data")
        found = what_if(published.straggler_graph(published.read_straggler_trace(run)))
    report.write_json(told.summary(found), json_out)
    typer.echo(told.text(found), err=json_out == "-")
    if page is not None:
        load("moe_comm.plan.pages.whatif_page", "observe").write_page(found, page, run.absolute().name)
        typer.echo(f"wrote {page} ({page.stat().st_size / 2**20:.1f} MiB)", err=json_out == "-")
