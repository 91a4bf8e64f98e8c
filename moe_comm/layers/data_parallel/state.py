"""State dicts of models and optimizers whose experts differ between ranks: full, sharded or local.

form        value of an expert parameter               use
"full"      [E, ...], all experts                      torch.save and safetensors; loads on any number of ranks
"sharded"   this rank's part, as an ``ExpertShard``    torch.distributed.checkpoint
"local"     this rank's part, as a plain tensor        one file per rank; loads on the same number of ranks
            (under FSDP2 a ``DTensor``)
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_comm.errors import ConfigError, InputError, UnsupportedModel
from moe_comm.layers.data_parallel.attach import expert_modules, local_part, tensor_parallel
from moe_comm.layers.data_parallel.expert_shard import ExpertShard, ExpertShards, distribute_like, is_dtensor, plain
from moe_comm.layers.data_parallel.optimizers import params_of, refuse_saving
from moe_comm.layers.parallel.module import state_key

Form = Literal["full", "sharded", "local"]


def state_dict(model: nn.Module, *, form: Form = "full", rank0_only: bool = False, cpu: bool = False) -> dict[str, Any]:
    """Return the state dict of a model with MoE layers, with or without DDP or FSDP2. "full" is collective.

    The model contains ``MoELayer``, or is a Hugging Face model whose MoE layers were replaced (swapped).

    Args:
        form: see the table in this module. "full": the keys and values, bit for bit, of the unwrapped model in a single
            process.
        rank0_only: with "full", only rank 0 of each expert-parallel group receives the values; other ranks return {}.
        cpu: collect full tensors in CPU memory.

    Returns:
        The state dict. Tensors that are not split over ranks share their storage with the model.

    Raises:
        UnsupportedModel: ``form`` is "full", and parameters other than experts are split over ranks.
    """
    _check_form(form)
    if form == "full" and (split := next(tensor_parallel(model), None)):
        raise UnsupportedModel(
            f"{split[0]} is split over tensor-parallel ranks. For a swapped model, complete the state dict with "
            "gather_linears and gather_attention of moe_comm.integrations.hugging_face. For a model of moe-comm train, "
            "use moe-comm export"
        )
    return state_dict_with_experts(model, form, rank0_only, cpu)


def state_dict_with_experts(
    model: nn.Module, form: Form, rank0_only: bool = False, cpu: bool = False, without: Container[str] = ()
) -> dict[str, Any]:
    """Return the ``state_dict`` of a model. Tensor-parallel parameters may be split and are returned unchanged.

    without: keys to leave out.
    """
    result = {}
    for key, value in _unwrapped(model).state_dict().items():
        if key in without:
            continue
        converted = _convert(value, form, rank0_only, cpu)
        if converted is not None:
            result[state_key(key)] = converted
    for name, module in _unwrapped(model).named_modules() if form == "full" else ():
        if (restore := getattr(module, "restore_names", None)) is not None:  # of blocks with their own names
            restore(result, f"{state_key(name)}.".lstrip("."))
    return result if form != "full" or not rank0_only or _is_first(model) else {}


def gather_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """Return the state dict of ``model`` as if one rank held every expert, on the CPU. Collective.

    Save its result, not ``{n: p.detach().cpu() for n, p in model.named_parameters()}``, which has the experts of one
    rank only and raises no error.

    Parameters that tensor parallelism splits keep their local shapes; ``gather_attention`` and ``gather_linears`` of
    ``moe_comm.integrations.hugging_face`` complete them.

    Args:
        model: a layer, a ``Transformer``, or a swapped Hugging Face model.
        rank0_only: only rank 0 of each expert-parallel group receives the tensors, the other ranks an empty dict.

    Returns:
        Copies of all tensors; expert weights are [E, ...] over all experts.
    """
    model_storages = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    gathered = state_dict_with_experts(model, "full", rank0_only, cpu=True)
    return {
        key: value.detach().clone() if _storage(value) in model_storages else value.detach().cpu()
        for key, value in gathered.items()
    }


def _storage(tensor: Any) -> int:
    return (tensor.to_local() if is_dtensor(tensor) else tensor).untyped_storage().data_ptr()


def gather_gradients(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """Return the gradients of ``model`` as if one rank held every expert, on the CPU. Collective.

    Call it after ``sync_gradients``, or after the backward pass of DDP or FSDP2, for example to compare a swapped model
    with its original. It gathers the gradients of experts and does not reduce others.

    Args:
        model, rank0_only: as for ``gather_state_dict``.

    Returns:
        Copies of the gradients under the names and shapes of the parameters in ``gather_state_dict(model)``. Parameters
        without a gradient have zeros.
    """
    with _gradients_in_place_of_parameters(model):
        gathered = gather_state_dict(model, rank0_only=rank0_only)
    buffers = {state_key(name) for name, _ in _unwrapped(model).named_buffers(remove_duplicate=False)}
    return {key: value for key, value in gathered.items() if key not in buffers}


def _zeros(param: Tensor) -> Tensor:
    """Return zeros of the shape of ``param``, without memory of its size."""
    return torch.zeros_like(param) if is_dtensor(param) else param.detach().new_zeros(()).expand(param.shape)


@contextmanager
def _gradients_in_place_of_parameters(model: nn.Module) -> Iterator[None]:
    """Let state dicts of ``model`` have the gradients, which then get the names and the form of the parameters."""
    owners: list[dict[str, Any]] = [module._parameters for module in model.modules()]
    before = [dict(owner) for owner in owners]
    for owner, params in zip(owners, before, strict=True):
        for name, param in params.items():
            if param is not None:
                owner[name] = _zeros(param) if param.grad is None else plain(param.grad)
    try:
        yield
    finally:
        for owner, params in zip(owners, before, strict=True):
            owner.update(params)


def load_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load a result of ``state_dict`` in any form; each rank takes its part of full tensors. Not collective.

    Args:
        strict: raise for missing and unexpected keys.

    Returns:
        Missing and unexpected keys, as ``nn.Module.load_state_dict``.

    Raises:
        InputError: a tensor has neither the full shape nor, for experts, the shape of this rank's part.
        RuntimeError: keys are missing or unexpected, with ``strict``.
    """
    model = _unwrapped(model)
    return model.load_state_dict(distribute_state(model, state), strict=strict)


