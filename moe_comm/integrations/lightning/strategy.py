"""A strategy of Lightning for models whose experts differ between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import Optimizer

from moe_comm.layers import data_parallel
from moe_comm.topology.mesh import expert_mesh


class ExpertParallelStrategy(DDPStrategy):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """DDP with experts that are distributed over groups of ``ep_size`` ranks.

    Lightning's DDP saves the parameters of rank 0 and, to validate, copies them to all ranks, which is wrong for
    experts. ``LightningModule.device_mesh`` has the dimensions "edp" and "ep" when ``configure_model`` is called.
    Gradients and the norm of ``gradient_clip_val`` are those of one process. Checkpoints contain whole models and
    optimizers in Lightning's format and load on any number of ranks.

    Args:
        ep_size: ranks that the experts are distributed over; None for all ranks.
        settings: arguments of ``DDPStrategy``.
    """

    def __init__(self, ep_size: int | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.ep_size = ep_size

    def setup_environment(self) -> None:
        """Start the process group and give the mesh to the module.

        Raises:
            ConfigError: the number of ranks is not a multiple of ``ep_size``.
        """
        super().setup_environment()
        self.lightning_module._device_mesh = expert_mesh(self.ep_size, self.root_device.type)

    def setup(self, trainer: Trainer) -> None:  # type: ignore[no-any-unimported, unused-ignore]
        """Exclude the experts from what DDP and Lightning copy and reduce."""
        module = self.lightning_module
        excluded = getattr(module, "_ddp_params_and_buffers_to_ignore", [])
        if data_parallel.expert_parameters(module).keys() - set(excluded):
            data_parallel.prepare_ddp(module)
        super().setup(trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole model on the ranks that save, and {} on others. Collective."""
        return data_parallel.state_dict(self.lightning_module, rank0_only=True, cpu=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the part of this rank."""
        data_parallel.load_state_dict(self.lightning_module, checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state on the ranks that save. Collective."""
        inner = getattr(optimizer, "_optimizer", optimizer)  # LightningOptimizer
        return data_parallel.optimizer_state_dict(self.lightning_module, inner, rank0_only=True, cpu=True)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the part of this rank."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            data_parallel.load_optimizer_state_dict(self.lightning_module, optimizer, state)
            _optimizer_to_device(optimizer, self.root_device)
