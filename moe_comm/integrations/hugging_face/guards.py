"""Reject uses of plain ``Trainer`` and accelerate that are wrong for experts on several ranks.

Both libraries write files on rank 0 only. An error raised there would leave the other ranks waiting. The checks
therefore wrap methods of ``Trainer`` and ``Accelerator`` that all ranks call. They ignore models whose experts are not
distributed, and trainers and accelerators that support such experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from moe_comm.errors import ConfigError
from moe_comm.layers.data_parallel import expert_modules

_HERE = "moe_comm.integrations.hugging_face"
_ACCELERATOR = f"Write\n    {_HERE}.prepare_accelerator(accelerator)\nbefore accelerator.prepare."
_TRAINER = f"Use {_HERE}.MoETrainer, or put {_HERE}.MoETrainerMixin before your Trainer class."


def guard_libraries() -> None:
    """Wrap the methods of the classes that are already imported. Repeated calls have no effect."""
    accelerate, trainer = sys.modules.get("accelerate.accelerator"), sys.modules.get("transformers.trainer")
    if accelerate is not None:
        for name, check in (
            ("prepare", _before_prepare),
            ("get_state_dict", _before_get_state_dict),  # save_state and save_model call it, too
            ("load_state", _before_load_state),
        ):
            _guard(accelerate.Accelerator, name, check)
    if trainer is not None:
        _guard(trainer.Trainer, "train", _before_train)
        _guard(trainer.Trainer, "save_model", _before_save_model)


def _guard(cls: Any, name: str, check: Callable[..., None]) -> None:
    original = getattr(cls, name)
    if hasattr(original, "guarded_by_moe_comm"):
        return

    @wraps(original)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "handles_experts", False):
            check(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    guarded.guarded_by_moe_comm = True  # type: ignore[attr-defined]
    setattr(cls, name, guarded)


def _any_distributed(models: Any) -> bool:
    return any(next(expert_modules(model), None) is not None for model in models if isinstance(model, nn.Module))


def _before_prepare(accelerator: Any, *args: Any, **_: Any) -> None:
    guard_libraries()  # Trainer may have been imported after swap_moe
    kind = accelerator.distributed_type
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM") and _any_distributed(args):
        raise ConfigError(
            f"{kind.value} would treat experts as replicated, but each rank has different ones. {_ACCELERATOR}"
        )


def _before_get_state_dict(accelerator: Any, model: Any, *_: Any, **__: Any) -> None:
    if _any_distributed([model]):
        raise ConfigError(f"accelerate would save the experts of rank 0 only. {_ACCELERATOR}")


def _before_load_state(accelerator: Any, *_: Any, **__: Any) -> None:
    if _any_distributed(accelerator._models):
        raise ConfigError(f"accelerate would load the optimizer state of all experts on each rank. {_ACCELERATOR}")


def _before_train(trainer: Any, resume_from_checkpoint: Any = None, *_: Any, **__: Any) -> None:
    if (resume_from_checkpoint or trainer.args.save_strategy != "no") and _any_distributed([trainer.model]):
        raise ConfigError(
            f"checkpoints of Trainer would have the experts of rank 0 only. {_TRAINER} "
            'With save_strategy="no" this trainer is correct under DDP.'
        )


def _before_save_model(trainer: Any, *_: Any, **__: Any) -> None:
    if _any_distributed([trainer.model]):
        raise ConfigError(f"save_model would write the experts of rank 0 only. {_TRAINER}")
