"""Commands on the records of a run: ``report``, ``trace``, ``diagnose``, ``whatif``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_comm.cli.options import JsonOut, echo, load
from moe_comm.errors import ConfigError

app = typer.Typer()


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    other: Annotated[Path | None, typer.Argument(metavar="OTHER", help="Folder of a run to compare with.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write.  [default: report.html or compare.html in RUN]")
    ] = None,
) -> None:
    """Write a self-contained HTML page about a run, or about the differences of two runs."""
    folders = [run] if other is None else [run, other]
    written = load("moe_comm.observe.report", "observe").write_report(folders, out)
    echo(f"wrote {written} ({written.stat().st_size / 2**20:.1f} MiB)")


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write, such as run.perfetto-trace.")],
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only steps A to B, or one step.  [default: all recorded]")
    ] = None,
    faults: Annotated[bool, typer.Option("--faults", help="Instead write the last spans before faults.")] = False,
) -> None:
    """Write the spans of a run as a trace for https://ui.perfetto.dev."""
    module = load("moe_comm.observe.trace", "observe")
    number = module.write_trace(run, out, None if steps is None else module.parse_steps(steps), faults=faults)
    echo(f"wrote {number:,} spans to {out}; open it at https://ui.perfetto.dev")


@app.command()
def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only steps A to B.  [default: all, in windows of --window]")
    ] = None,
    window: Annotated[int, typer.Option(min=5, help="Steps that are analyzed together.")] = 50,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the findings to FILE.")] = None,
) -> None:
    """Report the rank, link or host that slowed or stopped a run, with a confidence."""
    diagnosis = load("moe_comm.observe.diagnose", "observe")
    selected = None if steps is None else load("moe_comm.observe.trace", "observe").parse_steps(steps)
    if not run.is_dir():
        raise ConfigError(f"{run} is not a run folder")
    culprits = diagnosis.culprits(run, selected, window)
    for culprit in culprits:
        echo(str(culprit))
    if not culprits:
        echo("no rank, link or host stands out")
    if json is not None:
        diagnosis.save(culprits, json)


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