def distribute_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with the keys of ``model.state_dict()``, and distributed as the parameters of ``model`` are.

    Raises:
        InputError: a tensor has neither the full shape nor, for experts, the shape of this rank's part.
    """
    model_state = {state_key(key): (key, value) for key, value in model.state_dict().items()}
    converted = {}
    for key, value in state.items():
        name, current = model_state.get(key, (key, value))
        if isinstance(value, Tensor) and isinstance(current, Tensor) and not isinstance(value, ExpertShard):
            shapes = _accepted_shapes(current)
            if tuple(value.shape) not in shapes:
                raise InputError(f"{key} has shape {tuple(value.shape)}; this model expects {shapes[0]}")
        converted[name] = distribute_like(value, current)
    return converted


def optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, *, form: Form = "full", rank0_only: bool = False, cpu: bool = False
) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with the state of experts in ``form``. "full" is collective.

    Args:
        form, rank0_only, cpu: as for ``state_dict``. The full form loads into an optimizer of the unwrapped model as
            well.

    Raises:
        UnsupportedModel: ``form`` is "full" or "sharded", and expert state has another shape than its parameter, or
            experts are in a ``ModuleList`` (``mark_experts``).
    """
    _check_form(form)
    inner = torch_optimizer(optimizer)
    result = inner.state_dict()
    expert = _expert_parameters(model)
    state = {}
    for index, param in enumerate(params_of(inner)):
        values = result["state"].get(index, {})
        if id(param) in expert:
            values = {
                key: _convert_expert_state(key, value, param, *expert[id(param)], form)
                for key, value in (values or _empty_state(result["state"], param)).items()
            }
        if values:
            state[index] = {key: _convert(value, form, rank0_only, cpu) for key, value in values.items()}
    if form == "full" and rank0_only and not _is_first(model):
        return {}
    return {**result, "state": state}


