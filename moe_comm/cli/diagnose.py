"""``moe-comm diagnose``: find the rank, link or host that slowed or stopped a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_comm.cli.options import echo, load
from moe_comm.errors import ConfigError

app = typer.Typer()


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
