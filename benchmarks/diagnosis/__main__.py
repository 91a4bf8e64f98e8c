"""``python -m benchmarks.diagnosis``: how often ``moe-comm diagnose`` names the right rank or link."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from benchmarks.diagnosis import study
from moe_comm import cli
from moe_comm.cli.options import JsonOut, Seed

NAME = "python -m benchmarks.diagnosis"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def diagnosis(
    slow: Annotated[int, typer.Option(min=0, help="Cases of a slow rank.")] = 80,
    links: Annotated[int, typer.Option(min=0, help="Cases of a slow link.")] = 60,
    hangs: Annotated[int, typer.Option(min=0, help="Cases of a rank that is stuck or dies.")] = 60,
    ranks: Annotated[int, typer.Option(min=2, help="Of runs on this host.")] = 4,
    hosts: Annotated[int, typer.Option(min=3, help="Network namespaces to make, each a host with a rank.")] = 3,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Whether `moe-comm diagnose` names the right one, in training with faults on purpose. Slow links need root."""
    study.main(study.Cases(slow, links, hangs, ranks, hosts, seed), json_out)


if __name__ == "__main__":
    sys.exit(cli.run(command=app, name=NAME))
