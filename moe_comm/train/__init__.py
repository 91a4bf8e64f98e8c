"""Train an MoE language model with expert parallelism.

    result = moe_comm.train.run("examples/pydoc.toml", ["run.steps=100"])

All ranks call ``run``. The command line (``moe-comm train``) starts the ranks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from moe_comm.errors import MissingDependency, pip_install
from moe_comm.train.result import RunResult

REQUIRED = ("safetensors", "tensorboard", "tokenizers", "transformers")


def check_packages() -> None:
    """Raise MissingDependency if a package of the extra ``train`` is not installed."""
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependency(f"training requires {', '.join(missing)}; install with: {pip_install('train')}")


def run(config_path: str | Path | None, overrides: Sequence[str] = ()) -> RunResult:
    """Train a model. Collective over the default process group.

    Args:
        config_path: a ``.toml`` or ``.json`` file. None: the defaults.
        overrides: a list of ``section.key=value``.

    Returns:
        The status, losses and folder of the run.

    Raises:
        MissingDependency: a package of the extra ``train`` is not installed.
        ConfigError: the configuration or the text is invalid.
        NonFiniteLoss: raised on all ranks; the newest checkpoint contains the last finite weights.
        PeerError: another rank failed.
    """
    check_packages()
    # Imports the packages of the extra, which takes seconds.
    from moe_comm.train.config import load
    from moe_comm.train.loop.job import run_config

    return run_config(load(config_path, overrides))


__all__ = ["RunResult", "run"]
