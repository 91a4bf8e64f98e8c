"""``python -m benchmarks.soak``: train with injected faults of all kinds, and compare with a run without faults."""

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
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 4,
    faults: Annotated[int, typer.Option(min=1, help="Number of faults.")] = 1100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of kinds, ranks and positions of the faults.")] = 0,
    stuck_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds until a rank counts as stuck; see watch.stuck_s.")
    ] = 2.0,
    kind: Annotated[list[str] | None, typer.Option(help="Kind of faults; repeat for more. Default: all.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Run folder; an interrupted soak resumes in it.  [default: a temporary folder]")
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Train a tiny model with faults of all kinds; the result must be bit-identical to a run without faults."""
    report.check_writable(json_out)
    with tempfile.TemporaryDirectory(prefix="moe_comm-soak-") as temporary:
        settings = study.Soak(folder or Path(temporary), ranks, faults, seed, stuck_s, tuple(kind or ()))
        result: dict[str, Any] = study.run(settings, lambda text: typer.echo(text, err=json_out == "-"))
    report.write_json(result, json_out)
    typer.echo(study.table(result), err=json_out == "-")
    if problems := study.problems(result):
        raise MoeCommError("; ".join(problems))


if __name__ == "__main__":
    sys.exit(cli.run(command=app, name=NAME))
