"""``moe-comm train``, and the commands ``data`` and ``export``."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_comm.cli.options import Config, Overrides, Settings, echo, load
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
    configuration = load("moe_comm.train.config", "train")
    changes = [*(overrides or []), *(settings or [])]
    if ranks is not None:
        changes.append(f"parallel.ranks={ranks}")
    if resume is not None:
        changes.append(resume_from(resume))
    # Parse here as well as on the ranks, to report mistakes before ranks start.
    parsed = configuration.load(config, changes)
    check_faults(parsed)
    if dry_run:
        echo(load("moe_comm.train.dry_run", "train").describe(parsed))
        return
    ranks = ranks_of(parsed)
    check_start(parsed, ranks)
    ended_by = launch(
        train_rank,
        (config, changes, parsed.parallel.timeout_s),
        ranks,
        restarts=restarts,
        preload=LOADED,
        tracebacks=tracebacks,
    )
    if signal.SIGINT in ended_by and not under_torchrun():  # a single rank ran in this process
        raise Interrupted(signal.SIGINT)


def ranks_of(config: Any) -> int:
    """Return the number of ranks of a run. Under torchrun, ``parallel.ranks`` must be equal to it if it is set.

    Raises:
        ConfigError: as ``moe_comm.runtime.launch.ranks_to_use``.
    """
    parallel = config.parallel
    return ranks_to_use(parallel.ranks if "ranks" in parallel.model_fields_set else None, default=parallel.ranks)


def check_start(config: Any, ranks: int) -> None:
    """Find mistakes before ranks start; see ``moe_comm.train.start_checks``. Ranks of torchrun run already."""
    if not under_torchrun():
        load("moe_comm.train.start_checks", "train").check_start(config, ranks)


def resume_from(resume: str | Path) -> str:
    """Return the override of the configuration for ``--resume``."""
    return f"checkpoint.resume={resume if resume in WORDS else json.dumps(str(resume))}"


def check_faults(config: Any) -> None:
    """Raise ConfigError for an invalid fault plan, or one that the ranks started here do not support."""
    if config.faults.plan and not under_torchrun():
        plan = load("moe_comm.observe.faults", "train").FaultPlan
        plan.of(config.faults.plan, config.faults.seed, 0, config.parallel.ranks)


def train_rank(config: str, overrides: list[str], timeout_s: float) -> int:
    """Run a rank. Return the signal that ended the run; 0: none."""
    from moe_comm import train as training  # imports torch, only in ranks

    with init_ranks(None, timeout_s) as ranks:
        resume_override = []
        if ranks.restarts:
            # Restarted ranks continue the run of the previous attempt: the one that ``resume`` names, or the newest.
            resume = load("moe_comm.train.config", "train").load(config, overrides).checkpoint.resume
            folder = (
                "auto"
                if resume in WORDS
                else load("moe_comm.train.loop.run_folder", "train").resolve_resume_path(resume)[0]
            )
            resume_override = [resume_from(folder)]
        return training.run(config, [*overrides, *resume_override]).signal


@app.command()
def data(config: Config, overrides: Overrides = None, settings: Settings = None) -> None:
    """Tokenize a configuration's text into its cache, check the cache, and describe it."""
    configuration = load("moe_comm.train.config", "train")
    parsed = configuration.load(config, [*(overrides or []), *(settings or [])])
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
    load("moe_comm.train.loop.export", "train").export_run(run, out)
    echo(f"wrote {out}")
