"""``python -m benchmarks.soak``: train through faults of all kinds, and compare with a run without faults."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.soak import study
from moe_comm import cli
from moe_comm.bench.common import report
from moe_comm.cli.options import JsonOut
from moe_comm.errors import MoeCommError

NAME = "python -m benchmarks.soak"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def soak(
    ranks: Annotated[int, typer.Option(min=1, help="Ranks to start here.")] = 4,
    faults: Annotated[int, typer.Option(min=1, help="How many.")] = 1100,
    seed: Annotated[int, typer.Option(min=0, help="Of kinds, ranks and places.")] = 0,
    stuck_s: Annotated[float, typer.Option(min=0.1, help="When a rank counts as stuck; see watch.stuck_s.")] = 2.0,
    kind: Annotated[list[str] | None, typer.Option(help="Only faults of this kind; repeat for more.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Keep everything here; an interrupted soak goes on.  [default: a temporary one]")
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Train a tiny model through faults of all kinds; its bits must be those of a run without any."""
    report.check_writable(json_out)
    with tempfile.TemporaryDirectory(prefix="moe_comm-soak-") as temporary:
        settings = study.Soak(folder or Path(temporary), ranks, faults, seed, stuck_s, tuple(kind or ()))
        found: dict[str, Any] = study.run(settings, lambda text: typer.echo(text, err=json_out == "-"))
    report.write_json(found, json_out)
    typer.echo(study.table(found), err=json_out == "-")
    if problems := study.problems(found):
        raise MoeCommError("; ".join(problems))


if __name__ == "__main__":
    sys.exit(cli.run(command=app, name=NAME))
