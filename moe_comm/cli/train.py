"""Commands that train: ``train``, ``inject``, ``data``, ``export``. The ranks get the parsed configuration."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_comm.cli.options import Config, Overrides, Settings, echo, load, read_config
from moe_comm.runtime.launch import Interrupted, init_ranks, launch, ranks_to_use, under_torchrun

app = typer.Typer()
WORDS = ("no", "auto")
"""Values of ``--resume`` that are not paths."""
MOST_SKIPPED = 20
"""Number of files that ``data`` lists for each source."""
LOADED = ("torch", "moe_comm.train.loop.job", "moe_comm.train.resilience.inject", "torch.utils.tensorboard")
"""Slow modules, imported once for all ranks and their restarts."""


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    settings: Settings = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks to start.  [default: parallel.ranks]")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="no; auto: continue the newest run of this name; or PATH of a run or of one of its checkpoints.  "
            "[default: checkpoint.resume]"
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="Number of restarts of all ranks from the last checkpoint after a failure.")
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build without memory; print parameters, memory and mapping.")
    ] = False,
    tracebacks: Annotated[
        bool, typer.Option("--traceback", help="If a rank fails, print its traceback before the error.")
    ] = False,
) -> None:
    """Train an MoE language model, with attention and experts folded onto the same ranks."""
    changes = [] if ranks is None else [f"parallel.ranks={ranks}"]
    if resume is not None:
        changes.append(f"checkpoint.resume={resume if resume in WORDS else json.dumps(resume)}")
    parsed = read_config(config, overrides, settings, *changes)
    check_faults(parsed)
    if dry_run:
        echo(load("moe_comm.train.dry_run", "train").describe(parsed))
        return
    launch_run(parsed, restarts, tracebacks)


def launch_run(config: Any, restarts: int, tracebacks: bool = False) -> None:
    """Start the ranks of a run of ``config``, which is checked before. Ranks of torchrun run already."""
    ranks = ranks_of(config)
    if not under_torchrun():
        load("moe_comm.train.dry_run", "train").check_start(config, ranks)
    ended_by = launch(train_rank, (config,), ranks, restarts=restarts, preload=LOADED, tracebacks=tracebacks)
    if signal.SIGINT in ended_by and not under_torchrun():  # a single rank ran in this process
        raise Interrupted(signal.SIGINT)


def ranks_of(config: Any) -> int:
    """Return the number of ranks of a run. Under torchrun, ``parallel.ranks`` must be equal to it if it is set."""
    parallel = config.parallel
    return ranks_to_use(parallel.ranks if "ranks" in parallel.model_fields_set else None, default=parallel.ranks)


def check_faults(config: Any) -> None:
    """Raise ConfigError for an invalid fault plan, or one that the ranks started here do not support."""
    if config.faults.plan and not under_torchrun():
        plan = load("moe_comm.observe.faults", "train").FaultPlan
        plan.of(config.faults.plan, config.faults.seed, 0, config.parallel.ranks)


def train_rank(config: Any) -> int:
    """Run a rank. Return the signal that ended the run; 0: none."""
    load("moe_comm.train", "train").check_packages()
    with init_ranks(None, config.parallel.timeout_s) as ranks:
        if ranks.restarts:
            # Restarted ranks continue the run of the previous attempt: the one that ``resume`` names, or the newest.
            resume = config.checkpoint.resume
            if resume in WORDS:
                resume = "auto"
            else:
                resume = str(load("moe_comm.train.loop.run_folder", "train").resolve_resume_path(resume)[0])
            checkpoint = config.checkpoint.model_copy(update={"resume": resume})
            config = config.model_copy(update={"checkpoint": checkpoint})
        return int(load("moe_comm.train.loop.job", "train").run_config(config).signal)


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
    changes = [] if ranks is None else [f"parallel.ranks={ranks}"]
    if fault:
        changes.append(f"faults.plan={json.dumps(fault)}")
    parsed = read_config(config, overrides, settings, *changes)
    check_faults(parsed)
    runs = Path(parsed.run.folder)
    before = set(runs.glob(f"{parsed.run.name}-*"))
    try:
        launch_run(parsed, restarts)
    finally:
        for run in sorted(set(runs.glob(f"{parsed.run.name}-*")) - before):
            echo(_outcomes(run))


def _outcomes(run: Path) -> str:
    """Return a line for each fault of the run."""
    module = load("moe_comm.observe.faults", "train")
    lines = [f"{run}:"]
    for outcome in module.fault_outcomes(run):
        injection = outcome.injection
        detected_s, recovered_s = outcome.detected_s, outcome.recovered_s
        detected = f"detected after {detected_s:.2f} s ({outcome.noticed})" if outcome.noticed else "not detected"
        recovered = "not recovered" if math.isnan(recovered_s) else f"recovered after {recovered_s:.2f} s"
        lines.append(f"  step {injection.step}, rank {injection.rank}: {injection.fault}: {detected}, {recovered}")
    return "\n".join(lines if len(lines) > 1 else [f"{run}: no fault was injected"])


@app.command()
def data(config: Config, overrides: Overrides = None, settings: Settings = None) -> None:
    """Tokenize a configuration's text into its cache, check the cache, and describe it."""
    parsed = read_config(config, overrides, settings)
    corpus = load("moe_comm.train.data", "train")
    for path in corpus.prepare_all(parsed.data, scanned=_print_skipped):
        lines = corpus.describe(path).lines()
        echo("\n".join(f"{name:<18}{value}" for name, value in lines))


def _print_skipped(source: Any) -> None:
    """Print the files of a folder or pattern that are not read."""
    if not source.skipped:
        return
    files = "1 file" if len(source.skipped) == 1 else f"{len(source.skipped):,} files"
    echo(f"{'skipped':<18}{files} of {source.spec.path}")
    for path, reason in source.skipped[:MOST_SKIPPED]:
        echo(f"{'':<18}{str(path)!r} ({reason})")
    if len(source.skipped) > MOST_SKIPPED:
        echo(f"{'':<18}and {len(source.skipped) - MOST_SKIPPED:,} more")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or of one of its checkpoints.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
) -> None:
    """Write a checkpoint as a Hugging Face folder: config.json, safetensors and tokenizer."""
    load("transformers", "train")  # the module imports it only when it exports
    load("moe_comm.train.loop.export", "train").export_run(run, out)
    echo(f"wrote {out}")
