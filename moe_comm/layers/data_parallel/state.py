"""State dicts of models and optimizers whose experts differ between ranks: whole, sharded, or of this rank.

form        value of an expert parameter               for
"full"      [E, ...], all experts                      torch.save and safetensors; any number of ranks loads it
"sharded"   this rank's part, as an ``ExpertShard``    torch.distributed.checkpoint
"local"     this rank's part, as a plain tensor        one file a rank; the same number of ranks loads it
            (under FSDP2 a ``DTensor``, as all others)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_comm.errors import ConfigError, InputError, UnsupportedModel
from moe_comm.layers.data_parallel.attach import expert_modules, local_part, tensor_parallel
from moe_comm.layers.data_parallel.expert_shard import ExpertShard, ExpertShards, is_dtensor, plain, spread_like
from moe_comm.layers.data_parallel.optimizers import params_of, refuse_saving
from moe_comm.layers.parallel.names import state_key

Form = Literal["full", "sharded", "local"]


def state_dict(model: nn.Module, *, form: Form = "full", rank0_only: bool = False, cpu: bool = False) -> dict[str, Any]:
    """The state dict of ``model``, built or swapped, wrapped by DDP or FSDP2 or not. "full" is collective.

    Args:
        form: see the table in this module; "full": every value is that of one process, bit for bit, under the names
            of the unwrapped model.
        rank0_only: with "full", rank 0 of each expert-parallel group receives the values and the others an empty dict.
        cpu: collect the full tensors in host memory.

    Returns:
        Tensors that are not spread over ranks share their storage with the model.

    Raises:
        UnsupportedModel: "full", and other parameters than those of experts are cut over ranks.
    """
    _check(form)
    if form == "full" and (cut := next(tensor_parallel(model), None)):
        raise UnsupportedModel(
            f"{cut[0]} is cut over tensor-parallel ranks. Complete the state dict of a swapped model by gather_linears "
            "and gather_attention of moe_comm.integrations.hugging_face; a model of moe_comm train is exported by "
            "moe-comm export"
        )
    return experts_gathered(model, form, rank0_only, cpu)


def experts_gathered(model: nn.Module, form: Form, rank0_only: bool = False, cpu: bool = False) -> dict[str, Any]:
    """``state_dict`` for models in which other parameters are cut, too; those stay as they are."""
    result = {}
    for key, value in _unwrapped(model).state_dict().items():
        got = _in_form(value, form, rank0_only, cpu)
        if got is not None:
            result[state_key(key)] = got
    return result if form != "full" or not rank0_only or _is_first(model) else {}


def load_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load what ``state_dict`` returned, in any form; of full tensors each rank takes its part. Not collective.

    Returns:
        Missing and unexpected keys, as ``nn.Module.load_state_dict``.

    Raises:
        InputError: a shape is neither that of the whole parameter nor, of experts, that of this rank's part.
        RuntimeError: keys are missing or unexpected, with ``strict``.
    """
    model = _unwrapped(model)
    own = {state_key(key): (key, value) for key, value in model.state_dict().items()}
    converted = {}
    for key, value in state.items():
        name, held = own.get(key, (key, value))
        if isinstance(value, Tensor) and isinstance(held, Tensor) and not isinstance(value, ExpertShard):
            shapes = _shapes(held)
            if tuple(value.shape) not in shapes:
                raise InputError(f"{key} has shape {tuple(value.shape)}; this model expects {shapes[0]}")
        converted[name] = spread_like(value, held)
    return model.load_state_dict(converted, strict=strict)


def optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, *, form: Form = "full", rank0_only: bool = False, cpu: bool = False
) -> dict[str, Any]:
    """``optimizer.state_dict()`` with the state of experts in ``form``. "full" is collective.

    Args:
        model: its parameters are those of ``optimizer``.
        form, rank0_only, cpu: as for ``state_dict``. The full form loads into an optimizer of the unwrapped model, too.

    Raises:
        UnsupportedModel: "full" and "sharded", and the state of experts has other shapes than they, as Adafactor's.
    """
    _check(form)
    inner = _inner(optimizer)
    result = inner.state_dict()
    expert = _experts(model)
    state = {}
    for index, param in enumerate(params_of(inner)):
        values = result["state"].get(index, {})
        if id(param) in expert:
            values = {
                key: _expert_state(key, value, param, *expert[id(param)], form)
                for key, value in (values or _empty_state(result["state"], param)).items()
            }
        if values:
            state[index] = {key: _in_form(value, form, rank0_only, cpu) for key, value in values.items()}
    if form == "full" and rank0_only and not _is_first(model):
        return {}
    return {**result, "state": state}


def load_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what ``optimizer_state_dict`` returned, in any form, for any number of ranks. Not collective.

    Raises:
        InputError: a tensor's shape is neither that of all experts nor that of this rank's part.
    """
    inner = _inner(optimizer)
    expert = _experts(model)
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
            values[key] = spread_like(value, param)
        converted[index] = values
    inner.load_state_dict({**state, "state": converted})
    refuse_saving(inner)


def _shapes(held: Tensor) -> list[tuple[int, ...]]:
    """Shapes that load into ``held``, a value of the model's state dict; the whole one first."""
    if isinstance(held, ExpertShard):
        return [tuple(held.full_shape), held.shards.local_shape(held.name_in_module)]
    return [tuple(held.shape)]


def _check(form: str) -> None:
    if form not in ("full", "sharded", "local"):
        raise ConfigError(f'form must be "full", "sharded" or "local"; got {form!r}')


def _unwrapped(model: nn.Module) -> nn.Module:
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return model


def _inner(optimizer: Any) -> Optimizer:
    """The torch optimizer; accelerate's wraps one, and is an ``Optimizer`` by inheritance only."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _experts(model: nn.Module) -> dict[int, tuple[ExpertShards, str]]:
    return {
        id(getattr(module, name)): (gradients.shards, name)
        for _, module, gradients in expert_modules(_unwrapped(model))
        for name in gradients.shards.shardings
    }


def _is_first(model: nn.Module) -> bool:
    for _, _, gradients in expert_modules(model):
        return dist.get_rank(gradients.shards.group) == 0
    return not dist.is_initialized() or dist.get_rank() == 0


def _in_form(value: Any, form: Form, rank0_only: bool, cpu: bool) -> Any:
    if isinstance(value, ExpertShard):
        if form == "full":
            return value.full(rank0_only=rank0_only, cpu=cpu)
        if form == "sharded":
            return value
        return value.local() if value.dtensor is None else value.dtensor
    if form == "full" and is_dtensor(value):
        value = value.full_tensor()
    return value.cpu() if cpu and form == "full" and isinstance(value, Tensor) else value


def _expert_state(key: str, value: Any, param: Tensor, shards: ExpertShards, name: str, form: Form) -> Any:
    """A value of an optimizer's state for an expert parameter.

    Raises:
        UnsupportedModel: it has another shape than the parameter, so which ranks hold which of its elements is not
            known.
    """
    if not isinstance(value, Tensor) or not value.dim():
        return value
    shard = ExpertShard.of(value, shards, name, in_state_dict=True)
    held = shard if shard.dtensor is None else shard.dtensor
    if held.shape == param.shape:
        return shard
    if form != "local":
        raise UnsupportedModel(
            f"the optimizer's {key} of {name} has shape {tuple(held.shape)}, the parameter {tuple(param.shape)}: such "
            'state cannot be put together from the parts of ranks. Save one file a rank, with form="local"'
        )
    return plain(shard)


def _empty_state(states: Mapping[int, Any], param: Tensor) -> dict[str, Any]:
    """State of an expert parameter that has none because this rank holds no expert; others send theirs."""
    if param.numel():
        return {}
    for values in states.values():
        return {
            key: torch.zeros_like(param, dtype=value.dtype) if isinstance(value, Tensor) and value.dim() else value
            for key, value in values.items()
        }
    return {}
