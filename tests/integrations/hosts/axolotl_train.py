"""``axolotl train`` on CPU ranks: ``python -m tests.integrations.hosts.axolotl_train config.yml``."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


def main() -> None:
    """Train with the YAML of the command line."""
    wandb = ModuleType("wandb")  # axolotl imports it, also where it is not used
    wandb.__spec__ = ModuleSpec("wandb", None)
    sys.modules["wandb"] = wandb
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.cli.train import do_train

    cfg = load_cfg(sys.argv[1])
    cfg.device_map = {"": "cpu"}  # with several ranks axolotl sets the number of a GPU
    do_train(cfg, TrainerCliArgs())


if __name__ == "__main__":
    main()
