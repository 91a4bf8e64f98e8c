"""``moe-comm trace``: the spans of a run's ranks, for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_comm.cli.options import echo, load

app = typer.Typer()


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
