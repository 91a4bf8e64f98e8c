"""``moe-comm report``: a run, or two, as one page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_comm.cli.options import load

app = typer.Typer()


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    other: Annotated[Path | None, typer.Argument(metavar="OTHER", help="Another one, to compare.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write.  [default: report.html or compare.html in RUN]")
    ] = None,
) -> None:
    """Write what a run did as one page of HTML that needs no network; of two runs, what differs."""
    folders = [run] if other is None else [run, other]
    written = load("moe_comm.observe.report", "observe").write_report(folders, out)
    typer.echo(f"wrote {written} ({written.stat().st_size / 2**20:.1f} MiB)")
