"""The plugin and its options: it swaps the experts of the loaded model and prepares axolotl's trainer for them."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from axolotl.integrations.base import BasePlugin
from axolotl.utils.distributed import init_distributed_state
from pydantic import BaseModel, Field

from moe_comm.dispatch import DispatchOptions
from moe_comm.errors import ConfigError
from moe_comm.integrations.hugging_face import expert_mesh, prepare_trainer, swap_moe
from moe_comm.integrations.hugging_face.state import gather_for_saving
from moe_comm.layers.data_parallel import expert_modules, expert_parameters
from moe_comm.overlap.options import Overlap

UNSUPPORTED = {
    "deepspeed": "its ZeRO treats experts as replicated; use DDP or FSDP2",
    "rl": "it loads a second model",
    "fix_untrained_tokens": "it writes the model on rank 0 only",
    "relora": "it merges adapters on rank 0 only",
}
"""Option of axolotl: why the plugin rejects it."""
SIZES = "expert_parallel_size", "tensor_parallel_size", "context_parallel_size", "dp_shard_size"
"""Options of axolotl that must be 1, because the ranks of an expert-parallel group have different batches."""


class MoeCommArgs(BaseModel):
    """Fields that axolotl adds to its schema."""

    moe_comm_ep_size: int | None = Field(default=None, ge=1)
    """Ranks that the experts are distributed over; None for all ranks. It divides the number of ranks."""
    moe_comm_backend: str = "auto"
    """Dispatch backend; see ``make_dispatcher``."""
    moe_comm_overlap: bool | Literal["auto"] = False
    """Run dispatch and combine during the expert GEMMs; "auto": where that is faster."""
    moe_comm_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds to wait for a live peer."""


class MoeCommPlugin(BasePlugin):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """Expert parallelism in axolotl's DDP and FSDP2 (``fsdp_version: 2``), with the options of ``MoeCommArgs``.

    Each rank loads the whole model, keeps its part of the experts, and trains on its own batches. Checkpoints and the
    final model contain all experts.
    """

    def get_input_args(self) -> str:
        """Return the path of the options."""
        return "moe_comm.integrations.axolotl.MoeCommArgs"

    def register(self, cfg: Any) -> None:
        """Check the options of the YAML before anything is loaded."""
        for option, reason in UNSUPPORTED.items():
            if cfg.get(option):
                raise ConfigError(f"moe_comm does not support {option} of axolotl: {reason}")
        for option in SIZES:
            if (cfg.get(option) or 1) > 1:
                raise ConfigError(f"moe_comm needs {option}: 1, because each rank has its own batch; got {cfg[option]}")
        if cfg.get("fsdp") or cfg.get("fsdp_config"):
            if str(cfg.get("fsdp_version")) != "2":
                raise ConfigError("fsdp and fsdp_config need fsdp_version: 2; FSDP 1 cannot leave experts out")
            if cfg.get("adapter"):
                raise ConfigError("moe_comm supports adapters with DDP, not with FSDP2; remove fsdp_config or adapter")

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Distribute the experts and their adapters. Collective."""
        init_distributed_state()
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter's model
        if base is not model and dist.is_initialized():
            _broadcast_adapters(model)
        mesh = expert_mesh(cfg.moe_comm_ep_size, base.device.type)
        options = DispatchOptions(timeout_s=cfg.moe_comm_timeout_s)
        overlap = Overlap() if cfg.moe_comm_overlap is True else cfg.moe_comm_overlap or None
        swap_moe(base, mesh, backend=cfg.moe_comm_backend, options=options, overlap=overlap)
        if base is not model and any(param.requires_grad for param in expert_parameters(model).values()):
            model.save_pretrained = partial(_save_given, model)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Prepare the trainer for experts that differ between ranks."""
        prepare_trainer(trainer)

    def post_train(self, cfg: Any, model: Any) -> None:
        """Gather all experts, or their adapters, on the ranks that write the final model. Collective.

        axolotl calls ``save_pretrained`` on rank 0 of each host after this.
        """
        if dist.is_initialized() and next(expert_modules(model), None) is not None:
            whole = gather_for_saving(model, rank0_only=True)
            write = partial(type(model).save_pretrained, model, state_dict=whole)
            model.save_pretrained = write if whole else _save_nothing


def _broadcast_adapters(model: Any) -> None:
    """Give all ranks the adapters of rank 0, as DDP does: axolotl draws them without a seed. Collective."""
    for param in model.parameters():
        if param.requires_grad:
            dist.broadcast(param.detach(), 0)


def _save_given(model: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> None:
    """Save adapters that the trainer has gathered. axolotl saves them on rank 0 alone when it is interrupted."""
    if state_dict is None:
        raise ConfigError(
            "one rank alone cannot save adapters of experts that are distributed; resume from the last checkpoint"
        )
    type(model).save_pretrained(model, *args, state_dict=state_dict, **kwargs)


def _save_nothing(*args: Any, **kwargs: Any) -> None:
    """Leave writing to the first rank of the expert-parallel group."""
