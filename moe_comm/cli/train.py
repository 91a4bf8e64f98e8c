"""``moe-comm train`` and what belongs to a run: ``data``, ``export``."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_comm.cli.options import Config, Overrides, Settings, load
from moe_comm.runtime.launch import Interrupted, init_ranks, launch, under_torchrun

app = typer.Typer()
WORDS = ("no", "auto")
"""What ``--resume`` takes beside a path."""
MOST_SKIPPED = 20
"""Files that ``data`` lists for each source."""
LOADED = ("torch", "moe_comm.train.loop.job", "moe_comm.train.resilience.inject", "torch.utils.tensorboard")
"""What takes a rank seconds to load, and is loaded once for all where ranks may be started again."""


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    settings: Settings = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks to start here.  [default: parallel.ranks]")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="no; auto: go on with the newest run of this name; or PATH of a run or of one of its checkpoints.  "
            "[default: checkpoint.resume]"
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="Start all ranks again, from the last checkpoint, this often if one dies.")
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build it without memory; print parameters, memory and mapping.")
    ] = False,
    tracebacks: Annotated[
        bool, typer.Option("--traceback", help="If a rank fails, print its whole traceback before the error.")
    ] = False,
) -> None:
    """Train an MoE language model, its attention and its experts folded onto the same ranks."""
    configuration = load("moe_comm.train.config", "train")
    changes = [*(overrides or []), *(settings or [])]
    if ranks is not None:
        changes.append(f"parallel.ranks={ranks}")
    if resume is not None:
        changes.append(resume_from(resume))
    # Read here as well as on the ranks, so that a mistake is reported before anything starts.
    found = configuration.load(config, changes)
    check_faults(found)
    if found.checkpoint.resume not in WORDS and not under_torchrun():
        load("moe_comm.train.loop.run_folder", "train").to_go_on_in(found.checkpoint.resume)
    if dry_run:
        typer.echo(load("moe_comm.train.dry_run", "train").describe(found))
        return
    ended_by = launch(
        train_rank,
        (config, changes, found.parallel.timeout_s),
        found.parallel.ranks,
        restarts=restarts,
        preload=LOADED if restarts else (),
        tracebacks=tracebacks,
    )
    if signal.SIGINT in ended_by and not under_torchrun():  # a single rank, which ran here: no launcher saw it
        raise Interrupted(signal.SIGINT)


def resume_from(resume: str | Path) -> str:
    """An override of the configuration."""
    return f"checkpoint.resume={resume if resume in WORDS else json.dumps(str(resume))}"


def check_faults(config: Any) -> None:
    """Refuse a plan of faults that is none, or that the ranks started here cannot have."""
    if config.faults.plan and not under_torchrun():
        plan = load("moe_comm.observe.faults", "train").Plan
        plan.of(config.faults.plan, config.faults.seed, 0, config.parallel.ranks)


def train_rank(config: str, overrides: list[str], timeout_s: float) -> int:
    """Body of a rank. Returns the signal that ended the run; 0: none."""
    from moe_comm import train as training  # loads torch, in ranks only

    with init_ranks(None, timeout_s) as ranks:
        again = []
        if ranks.restarts:
            # They go on with the run that those before them began: the one named, or the newest of its name.
            resume = load("moe_comm.train.config", "train").load(config, overrides).checkpoint.resume
            folder = (
                "auto" if resume in WORDS else load("moe_comm.train.loop.run_folder", "train").to_go_on_in(resume)[0]
            )
            again = [resume_from(folder)]
        return training.run(config, [*overrides, *again]).signal


@app.command()
def data(config: Config, overrides: Overrides = None, settings: Settings = None) -> None:
    """Tokenise a configuration's text into its cache, as training would, check it, and say what is in it."""
    configuration = load("moe_comm.train.config", "train")
    found = configuration.load(config, [*(overrides or []), *(settings or [])])
    corpus = load("moe_comm.train.data", "train")
    settings_of = load("moe_comm.train.loop.feed", "train").corpus_settings
    for path in corpus.prepare_all(settings_of(found.data, found.run.seed), scanned=_tell_skipped):
        lines = corpus.describe(path).lines()
        typer.echo("\n".join(f"{name:<18}{value}" for name, value in lines))


def _tell_skipped(source: Any) -> None:
    """List the files of a folder or pattern that are not read."""
    if not source.skipped:
        return
    files = "1 file" if len(source.skipped) == 1 else f"{len(source.skipped):,} files"
    typer.echo(f"{'skipped':<18}{files} of {source.spec.path}")
    for path, reason in source.skipped[:MOST_SKIPPED]:
        typer.echo(f"{'':<18}{str(path)!r} ({reason})")
    if len(source.skipped) > MOST_SKIPPED:
        typer.echo(f"{'':<18}and {len(source.skipped) - MOST_SKIPPED:,} more")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or one of its checkpoints.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
) -> None:
    """Write a checkpoint as a Hugging Face folder: config.json, safetensors and tokenizer."""
    load("moe_comm.train.loop.export", "train").export_run(run, out)
    typer.echo(f"wrote {out}")
