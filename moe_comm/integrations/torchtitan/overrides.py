"""Overrides for ``--override.imports moe_comm.integrations.torchtitan.overrides.NAME`` of torchtitan."""

from __future__ import annotations

from typing import Any

from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from moe_comm.integrations.torchtitan.dispatcher import MoeCommSelectiveAC, MoeCommTokenDispatcher


@override(target=AllToAllTokenDispatcher.Config, exact=True, description="dispatch with moe_comm")  # type: ignore[untyped-decorator, unused-ignore]
def moe_comm(cfg: Any, *, backend: str = "auto", timeout_s: float = 300.0) -> Any:
    """Replace torchtitan's all-to-all dispatcher; see ``MoeCommTokenDispatcher.Config``."""
    return derive(cfg, MoeCommTokenDispatcher.Config, backend=backend, timeout_s=timeout_s)


@override(target=SelectiveAC.Config, exact=True, description="save the transfers of moe_comm")  # type: ignore[untyped-decorator, unused-ignore]
def save_transfers(cfg: Any) -> Any:
    """Replace selective checkpointing by one that does not send rows again in the backward pass."""
    return derive(cfg, MoeCommSelectiveAC.Config)
