"""Training a small MoE language model, its experts spread over ranks.

    result = moe_comm.train.run("examples/pydoc.toml", ["run.steps=100"])

Every rank calls ``run``; the command line (``moe-comm train``) starts the ranks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from moe_comm.errors import MissingDependency
from moe_comm.train.result import RunResult

NEEDED = ("pydantic", "rich", "safetensors", "tensorboard", "tokenizers", "transformers")


def run(config_path: str | Path | None, overrides: Sequence[str] = ()) -> RunResult:
    """Train as ``config_path`` and ``overrides`` say. Every rank of the default process group calls it.

    Args:
        config_path: a ``.toml`` or ``.json`` file; None for the defaults.
        overrides: ``section.key=value`` each.

    Raises:
        MissingDependency: a package of the extra ``train`` is not installed.
        ConfigError: the configuration or the text cannot be used.
        NonFiniteLoss: on every rank; the newest checkpoint holds the last good weights.
        PeerError: another rank is gone.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependency(f"training needs {', '.join(missing)}; install with: pip install 'moe_comm[train]'")
    # Needs the packages of the extra, and takes seconds to load.
    from moe_comm.train.loop.job import run_config

    return run_config(config_path, overrides)


__all__ = ["RunResult", "run"]
