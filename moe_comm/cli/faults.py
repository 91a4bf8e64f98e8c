"""``moe-comm inject``: train with injected faults, and report how each was detected and recovered from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from moe_comm.cli.options import Config, Overrides, Settings, echo, load
from moe_comm.cli.train import LOADED, check_faults, check_start, ranks_of, train_rank
from moe_comm.runtime.launch import launch

app = typer.Typer()


@app.command()
def inject(
    config: Config,
    overrides: Overrides = None,
    settings: Settings = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND:KEY=VALUE,...", help="Fault, such as kill:rank=1,step=5; repeatable."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks to start.  [default: parallel.ranks]")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="Number of restarts of all ranks after a failure.")] = 3,
) -> None:
    """Train with injected faults, and report how each was detected and recovered from."""
    configuration = load("moe_comm.train.config", "train")
    changes = [*(overrides or []), *(settings or [])]
    if ranks is not None:
        changes.append(f"parallel.ranks={ranks}")
    if fault:
        changes.append(f"faults.plan={json.dumps(fault)}")
    parsed = configuration.load(config, changes)
    check_faults(parsed)
    runs = Path(parsed.run.folder)
    world = ranks_of(parsed)
    check_start(parsed, world)
    before = set(runs.glob(f"{parsed.run.name}-*"))
    try:
        launch(
            train_rank,
            (config, changes, parsed.parallel.timeout_s),
            world,
            restarts=restarts,
            preload=LOADED,
        )
    finally:
        for run in sorted(set(runs.glob(f"{parsed.run.name}-*")) - before):
            echo(_report(run))


def _report(run: Path) -> str:
    """Return a line for each fault of the run."""
    module = load("moe_comm.observe.fault_outcomes", "train")
    lines = [f"{run}:"]
    for outcome in module.fault_outcomes(run):
        injection = outcome.injection
        detected_s, recovered_s = outcome.detected_s, outcome.recovered_s
        detected = f"detected after {detected_s:.2f} s ({outcome.noticed})" if outcome.noticed else "not detected"
        recovered = "not recovered" if math.isnan(recovered_s) else f"recovered after {recovered_s:.2f} s"
        lines.append(f"  step {injection.step}, rank {injection.rank}: {injection.fault}: {detected}, {recovered}")
    return "\n".join(lines if len(lines) > 1 else [f"{run}: no fault was injected"])
