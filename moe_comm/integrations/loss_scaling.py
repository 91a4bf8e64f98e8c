"""Training loops of other libraries scale the auxiliary losses of ``MoELayer`` like the main loss.

    library       the loss that ``scale_aux_like`` sees        what arrives there
    accelerate    the argument of ``Accelerator.backward``     scale of the scaler / gradient_accumulation_steps
    Trainer       the same, not divided by accelerate          scale of the scaler; 1 / micro-batches is added
    DeepSpeed     the argument of ``DeepSpeedEngine.backward`` loss scale / gradient_accumulation_steps
    Lightning     the result of ``training_step``              scale of the scaler / accumulate_grad_batches
    torch         the argument of ``GradScaler.scale``         scale of the scaler

The innermost tensor counts, so a scaler changes nothing in the other loops. Each function wraps one method of a class
that is imported. Loops without a ``MoELayer`` are not changed. This module loads while torch is being imported, so it
imports nothing of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

MICRO_BATCHES = "moe_comm_micro_batches"
"""Attribute of an ``Accelerator``: micro-batches of a step, if a trainer divides the loss instead of accelerate."""


def follow_torch() -> None:
    """Wrap ``scale`` of ``GradScaler`` and of FSDP's ``ShardedGradScaler``."""

    def scale(original: Callable[..., Any], self: Any, outputs: Any) -> Any:
        return original(self, _scaled(outputs))

    for module, name in (
        ("torch.amp.grad_scaler", "GradScaler"),
        ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler"),
    ):
        if module in sys.modules:
            _wrap(getattr(sys.modules[module], name), "scale", scale)


def follow_accelerate() -> None:
    """Wrap ``Accelerator.backward``."""

    def backward(original: Callable[..., Any], self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, _scaled(loss, 1 / getattr(self, MICRO_BATCHES, 1)), *args, **kwargs)

    _wrap(sys.modules["accelerate.accelerator"].Accelerator, "backward", backward)


def follow_trainer() -> None:
    """Wrap ``Trainer.training_step``."""

    def training_step(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        # Trainer divides the loss by the micro-batches, or by the number of targets of the whole step.
        setattr(self.accelerator, MICRO_BATCHES, getattr(self, "current_gradient_accumulation_steps", 1))
        try:
            return original(self, *args, **kwargs)
        finally:
            delattr(self.accelerator, MICRO_BATCHES)

    _wrap(sys.modules["transformers.trainer"].Trainer, "training_step", training_step)


def follow_deepspeed() -> None:
    """Wrap ``DeepSpeedEngine.backward``."""

    def backward(original: Callable[..., Any], self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, _scaled(loss), *args, **kwargs)

    _wrap(sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine, "backward", backward)


def follow_lightning() -> None:
    """Wrap ``Strategy.training_step`` of both distributions of Lightning."""

    def training_step(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        _scaled(output.get("loss") if isinstance(output, dict) else output)
        return output

    for name in ("lightning.pytorch.strategies.strategy", "pytorch_lightning.strategies.strategy"):
        if name in sys.modules:
            _wrap(sys.modules[name].Strategy, "training_step", training_step)


def _scaled(loss: Any, factor: float = 1.0) -> Any:
    losses = sys.modules.get("moe_comm.layers.moe.losses")  # without it, no layer exists
    if losses is not None and isinstance(loss, losses.Tensor) and loss.numel() == 1:
        losses.scale_aux_like(loss, factor)
    return loss


def _wrap(cls: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = vars(cls).get(name, getattr(cls, name))
    if hasattr(original, "scales_aux_losses"):
        return

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped.scales_aux_losses = True  # type: ignore[attr-defined]
    setattr(cls, name, wrapped)
