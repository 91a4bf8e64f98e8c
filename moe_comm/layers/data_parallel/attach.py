"""Install gradient, state-dict and optimizer hooks on an experts module that is sharded by expert parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import InputError, UnsupportedModel
from moe_comm.layers.data_parallel.expert_shard import ExpertShard, ExpertShards, distribute_like, plain
from moe_comm.layers.data_parallel.gradients import ExpertGradients
from moe_comm.layers.data_parallel.optimizers import mark_parameter

_ATTRIBUTE = "expert_gradients"


def attach_experts(
    experts: nn.Module, shards: ExpertShards, replicated: Callable[[], nn.Parameter | None], label: str
) -> None:
    """Install hooks for the gradients, state dicts and optimizers of an experts module whose parameters are sharded.

    A later call replaces the sharding.

    Args:
        experts: the module that holds the parameters in ``shards``; its ``__call__`` must run in each forward pass.
        shards: the sharding of the parameters.
        replicated: returns a replicated parameter that each forward pass uses (the router's weight), or None. Its
            gradient shows how the training loop or wrapper reduces replicated gradients.
        label: name of the layer in error messages.
    """
    for name in shards.shardings:
        mark_parameter(getattr(experts, name), shards, name, experts)
    if (gradients := gradients_of(experts)) is not None:
        gradients.use_shards(shards)
        return
    gradients = ExpertGradients(shards, replicated, label)
    setattr(experts, _ATTRIBUTE, gradients)
    experts.register_forward_pre_hook(gradients.before_forward)
    experts.register_state_dict_post_hook(_after_state_dict)
    experts.register_load_state_dict_pre_hook(_before_load)


def gradients_of(module: nn.Module) -> ExpertGradients | None:
    """Return the ``ExpertGradients`` that ``attach_experts`` installed on ``module``, or None."""
    return getattr(module, _ATTRIBUTE, None)


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertGradients]]:
    """Iterate over the modules of ``model`` with sharded experts: name, module, gradients."""
    for name, module in model.named_modules():
        gradients = gradients_of(module)
        if gradients is not None:
            yield name, module, gradients


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the sharded expert parameters of ``model`` by name. Empty if every rank has all experts."""
    return {
        f"{name}.{key}".lstrip("."): parameter
        for name, module, gradients in expert_modules(model)
        for key, parameter in module.named_parameters(recurse=False)
        if key in gradients.shards.shardings
    }


def refuse_shared_parameters(model: nn.Module) -> None:
    """Raise UnsupportedModel if several experts modules of ``model`` have the same parameter."""
    names: dict[int, str] = {}
    for name, param in expert_parameters(model).items():
        if (other := names.setdefault(id(param), name)) != name:
            raise UnsupportedModel(
                f"{other} and {name} are one parameter of two experts modules, each of which would scale and reduce "
                "its gradient. Let the layers share the module: layer.experts = other_layer.experts"
            )


def exclude_from_ddp(model: Any) -> None:
    """Exclude experts and counters of this rank's tokens from the reduction and broadcast of DDP.

    Raises:
        UnsupportedModel: several experts modules have the same parameter.
    """
    refuse_shared_parameters(model)
    counters = (
        f"{name}.{key}".lstrip(".") for name, module in model.named_modules() for key in getattr(module, "counters", ())
    )
    if names := [*expert_parameters(model), *counters]:
        # DDP of ``torch.compile(model)`` sees the names of the module around ``model``.
        names += [f"_orig_mod.{name}" for name in names]
        before = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
        model._ddp_params_and_buffers_to_ignore = [*before, *(name for name in names if name not in before)]


def tensor_parallel(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ProcessGroup]]:
    """Iterate over the parameters that are split over tensor-parallel ranks: name, parameter, group.

    Raises:
        UnsupportedModel: a module splits parameters over other axes.
    """
    for name, module in model.named_modules():
        describe, group = getattr(module, "shardings", None), getattr(module, "group", None)
        for key, sharding in describe().items() if callable(describe) else ():
            axes = {split.axis for split in sharding.splits}
            if sharding.expert or not axes:
                continue
            if axes != {"tp"}:
                raise UnsupportedModel(
                    f"{name}.{key} is split over {sorted(axes)}; only tensor-parallel splits are supported"
                )
            if group is not None and dist.get_world_size(group) > 1:
                yield f"{name}.{key}".lstrip("."), getattr(module, key), group


def skip_gradient_checks(model: nn.Module) -> None:
    """Disable the checks of gradients and of weights, for loops such as local SGD in which ranks differ.

    Optimizer steps do not check that gradients are reduced. ``sync_gradients``, ``prepare_fsdp``, DDP and optimizer
    steps do not check that the weights of ranks are equal.
    """
    for _, _, gradients in expert_modules(model):
        gradients.stop_checking()


def leave_gradients(model: nn.Module) -> None:
    """Disable the reduction and the check of expert gradients in ``model``. The caller reduces all gradients."""
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
            state[prefix + name] = distribute_like(part, getattr(experts, name))
    if (copies := getattr(experts, "copies", None)) is not None:
        copies.weights_changed()


def local_part(shards: ExpertShards, name: str, value: Tensor, key: str) -> Tensor:
    """Return this rank's part of ``value``.

    Args:
        shards: sharding of the experts module.
        value: tensor with all experts, or with only this rank's part.

    Raises:
        InputError: ``value`` has a different shape, or is the part of a rank with other experts.
    """
    sharding, local = shards.shardings[name], shards.local_shape(name)
    if isinstance(value, ExpertShard):
        source = value.shards
        boxes = source.shardings[value.name_in_module].boxes(source.place, source.sizes)
        if boxes != sharding.boxes(shards.place, shards.sizes):
            raise InputError(
                f"{key} is the part of a rank with other experts than this rank; load the full tensor instead"
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
