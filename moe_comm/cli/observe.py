"""``moe-comm trace``: what a run's ranks did, for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_comm.cli.options import load

app = typer.Typer()


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write, such as run.perfetto-trace.")],
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only steps A to B, or one step.  [default: all that are written]")
    ] = None,
    faults: Annotated[bool, typer.Option("--faults", help="What ranks last did before faults, instead.")] = False,
) -> None:
    """Write the spans of a run as a trace that https://ui.perfetto.dev opens."""
    found = load("moe_comm.observe.trace", "observe")
    number = found.write_trace(run, out, None if steps is None else found.parse_steps(steps), faults=faults)
    typer.echo(f"wrote {number:,} spans to {out}; open it at https://ui.perfetto.dev")
