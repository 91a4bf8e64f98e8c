"""Mixture-of-Experts layers whose experts live on different ranks: one API from a laptop to a GPU cluster.

The names below load their modules on first use, so that ``import moe_comm`` costs little and needs no extra.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from moe_comm.deprecated import loads_renamed
from moe_comm.lazy import loads_on_use
from moe_comm.runtime import cpu_guard

if TYPE_CHECKING:
    from moe_comm.dispatch import Dispatcher, DispatchOptions, make_dispatcher
    from moe_comm.integrations.hugging_face import (
        gather_state_dict,
        save_swapped,
        swap_attention,
        swap_linears,
        swap_moe,
    )
    from moe_comm.layers import (
        Experts,
        MoEConfig,
        MoELayer,
        Router,
        RouterConfig,
        Transformer,
        TransformerConfig,
        check_grads,
    )
    from moe_comm.layers.data_parallel import (
        clip_grad_norm_,
        load_optimizer_state_dict,
        load_state_dict,
        optimizer_state_dict,
        prepare_ddp,
        prepare_fsdp,
        skip_gradient_checks,
        state_dict,
        sync_gradients,
    )
    from moe_comm.topology import ParallelConfig, ParallelMesh

    __version__: str

_HOME = {
    "Dispatcher": "moe_comm.dispatch",
    "DispatchOptions": "moe_comm.dispatch",
    "make_dispatcher": "moe_comm.dispatch",
    "Experts": "moe_comm.layers.moe.experts",
    "MoEConfig": "moe_comm.layers.moe.config",
    "MoELayer": "moe_comm.layers.moe.layer",
    "Router": "moe_comm.layers.moe.router",
    "RouterConfig": "moe_comm.layers.moe.router",
    "check_grads": "moe_comm.layers.check.gradients",
    "gather_state_dict": "moe_comm.integrations.hugging_face",
    "save_swapped": "moe_comm.integrations.hugging_face",
    "swap_attention": "moe_comm.integrations.hugging_face",
    "swap_linears": "moe_comm.integrations.hugging_face",
    "swap_moe": "moe_comm.integrations.hugging_face",
    "clip_grad_norm_": "moe_comm.layers.data_parallel",
    "load_optimizer_state_dict": "moe_comm.layers.data_parallel",
    "load_state_dict": "moe_comm.layers.data_parallel",
    "optimizer_state_dict": "moe_comm.layers.data_parallel",
    "prepare_ddp": "moe_comm.layers.data_parallel",
    "prepare_fsdp": "moe_comm.layers.data_parallel",
    "skip_gradient_checks": "moe_comm.layers.data_parallel",
    "state_dict": "moe_comm.layers.data_parallel",
    "sync_gradients": "moe_comm.layers.data_parallel",
    "Transformer": "moe_comm.layers.transformer.model",
    "TransformerConfig": "moe_comm.layers.transformer.config",
    "ParallelMesh": "moe_comm.topology",
    "ParallelConfig": "moe_comm.topology",
}

__all__ = [
    "DispatchOptions",
    "Dispatcher",
    "Experts",
    "MoEConfig",
    "MoELayer",
    "ParallelConfig",
    "ParallelMesh",
    "Router",
    "RouterConfig",
    "Transformer",
    "TransformerConfig",
    "__version__",
    "check_grads",
    "clip_grad_norm_",
    "gather_state_dict",
    "load_optimizer_state_dict",
    "load_state_dict",
    "make_dispatcher",
    "optimizer_state_dict",
    "prepare_ddp",
    "prepare_fsdp",
    "save_swapped",
    "skip_gradient_checks",
    "state_dict",
    "swap_attention",
    "swap_linears",
    "swap_moe",
    "sync_gradients",
]

# Before torch's first matmul, and only on machines where bf16 would otherwise kill the process.
cpu_guard.apply()

if sys.modules.get("transformers") is not None:
    from moe_comm.integrations.hugging_face import register

    register()


_RENAMED = {"FoldedMesh": "ParallelMesh"}
_load = loads_renamed(__name__, _RENAMED, loads_on_use(__name__, _HOME))


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    return _load(name)


def _version() -> str:
    """The version in pyproject.toml: of the source tree, else as the installed package has it."""
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


def __dir__() -> list[str]:
    return sorted(__all__)
