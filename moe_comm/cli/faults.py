"""``moe-comm inject`` and ``moe-comm soak``: faults on purpose, and what became of them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_comm.cli.options import Config, JsonOut, Overrides, Settings, load
from moe_comm.cli.train import LOADED, check_faults, train_rank
from moe_comm.errors import MoeCommError
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
    bench = load("moe_comm.bench.soak", "bench")
    report = load("moe_comm.bench.report", "bench")
    report.check_writable(json_out)
    with tempfile.TemporaryDirectory(prefix="moe_comm-soak-") as temporary:
        settings = bench.Soak(folder or Path(temporary), ranks, faults, seed, stuck_s, tuple(kind or ()))
        found: dict[str, Any] = bench.run(settings, lambda text: typer.echo(text, err=json_out == "-"))
    report.write_json(found, json_out)
    typer.echo(bench.table(found), err=json_out == "-")
    if problems := bench.problems(found):
        raise MoeCommError("; ".join(problems))
