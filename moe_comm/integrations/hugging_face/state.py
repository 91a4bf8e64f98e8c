"""Gather the full weights of a swapped model, or save them as a checkpoint of the unswapped model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from moe_comm.comm.group_setup import agree_on_written
from moe_comm.dispatch import Dispatcher
from moe_comm.errors import ConfigError, UnsupportedModel
from moe_comm.integrations.checkpoint.save import Settings, write_checkpoint
from moe_comm.integrations.hugging_face.swap import EPExperts, swapped_experts
from moe_comm.layers.data_parallel.expert_shard import is_dtensor
from moe_comm.layers.data_parallel.state import state_dict, state_dict_with_experts
from moe_comm.layers.parallel.collectives import gather_values, group_size
from moe_comm.topology import Sharding


def save_swapped(model: Any, folder: str | PathLike[str], **kwargs: Any) -> None:
    """Write configuration and safetensors of the full model to ``folder``, for ``from_pretrained(folder)``. Collective.

    All ranks of the default group write, as ``moe_comm.save_checkpoint`` describes, and return when the files are
    complete. Of a model with adapters of PEFT, the adapters of all experts are written, in PEFT's format.

    Args:
        model: a ``PreTrainedModel`` that ``swap_moe`` returned, or a ``PeftModel`` of one.
        folder: folder to write to, on a file system that all ranks share.
        kwargs: ``group``, ``max_shard_size`` (default "50GB") and ``dtype`` of ``save_checkpoint``. With others
            (``push_to_hub``, ...) or adapters, all are passed to ``save_pretrained``, and global rank 0 gathers and
            writes for its expert-parallel group.

    Raises:
        ConfigError: ``model`` is not swapped, or another rank could not write. The rank that could not write raises its
            original exception.
        UnsupportedModel: ``model`` has no ``save_pretrained``.
    """
    _swapped(model)
    if not hasattr(type(model), "save_pretrained"):
        raise UnsupportedModel(
            f"save_swapped requires a model of transformers; {type(model).__name__} has no save_pretrained. "
            "Call gather_state_dict and save the result, or save_checkpoint."
        )
    if of_peft(model):
        model.save_pretrained(folder, **kwargs)  # see ``lora.py``
        return
    adapters_only = getattr(model, "_hf_peft_config_loaded", False)
    if not adapters_only and kwargs.keys() <= {"group", "max_shard_size", "dtype"}:
        settings = Settings(kwargs.get("max_shard_size", "50GB"), kwargs.get("dtype"), failure=ConfigError)
        write_checkpoint(model, Path(folder), kwargs.get("group"), settings)
        return
    write_on_first_rank(model, folder, partial(type(model).save_pretrained, model, **kwargs), adapters_only)


def gather_for_saving(model: nn.Module, rank0_only: bool) -> dict[str, Any]:
    """Return the full state dict of ``model`` on the CPU; without the weights of experts if only adapters are saved."""
    if not has_adapters(model):
        return state_dict(model, rank0_only=rank0_only, cpu=True)
    return state_dict_with_experts(model, "full", rank0_only, cpu=True, without=_weights_of_experts(model))


def has_adapters(model: Any) -> bool:
    """Return whether ``save_pretrained`` of ``model`` writes adapters only."""
    return of_peft(model) or getattr(model, "_hf_peft_config_loaded", False)


def of_peft(model: nn.Module) -> bool:
    # FSDP2 makes a subclass of the class of the model.
    return any(base.__module__.startswith("peft.") for base in type(model).__mro__)


def _weights_of_experts(model: nn.Module) -> set[str]:
    return {f"{name}.{key}" for name, one in swapped_experts(model).items() for key in one.layout.parameters}


def write_on_first_rank(
    model: nn.Module, folder: str | PathLike[str], write: Callable[..., None], adapters_only: bool
) -> None:
    """Call ``write(folder, state_dict=...)`` on global rank 0 with the full state dict of ``model``. Collective.

    adapters_only: leave the weights of experts out, which PEFT does not save.

    Raises:
        ConfigError: rank 0 could not write. Rank 0 raises its original exception.
    """
    experts = _swapped(model)
    dispatcher = next(iter(experts.values())).dispatcher
    first_group = _global_rank(dispatcher, 0) == 0
    if not first_group and not any(is_dtensor(parameter) for parameter in model.parameters()):
        return  # else all ranks gather what FSDP2 has sharded
    without = _weights_of_experts(model) if adapters_only else ()
    full = state_dict_with_experts(model, "full", rank0_only=True, cpu=True, without=without)
    outcome: str | Exception = ""
    if first_group and dispatcher.rank == 0:
        try:
            write(folder, state_dict=full)
        except Exception as error:
            outcome = error
    agree_on_written(dispatcher.group, outcome, f"the model to {folder}", ConfigError)


def gather_full(local: Tensor, sharding: Sharding, group: dist.ProcessGroup | None, name: str) -> Tensor:
    """Return the full tensor of a tensor-parallel parameter on the CPU. Collective over ``group`` if it is sharded."""
    world, local = group_size(group), local.detach()
    if not sharding.splits or world == 1:
        return local.cpu()
    padded = local.new_zeros(sharding.local_shape({"tp": 0}, {"tp": world}))  # the shard of rank 0 is the largest
    padded[tuple(slice(n) for n in local.shape)] = local
    full = local.new_empty(sharding.shape, device="cpu")
    for rank, shard in enumerate(gather_values(padded, group, f"gathering {name}").cpu()):
        for box in sharding.boxes({"tp": rank}, {"tp": world}):
            full[box.full] = shard[box.local]
    return full


def refuse_save(model: Any, parts: str, advice: str) -> None:
    """Make ``save_pretrained`` of a model of transformers raise ConfigError: it would write ``parts`` of one rank."""
    if hasattr(model, "save_pretrained"):
        text = f"save_pretrained of this {type(model).__name__} would write the {parts} of this rank only. {advice}"
        model.save_pretrained = partial(_raise_config_error, text)


def _raise_config_error(text: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigError(text)


def _swapped(model: nn.Module) -> dict[str, EPExperts]:
    experts = swapped_experts(model)
    if not experts:
        raise ConfigError(f"{type(model).__name__} is not swapped; call swap_moe(model, ep_group) first")
    return experts


def _global_rank(dispatcher: Dispatcher, rank: int) -> int:
    """Return the global rank of rank ``rank`` of the expert-parallel group."""
    if dispatcher.group is None:
        return dist.get_rank() if dist.is_initialized() else 0
    return dist.get_global_rank(dispatcher.group, rank)
