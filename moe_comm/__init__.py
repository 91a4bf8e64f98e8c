"""Mixture-of-Experts layers whose experts live on different ranks: one API from a laptop to a GPU cluster.

The names below load their modules on first use, so that ``import moe_comm`` costs little and needs no extra.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from moe_comm.lazy import after_import, attach_stub
from moe_comm.runtime import cpu_guard
from moe_comm.runtime.versions import require_torch

require_torch()
# Must run before torch's first matmul. It has an effect only on some CPUs.
cpu_guard.apply()


def _register() -> None:
    """Add ``"moe_comm"`` and ``"moe_comm_fp8"`` to the registries of transformers, if its version has them."""
    from moe_comm.errors import ConfigError, MissingDependency

    with contextlib.suppress(ConfigError, MissingDependency):
        # Imports parts of transformers.
        from moe_comm.integrations.hugging_face.registries import register

        register()


def _scale_aux_losses(loop: str) -> None:
    """Make a training loop of another library scale auxiliary losses like the main loss."""
    from moe_comm.integrations import loss_scaling

    getattr(loss_scaling, f"follow_{loop}")()


after_import(("torch.amp.grad_scaler",), partial(_scale_aux_losses, "torch"))
after_import(("torch.distributed.fsdp.sharded_grad_scaler",), partial(_scale_aux_losses, "torch"))
after_import(("accelerate.accelerator",), partial(_scale_aux_losses, "accelerate"))
after_import(("transformers.trainer",), partial(_scale_aux_losses, "trainer"))
after_import(("deepspeed.runtime.engine",), partial(_scale_aux_losses, "deepspeed"))
after_import(("lightning.pytorch.strategies.strategy",), partial(_scale_aux_losses, "lightning"))
after_import(("pytorch_lightning.strategies.strategy",), partial(_scale_aux_losses, "lightning"))
after_import(("transformers.integrations.moe", "transformers.distributed.expert_parallel"), _register)

_load, __dir__, __all__ = attach_stub(__name__, __file__)
__all__ += ["__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    return _load(name)


def _version() -> str:
    """Return the version in the source tree's pyproject.toml, or else that of the installed package."""
    import tomllib
    from importlib import metadata
    from pathlib import Path

    with contextlib.suppress(OSError, KeyError, tomllib.TOMLDecodeError):
        project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8"))["project"]
        if project["name"] == "moe_comm":
            return str(project["version"])
    try:
        return metadata.version("moe_comm")
    except metadata.PackageNotFoundError:
        return "unknown"
