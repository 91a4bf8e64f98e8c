"""``moe-comm tune``: measure the fastest execution of each operator, for ``Overlap("auto")``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moe_comm.bench.common.settings import Ranks, Tune
from moe_comm.cli.options import JsonOut, load, settings_command

app = typer.Typer()


@settings_command(app, "tune", Tune)
def tune(
    values: dict[str, Any],
    ranks: Ranks = 2,
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks per host, with several hosts.")] = 1,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for the result. [default: moe_comm/overlap in the user's cache]")
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Measure the fastest number of chunks or kernel of operators, and store it for Overlap("auto")."""
    values["ranks_per_host"] = ranks if values["hosts"] == 1 else ranks_per_host
    load("moe_comm.bench.tune", "bench").main(Tune(**values), json_out, cache)
