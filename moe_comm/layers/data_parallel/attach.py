"""Connect an experts module whose parameters differ between ranks with what this package does for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import InputError, UnsupportedModel
from moe_comm.layers.data_parallel.expert_shard import ExpertShard, ExpertShards, plain, spread_like
from moe_comm.layers.data_parallel.gradients import ExpertGradients
from moe_comm.layers.data_parallel.optimizers import mark_parameter

_ATTRIBUTE = "expert_gradients"


def attach_experts(
    experts: nn.Module, shards: ExpertShards, replicated: Callable[[], nn.Parameter | None], label: str
) -> None:
    """Make gradients, state dicts and loading of ``experts`` right for parameters that differ between ranks.

    Args:
        experts: holds the parameters that ``shards`` names; its ``__call__`` must run in every forward pass.
        replicated: returns a parameter that every forward pass uses and that all ranks hold, the router's weight;
            None if there is none.
        label: the layer's name, for error messages.
    """
    gradients = ExpertGradients(shards, replicated, label)
    setattr(experts, _ATTRIBUTE, gradients)
    for name in shards.shardings:
        mark_parameter(getattr(experts, name), shards, name)
    experts.register_forward_pre_hook(gradients.before_forward)
    experts.register_state_dict_post_hook(_after_state_dict)
    experts.register_load_state_dict_pre_hook(_before_load)


def gradients_of(module: nn.Module) -> ExpertGradients | None:
    """What ``attach_experts`` put on ``module``; None where experts do not differ between ranks."""
    return getattr(module, _ATTRIBUTE, None)


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertGradients]]:
    """Every module of ``model`` whose parameters differ between ranks, by name."""
    for name, module in model.named_modules():
        gradients = gradients_of(module)
        if gradients is not None:
            yield name, module, gradients


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``model`` that differ between ranks, by name; empty if all experts are on this rank."""
    return {
        f"{name}.{key}".lstrip("."): parameter
        for name, module, gradients in expert_modules(model)
        for key, parameter in module.named_parameters(recurse=False)
        if key in gradients.shards.shardings
    }


def tensor_parallel(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ProcessGroup]]:
    """The parameters of ``model`` that are cut over tensor-parallel ranks, by name, and their groups.

    Raises:
        UnsupportedModel: a module cuts parameters over other axes.
    """
    for name, module in model.named_modules():
        describe, group = getattr(module, "shardings", None), getattr(module, "group", None)
        for key, sharding in describe().items() if callable(describe) else ():
            axes = {split.axis for split in sharding.splits}
            if sharding.expert or not axes:
                continue
            if axes != {"tp"}:
                raise UnsupportedModel(f"{name}.{key} is cut over {sorted(axes)}, for which no ranks are known")
            if group is not None and dist.get_world_size(group) > 1:
                yield f"{name}.{key}".lstrip("."), getattr(module, key), group


def skip_gradient_checks(model: nn.Module) -> None:
    """Do not compare gradients before optimizer steps; for loops that reduce gradients in another way on purpose.

    Local SGD is an example: ranks take several steps before they average their weights.
    """
    for _, _, gradients in expert_modules(model):
        gradients.stop_checking()


def leave_gradients(model: nn.Module) -> None:
    """Leave the gradients of ``model`` as backward delivers them, unchecked: the caller reduces them all by itself."""
    for _, _, gradients in expert_modules(model):
        gradients.left_to_caller = True


def _after_state_dict(experts: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    gradients = gradients_of(experts)
    assert gradients is not None
    for name in gradients.shards.shardings:
        value = state.get(prefix + name)
        if isinstance(value, Tensor):
            state[prefix + name] = ExpertShard.of(value.detach(), gradients.shards, name, in_state_dict=True)


def _before_load(experts: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    gradients = gradients_of(experts)
    assert gradients is not None
    for name in gradients.shards.shardings:
        if isinstance(value := state.get(prefix + name), Tensor):
            part = local_part(gradients.shards, name, value, prefix + name)
            state[prefix + name] = spread_like(part, getattr(experts, name))


def local_part(shards: ExpertShards, name: str, value: Tensor, key: str) -> Tensor:
    """This rank's part of ``value``, which holds all experts, or already is this rank's part.

    Raises:
        InputError: ``value`` is neither, or is the part of a rank that holds other experts.
    """
    sharding, local = shards.shardings[name], shards.local_shape(name)
    if isinstance(value, ExpertShard):
        theirs = value.shards
        boxes = theirs.shardings[value.name_in_module].boxes(theirs.place, theirs.sizes)
        if boxes != sharding.boxes(shards.place, shards.sizes):
            raise InputError(
                f"{key} is the part of a rank that holds other experts than this one; load the full tensor"
            )
        return plain(value) if value.dtensor is None else value.dtensor
    shape = tuple(value.shape)
    if shape == sharding.shape:
        return shards.take(name, value)
    if shape != local:
        raise InputError(
            f"{key} has shape {shape}; expected {sharding.shape} (all experts, as moe_comm.state_dict returns them) "
            f"or {local} (this rank's part)"
        )
    return value
