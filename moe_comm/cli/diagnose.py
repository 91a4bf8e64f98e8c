"""``moe-comm diagnose``: who made a run slow, or held it up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_comm.cli.options import load
from moe_comm.errors import ConfigError

app = typer.Typer()


@app.command()
def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only steps A to B.  [default: all, in windows of --window]")
    ] = None,
    window: Annotated[int, typer.Option(min=5, help="Steps that are judged together.")] = 50,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the findings to FILE as well.")] = None,
) -> None:
    """Name the rank, link or host that made a run slow or held it up, and how sure that is."""
    found = load("moe_comm.observe.culprits", "observe")
    chosen = None if steps is None else load("moe_comm.observe.trace", "observe").parse_steps(steps)
    if not run.is_dir():
        raise ConfigError(f"{run} is no folder of a run")
    named = found.culprits(run, chosen, window)
    for one in named:
        typer.echo(str(one))
    if not named:
        typer.echo("nobody stands out")
    if json is not None:
        found.save(named, json)
