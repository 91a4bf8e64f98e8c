"""``moe-comm report``: an HTML page about one run or about two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_comm.cli.options import echo, load

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
