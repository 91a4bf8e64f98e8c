"""Mistakes that a configuration shows, found by the launcher before ranks start. Nothing is written."""

from __future__ import annotations

import os
from pathlib import Path

from moe_comm.errors import ConfigError
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.topology.pipeline import check_micro_batches
from moe_comm.train.config import TrainConfig
from moe_comm.train.data.sources import check_files
from moe_comm.train.data.tokenizer import ByteTokenizer, load_tokenizer
from moe_comm.train.dry_run import fake_ranks, max_tokens
from moe_comm.train.loop.build import architecture_of, build_stages
from moe_comm.train.loop.run_folder import RunFolder


def check_start(config: TrainConfig, world: int) -> None:
    """Check that a run of ``config`` on ``world`` ranks of this host can start.

    With ``parallel.auto``, the mapping is not known yet and not checked.

    Raises:
        ConfigError: the mapping does not fit the ranks or the model, a data-parallel rank would get no sequence, a data
            file, the tokenizer or the checkpoint to resume is missing, or a folder cannot be written.
        MissingDependency: a package for this kind of file or tokenizer is not installed.
    """
    mapping = None if config.parallel.auto else config.parallel.mapping(world)
    if mapping is not None:
        max_tokens(config, mapping)
        parallel = config.parallel
        check_micro_batches(parallel.schedule, mapping.pp, config.data.micro_batches, interleave=parallel.interleave)
    for source in config.data.sources:
        check_files(source)
    _check_model(config, mapping)
    RunFolder.check(config)
    if config.checkpoint.resume in ("no", "auto"):  # otherwise the run continues in the folder of that checkpoint
        _check_writable("run.folder", config.run.folder)
    if not Path(config.data.cache).expanduser().exists():  # one that cannot be written may have been filled before
        _check_writable("data.cache", config.data.cache)


def _check_model(config: TrainConfig, mapping: ParallelConfig | None) -> None:
    """Check the tokenizer, and build the first pipeline stage without memory."""
    kind = config.data.tokenizer
    if kind == "bpe":
        vocab = config.data.vocab if config.model.vocab is None else None  # a trained one has at most ``data.vocab``
    elif kind == "bytes":
        vocab = ByteTokenizer.vocab_size
    else:
        vocab = load_tokenizer(kind, config.data.end_of_text).vocab_size
    architecture = architecture_of(config, vocab)
    if mapping is not None:
        with fake_ranks(mapping.world, 0):
            build_stages(config, architecture, ParallelMesh(mapping), device="meta")


def _check_writable(setting: str, folder: str) -> None:
    """Raise ConfigError if ``folder`` cannot be created or written."""
    path = Path(folder).expanduser()
    try:
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        problem = "" if existing.is_dir() else f"{str(existing)!r} is not a folder"
        if not problem and not os.access(existing, os.W_OK | os.X_OK):
            problem = f"no permission to write to {str(existing)!r}, or its file system is read-only"
    except OSError as error:
        problem = str(error.strerror or error)
    if problem:
        raise ConfigError(f"{setting}: cannot write to {folder!r}: {problem}")