def load_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a result of ``optimizer_state_dict`` in any form, on any number of ranks. Not collective.

    Raises:
        InputError: a tensor has neither the shape of all experts nor that of this rank's part.
    """
    inner = torch_optimizer(optimizer)
    expert = _expert_parameters(model)
    converted = dict(state["state"])
    for index, param in enumerate(params_of(inner)):
        values = converted.get(index)
        if values is None:
            continue
        values = dict(values)
        for key, value in values.items():
            if not isinstance(value, Tensor) or value.dim() != param.dim() or not param.dim():
                continue
            if id(param) in expert:
                shards, name = expert[id(param)]
                value = local_part(shards, name, value, f"{key} of {name}")
                if not is_dtensor(value) and value.untyped_storage().nbytes() > value.nbytes:
                    value = value.clone()  # a view would keep the state of all experts
            values[key] = distribute_like(value, param)
        converted[index] = values
    inner.load_state_dict({**state, "state": converted})
    refuse_saving(inner)


def _accepted_shapes(current: Tensor) -> list[tuple[int, ...]]:
    """Return the shapes that load into ``current``, a value of the model's state dict; the full shape first."""
    if isinstance(current, ExpertShard):
        return [tuple(current.full_shape), current.shards.local_shape(current.name_in_module)]
    return [tuple(current.shape)]


def _check_form(form: str) -> None:
    if form not in ("full", "sharded", "local"):
        raise ConfigError(f'form must be "full", "sharded" or "local"; got {form!r}')


def _unwrapped(model: nn.Module) -> nn.Module:
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return model


def torch_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer, which accelerate's optimizer wraps."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _expert_parameters(model: nn.Module) -> dict[int, tuple[ExpertShards, str]]:
    return {
        id(getattr(module, name)): (gradients.shards, name)
        for _, module, gradients in expert_modules(_unwrapped(model))
        for name in gradients.shards.shardings
    }


def _is_first(model: nn.Module) -> bool:
    for _, _, gradients in expert_modules(model):
        return dist.get_rank(gradients.shards.group) == 0
    return not dist.is_initialized() or dist.get_rank() == 0


def _convert(value: Any, form: Form, rank0_only: bool, cpu: bool) -> Any:
    if isinstance(value, ExpertShard):
        if form == "full":
            return value.full(rank0_only=rank0_only, cpu=cpu)
        if form == "sharded":
            return value
        return value.local() if value.dtensor is None else value.dtensor
    if form == "full" and is_dtensor(value):
        value = value.full_tensor()
    return value.cpu() if cpu and form == "full" and isinstance(value, Tensor) else value


def _convert_expert_state(key: str, value: Any, param: Tensor, shards: ExpertShards, name: str, form: Form) -> Any:
    """Convert a value of the optimizer state of an expert parameter.

    It must have the parameter's shape, unless ``form`` is "local" or it is a scalar.
    """
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if shards.listed and form != "local":
        raise UnsupportedModel(
            f"the state of experts in a ModuleList ({name}) cannot be assembled from the parts of the ranks, as "
            'optimizers number parameters. Save one file per rank with form="local", or use stacked parameters'
        )
    shard = ExpertShard.of(value, shards, name, in_state_dict=True)
    local = shard if shard.dtensor is None else shard.dtensor
    if local.shape == param.shape:
        return shard
    if form != "local":
        raise UnsupportedModel(
            f"the optimizer's {key} of {name} has shape {tuple(local.shape)}, but the parameter {tuple(param.shape)}; "
            'such state cannot be assembled from the parts of the ranks. Save one file per rank with form="local"'
        )
    return plain(shard)


def _empty_state(states: Mapping[int, Any], param: Tensor) -> dict[str, Any]:
    """Return state for an expert parameter on a rank without experts, so that it takes part in the gather."""
    if param.numel():
        return {}
    for values in states.values():
        return {
            key: torch.zeros_like(param, dtype=value.dtype) if isinstance(value, Tensor) and value.dim() else value
            for key, value in values.items()
        }
    return {}
