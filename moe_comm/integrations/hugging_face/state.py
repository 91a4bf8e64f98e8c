"""Full weights of a swapped model: gathered into one state dict, or written as a checkpoint of the unswapped model."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_comm.dispatch import Dispatcher
from moe_comm.errors import ConfigError, UnsupportedModel
from moe_comm.integrations.hugging_face.swap import EPExperts, swapped_experts
from moe_comm.layers.data_parallel.state import experts_gathered


def gather_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """The state dict of the unswapped model, bit for bit, on the CPU. Collective over the expert-parallel group.

    Args:
        model: what ``swap_moe`` returned.
        rank0_only: only rank 0 of the group gets it, the others get an empty dict; saves their memory and most traffic.

    Returns:
        Full tensors under the unswapped model's names. Weights that are not split are shared with the model where it
        is on the CPU, as ``state_dict`` does.

    Raises:
        ConfigError: ``model`` is not swapped.
    """
    _swapped(model)
    state = experts_gathered(model, "full", rank0_only, cpu=True)
    return {key: value.detach().cpu() for key, value in state.items()}


def save_swapped(model: Any, folder: str | PathLike[str], **kwargs: Any) -> None:
    """Write config and safetensors of the whole model to ``folder``, for ``from_pretrained(folder)``. Collective.

    The process with global rank 0 writes, and the ranks of its expert-parallel group return when it is done; where
    experts have copies in other groups, those return at once.

    Args:
        model: what ``swap_moe`` returned for a ``PreTrainedModel``.
        kwargs: passed to ``PreTrainedModel.save_pretrained`` (``max_shard_size``, ...).

    Raises:
        ConfigError: ``model`` is not swapped, or writing failed on another rank.
        UnsupportedModel: it has no ``save_pretrained``.
    """
    dispatcher = next(iter(_swapped(model).values())).dispatcher
    if not hasattr(type(model), "save_pretrained"):
        raise UnsupportedModel(
            f"save_swapped writes models of transformers; {type(model).__name__} has no save_pretrained. "
            "Save what gather_state_dict returns."
        )
    if _global_rank(dispatcher, 0) != 0:
        return
    full = gather_state_dict(model, rank0_only=True)
    failure: Exception | None = None
    if dispatcher.rank == 0:
        try:
            type(model).save_pretrained(model, folder, state_dict=full, **kwargs)
        except Exception as error:
            failure = error
    failed = _any_rank(failure is not None, dispatcher, model)
    if failure is not None:
        raise failure
    if failed:
        raise ConfigError(f"rank 0 could not write the model to {folder}; its own error says why")


def _swapped(model: nn.Module) -> dict[str, EPExperts]:
    experts = swapped_experts(model)
    if not experts:
        raise ConfigError(f"{type(model).__name__} is not swapped; call swap_moe(model, ep_group) first")
    return experts


def _global_rank(dispatcher: Dispatcher, rank: int) -> int:
    """Rank in the whole job of rank ``rank`` of the expert-parallel group."""
    if dispatcher.group is None:
        return dist.get_rank() if dist.is_initialized() else 0
    return dist.get_global_rank(dispatcher.group, rank)


def _any_rank(flag: bool, dispatcher: Dispatcher, model: nn.Module) -> bool:
    if dispatcher.world == 1:
        return flag
    device = next(model.parameters()).device
    flags = torch.tensor([int(flag)], device=device)
    dist.all_reduce(flags, group=dispatcher.group)
    return bool(flags.item())
