"""``moe-comm inject``: train with injected faults, and report what was detected and recovered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from moe_comm.cli.options import Config, Overrides, Settings, load
from moe_comm.cli.train import LOADED, check_faults, train_rank
from moe_comm.runtime.launch import launch

app = typer.Typer()


@app.command()
def inject(
    config: Config,
    overrides: Overrides = None,
    settings: Settings = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND:KEY=VALUE,...", help="Such as kill:rank=1,step=5; repeat for more."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks to start here.  [default: parallel.ranks]")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="Start all ranks again this often if one dies.")] = 3,
) -> None:
    """Train with faults on purpose; say what was done, what was noticed, and what was recovered."""
    configuration = load("moe_comm.train.config", "train")
    changes = [*(overrides or []), *(settings or [])]
    if ranks is not None:
        changes.append(f"parallel.ranks={ranks}")
    if fault:
        changes.append(f"faults.plan={json.dumps(fault)}")
    found = configuration.load(config, changes)
    check_faults(found)
    runs = Path(found.run.folder)
    before = set(runs.glob(f"{found.run.name}-*"))
    try:
        launch(
            train_rank,
            (config, changes, found.parallel.timeout_s),
            found.parallel.ranks,
            restarts=restarts,
            preload=LOADED if restarts else (),
        )
    finally:
        for run in sorted(set(runs.glob(f"{found.run.name}-*")) - before):
            typer.echo(_told(run))


def _told(run: Path) -> str:
    """A line for every fault that happened in the run."""
    survival = load("moe_comm.observe.survival", "train")
    lines = [f"{run}:"]
    for answer in survival.answers(run):
        one = answer.injection
        noticed = f"noticed after {answer.detected_s:.2f} s ({answer.noticed})" if answer.noticed else "not noticed"
        known = answer.recovered_s == answer.recovered_s
        recovered = f"recovered after {answer.recovered_s:.2f} s" if known else "not recovered"
        lines.append(f"  step {one.step}, rank {one.rank}: {one.fault}: {noticed}, {recovered}")
    return "\n".join(lines if len(lines) > 1 else [f"{run}: no fault happened"])
