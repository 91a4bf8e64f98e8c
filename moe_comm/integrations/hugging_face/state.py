"""Gather the full weights of a swapped model, or save them as a checkpoint of the unswapped model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from moe_comm.comm.group_setup import agree_on_written, group_or_default, group_rank
from moe_comm.dispatch import Dispatcher
from moe_comm.errors import ConfigError, UnsupportedModel, suggestion
from moe_comm.integrations.checkpoint.plan import variant_name
from moe_comm.integrations.checkpoint.save import Settings, write_checkpoint
from moe_comm.integrations.hugging_face.swap import EPExperts, swapped_experts
from moe_comm.layers.data_parallel.expert_shard import is_dtensor
from moe_comm.layers.data_parallel.state import state_dict, state_dict_with_experts
from moe_comm.layers.parallel.collectives import gather_values, group_size
from moe_comm.topology import Sharding

T = TypeVar("T")


def save_swapped(model: Any, folder: str | PathLike[str], **kwargs: Any) -> None:
    """Write configuration and safetensors of the full model to ``folder``, for ``from_pretrained(folder)``. Collective.

    All ranks of the default group write, as ``moe_comm.save_checkpoint`` describes, and return when the files are
    complete. Of a model with adapters of PEFT, the adapters of all experts are written, in PEFT's format.

    Args:
        model: a ``PreTrainedModel`` that ``swap_moe`` returned, or a ``PeftModel`` of one.
        folder: folder to write to, on a file system that all ranks share.
        kwargs: ``group``, ``max_shard_size`` (default "50GB") and ``dtype`` of ``save_checkpoint``, and ``variant``,
            ``save_original_format``, ``push_to_hub``, ``repo_id``, ``private``, ``token``, ``commit_message`` and
            ``create_pr`` of ``save_pretrained``. With adapters, all are passed to ``save_pretrained``, and global rank
            0 gathers the adapters and writes.

    Raises:
        ConfigError: ``model`` is not swapped, a setting is unknown, or another rank could not write. The rank that
            could not write or upload raises its original exception.
        UnsupportedModel: ``model`` has no ``save_pretrained``, or parts that cannot be written.
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
    if has_adapters(model):
        write_adapters(model, folder, partial(type(model).save_pretrained, model, **kwargs))
        return
    if unknown := next((name for name in kwargs if name not in (*_SETTINGS, *_HUB, *_NO_EFFECT)), None):
        raise ConfigError(f"save_swapped does not support {unknown}{suggestion(unknown, (*_SETTINGS, *_HUB))}")
    group = group_or_default(kwargs.get("group"))
    settings = Settings(
        kwargs.get("max_shard_size", "50GB"),
        kwargs.get("dtype"),
        variant_name(kwargs.get("variant")),
        failure=ConfigError,
        hub_layout=kwargs.get("save_original_format", True),
    )
    if not kwargs.get("push_to_hub"):
        write_checkpoint(model, Path(folder), group, settings)
        return
    upload = _on_first(group, f"the model to {folder}", lambda: _begin_upload(model, Path(folder), kwargs))
    write_checkpoint(model, Path(folder), group, settings)
    _on_first(group, "the model to the hub", lambda: upload and upload())


_SETTINGS = ("group", "max_shard_size", "dtype", "variant", "save_original_format", "push_to_hub")
_HUB = ("repo_id", "private", "token", "commit_message", "create_pr")
_NO_EFFECT = ("is_main_process", "safe_serialization", "save_peft_format")
"""Settings of ``save_pretrained`` that are ignored: all ranks write safetensors without adapters."""


def _on_first(group: dist.ProcessGroup | None, target: str, action: Callable[[], T]) -> T | None:
    """Return the result of ``action`` on rank 0 of ``group``, and None on others. Collective.

    Raises:
        ConfigError: the action failed on rank 0, which raises its original exception.
    """
    outcome: str | Exception = ""
    result = None
    if group_rank(group) == 0:
        try:
            result = action()
        except Exception as error:
            outcome = error
    agree_on_written(group, outcome, target, ConfigError)
    return result


def _begin_upload(model: Any, folder: Path, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Create a repository on the hub, and return a function that uploads the files written to ``folder`` meanwhile."""
    from transformers.utils.hub import create_and_tag_model_card, hf_api

    private, token, name = kwargs.get("private"), kwargs.get("token"), kwargs.get("repo_id", folder.name)
    repository = hf_api().create_repo(name, private=private, token=token, exist_ok=True).repo_id
    before = model._get_files_timestamps(folder) if folder.exists() else {}

    def upload() -> Any:
        create_and_tag_model_card(repository, model.model_tags, token=token).save(folder / "README.md")
        message, create_pr = kwargs.get("commit_message"), kwargs.get("create_pr", False)
        return model._upload_modified_files(folder, repository, before, message, token, create_pr)

    return upload


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


def write_adapters(model: nn.Module, folder: str | PathLike[str], write: Callable[..., None]) -> None:
    """Call ``write(folder, state_dict=...)`` on global rank 0 with the adapters of all experts. Collective.

    The state dict has all tensors but the weights of experts, which PEFT does not save.

    Raises:
        ConfigError: rank 0 could not write. Rank 0 raises its original exception.
    """
    experts = _swapped(model)
    dispatcher = next(iter(experts.values())).dispatcher
    first_group = _global_rank(dispatcher, 0) == 0
    if not first_group and not any(is_dtensor(parameter) for parameter in model.parameters()):
        return  # else all ranks gather what FSDP2 has sharded
    without = _weights_of_experts(model)
    full = state_dict_with_experts(model, "full", rank0_only=True, cpu=True, without=without)
    if first_group:
        _on_first(dispatcher.group, f"the model to {folder}", lambda: write(folder, state_dict=full))


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


def refuse_save(model: Any, parts: str) -> None:
    """Make ``save_pretrained`` of a model of transformers raise ConfigError: it would write ``parts`` of one rank."""
    if hasattr(model, "save_pretrained"):
        text = f"save_pretrained of this {type(model).__name__} would write the {parts} of this rank only. "
        text += "Call moe_comm.save_checkpoint(model, folder) on every rank instead."
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
