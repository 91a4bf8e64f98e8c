"""Commands on the records of a run: ``report``, ``trace``, ``diagnose``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_comm.cli.options import echo, load
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
    diagnosis = load("moe_comm.observe.culprits", "observe")
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
