"""``python -m benchmarks.diagnosis``: accuracy of ``moe-comm diagnose``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from benchmarks.diagnosis import study
from moe_comm import cli
from moe_comm.bench.common.settings import Seed
from moe_comm.cli.options import JsonOut

NAME = "python -m benchmarks.diagnosis"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def diagnosis(
    slow: Annotated[int, typer.Option(min=0, help="Number of cases with a slow rank.")] = 80,
    links: Annotated[int, typer.Option(min=0, help="Number of cases with a slow link.")] = 60,
    hangs: Annotated[int, typer.Option(min=0, help="Number of cases with a rank that hangs or dies.")] = 60,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks of runs on this host.")] = 4,
    hosts: Annotated[int, typer.Option(min=3, help="Hosts (network namespaces) with one rank each, for links.")] = 3,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Measure how often `moe-comm diagnose` names the injected fault. Slow links require root."""
    study.main(study.DiagnosisStudy(slow, links, hangs, ranks, hosts, seed), json_out)


if __name__ == "__main__":
    sys.exit(cli.run(command=app, name=NAME))
