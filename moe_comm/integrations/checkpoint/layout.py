"""The tensors of a model's checkpoint, where their elements are in the model, and which of them a rank holds.

    checkpoint on the hub                          unswapped model             rank 1 of 2
    experts.0.w1.weight ... experts.7.w3.weight ─▶ gate_up_proj [8, 2F, D]  ─▶ boxes [4:8] ─▶ gate_up_proj [4, 2F, D]
            HubSlice: the names and slices               Sharding.boxes: the part of a rank

Transformers describes the layouts on the hub by operators that convert tensors between checkpoint and model. Here the
operators of saving run on tensors without memory: their results are views, whose strides show where the elements of
each checkpoint tensor are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_comm.comm.group_setup import group_rank, group_size
from moe_comm.errors import UnsupportedModel
from moe_comm.integrations.checkpoint.slices import HubSlice
from moe_comm.layers.data_parallel.attach import expert_modules, gradients_of
from moe_comm.layers.data_parallel.expert_shard import ExpertShard, is_dtensor
from moe_comm.layers.parallel.module import state_key
from moe_comm.topology import Box, Sharding, ShardSlice


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A parameter or persistent buffer of a model, and the part of it that each rank holds.

    Attributes:
        names: of the unswapped model; several if modules share it. The first one is used in ``HubSlice.parameter``.
        tensor: the part of this rank; a DTensor if FSDP2 shards it over ranks with equal parts.
        sharding: of the full tensor.
        place: coordinates of this rank on the axes of the sharding.
        sizes: sizes of these axes.
    """

    names: tuple[str, ...]
    tensor: Tensor
    sharding: Sharding
    place: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def local(self) -> Tensor:
        """The elements that this rank holds, in the memory of ``tensor``."""
        tensor = self.tensor.detach()
        return tensor.to_local() if is_dtensor(tensor) else tensor

    def boxes(self) -> list[Box]:
        """Return where the elements of ``local`` are in it and in the full tensor.

        Raises:
            UnsupportedModel: the tensor is a DTensor that FSDP2 has not made.
        """
        share = _share(self.tensor, self.names[0]) if is_dtensor(self.tensor) else None
        return self.sharding.boxes(self.place, self.sizes, share)


def _share(tensor: Any, name: str) -> ShardSlice | None:
    """Return the slice that this rank holds of a DTensor, which FSDP2 may have sharded along one dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    split = [d for d, size in enumerate(shape) if size < tensor.shape[d]]
    if len(split) > 1 or any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedModel(f"{name} is a DTensor with the placements {tensor.placements}")
    return ShardSlice(d := split[0], range(offset[d], offset[d] + shape[d])) if split else None


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint.

    Attributes:
        shape: of the full tensor.
        dtype: of the parameters it consists of.
        slices: where its elements are in the full parameters.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: tuple[HubSlice, ...]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that DDP or ``torch.compile`` wraps. What FSDP2 has gathered in it is sharded again."""
    while hasattr(model, "_orig_mod") or isinstance(model, DistributedDataParallel):
        inner: Any = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
        model = inner
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in () if fsdp is None else model.modules():
        if isinstance(module, fsdp.FSDPModule):  # else its parameters may be copies in another dtype
            module.reshard()
    return model


def held_tensors(model: nn.Module) -> dict[str, HeldTensor]:
    """Return the parameters and persistent buffers of ``model`` by their first names. Not collective.

    Names are those of the unswapped model, without the names of wrappers, except for the experts of users' blocks,
    which are stacked in a swapped model.

    Raises:
        UnsupportedModel: the model is on "meta", and has experts in a list that ``mark_experts`` has distributed.
    """
    parts, held = _parts(model), _listed_experts(model)
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        members = (*module._parameters.items(), *module._buffers.items())
        for key, tensor in members:
            if tensor is None or key in module._non_persistent_buffers_set or _is_listed(module, key):
                continue
            name = state_key(prefix, key)
            if name not in names.setdefault(id(tensor), []):
                names[id(tensor)].append(name)
            tensors[id(tensor)] = tensor
    for key, found in names.items():
        tensor, part = tensors[key], parts.get(key)
        if part is None:
            held[found[0]] = HeldTensor(tuple(found), tensor, Sharding(tuple(tensor.shape)))
        else:
            held[found[0]] = HeldTensor(tuple(found), tensor, *part)
    return held


def _is_listed(module: nn.Module, key: str) -> bool:
    """Return whether a parameter is one of an expert in a list, which has another name in the unswapped model."""
    gradients = gradients_of(module)
    return gradients is not None and gradients.shards.listed and key in gradients.shards.shardings


def _listed_experts(model: nn.Module) -> dict[str, HeldTensor]:
    """Return the parameters of all experts in lists. State dicts have them, empty for those of other ranks."""
    held: dict[str, HeldTensor] = {}
    if not any(gradients.shards.listed for _, _, gradients in expert_modules(model)):
        return held
    for key, value in model.state_dict().items():
        if isinstance(value, ExpertShard) and value.shards.listed:
            shards, name = value.shards, state_key(key)
            tensor = value.local() if value.dtensor is None else value.dtensor
            if tensor.is_meta:
                raise UnsupportedModel(f'{name} is in a list of experts and on "meta"; build it in memory')
            held[name] = HeldTensor((name,), tensor, shards.shardings[value.name_in_module], shards.place, shards.sizes)
    return held


_Part = tuple[Sharding, Mapping[str, int], Mapping[str, int]]


def _parts(model: nn.Module) -> dict[int, _Part]:
    """Return the sharding of the parameters that ranks hold parts of, by ``id``."""
    parts: dict[int, _Part] = {}
    for _, module, gradients in expert_modules(model):
        shards = gradients.shards
        for key, sharding in shards.shardings.items():
            parts[id(getattr(module, key))] = sharding, shards.place, shards.sizes
    of_attention = {  # norms over all heads do not refer to the group
        child: module.tp_group
        for module in model.modules()
        if hasattr(module, "tp_group")
        for child in module.modules()
    }
    for module in model.modules():
        describe = getattr(module, "shardings", None)
        group: Any = getattr(module, "group", None) or of_attention.get(module)
        if not callable(describe) or group is None or group_size(group) == 1:
            continue
        place, sizes = {"tp": group_rank(group)}, {"tp": group_size(group)}
        for key, sharding in describe().items():
            if sharding.splits and not sharding.expert:
                parts[id(module.get_parameter(key))] = sharding, place, sizes
    return parts


def checkpoint_layout(
    model: nn.Module, held: Mapping[str, HeldTensor] | None = None, *, aliases: bool = False, hub: bool = True
) -> dict[str, CheckpointTensor]:
    """Return the tensors of a checkpoint of the unswapped model by name. Not collective.

    They have the names and shapes that ``save_pretrained`` of the unswapped transformers model writes, or those of the
    state dict of another unswapped model. Each element of a parameter is in exactly one of them.

    Args:
        held: result of ``held_tensors(model)``, if it is at hand.
        aliases: include the tensors of all names of shared parameters. Default: those of their first names.
        hub: if the model is of transformers, return the layout on the hub. Else that of its state dict.

    Raises:
        UnsupportedModel: the layout of the model family on the hub rearranges elements in another way than slices and
            transposition.
    """
    held = held_tensors(model) if held is None else held
    shapes = {
        name: (tensor.sharding.shape, tensor.tensor.dtype, names[0])
        for tensor in held.values()
        for names in [tensor.names]
        for name in (names if aliases else names[:1])
    }
    layout: dict[str, CheckpointTensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=not aliases):
        describe: Callable[[str], Iterator[tuple[str, tuple[int, ...], Sequence[HubSlice]]]] | None
        describe = getattr(module, "checkpoint_slices", None)  # of blocks with their own names
        if describe is not None:
            own = f"{state_key(prefix)}.".lstrip(".")
            for name, shape, slices in describe(own):
                dtype = getattr(module, slices[0].parameter.rpartition(".")[2]).dtype
                first = tuple(replace(one, parameter=shapes[one.parameter][2]) for one in slices)
                layout[name] = CheckpointTensor(name, shape, dtype, first)
            for key in module._parameters:
                del shapes[own + key]
    if hub and isinstance(model, pretrained_class()):
        return layout | _hub_layout(model, shapes)
    for name, (shape, dtype, parameter) in shapes.items():
        layout[name] = CheckpointTensor(name, shape, dtype, (HubSlice(name, parameter=parameter),))
    return layout


def pretrained_class() -> Any:
    """Return ``PreTrainedModel``, or () if transformers is not loaded, so that no model is one."""
    module = sys.modules.get("transformers.modeling_utils")
    return () if module is None else module.PreTrainedModel


def _hub_layout(
    model: Any, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype, str]]
) -> dict[str, CheckpointTensor]:
    """Return the layout that ``save_pretrained`` writes."""
    tracer = _Tracer()
    state = {name: tracer.parameter(name, shape) for name, (shape, _, _) in shapes.items()}
    layout: dict[str, CheckpointTensor] = {}
    left = {name: prod(shape) for name, (shape, _, _) in shapes.items()}
    for name, value in reverted(model, state).items():
        with torch._C.DisableTorchFunctionSubclass():  # tens of thousands of tensors
            slices, shape = tracer.slices(name, value), tuple(value.shape)
        for piece in slices:
            left[piece.parameter] -= prod(piece.extents(shapes[piece.parameter][0]))
        dtype = shapes[slices[0].parameter][1]
        renamed = tuple(replace(piece, parameter=shapes[piece.parameter][2]) for piece in slices)
        layout[name] = CheckpointTensor(name, shape, dtype, renamed)
    if wrong := [name for name, count in left.items() if count]:
        raise UnsupportedModel(f"the layout of {type(model).__name__} on the hub does not contain all of {wrong[0]}")
    return layout


def reverted(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of a transformers model in the layout of its family on the hub.

    Raises:
        UnsupportedModel: an operator of transformers fails on it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    before = vars(model).pop("_weight_conversions", None)
    # As for a model that was not loaded: a checkpoint in another layout may have been.
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    try:
        model._weight_conversions = [one for one in conversions if not isinstance(one, PrefixChange)]
        return dict(revert_weight_conversion(model, state))
    except UnsupportedModel:
        raise
    except Exception as error:  # of an operator that needs values, or another model
        raise UnsupportedModel(
            f"the layout of {type(model).__name__} on the hub is not supported: {type(error).__name__}: {error}"
        ) from error
    finally:
        del model._weight_conversions
        if before is not None:
            model._weight_conversions = before


class _Traced(Tensor):
    """A tensor without memory on which operators that move elements return views, also where they would copy."""

    tracer: _Tracer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        if func in (torch.cat, torch.concat, torch.stack):
            tensors, dim = args[0], (kwargs or {}).get("dim", args[1] if len(args) > 1 else 0)
            tensors = [one.unsqueeze(dim) for one in tensors] if func is torch.stack else list(tensors)
            return tensors[0] if len(tensors) == 1 else tensors[0].tracer.join(tensors, dim)
        results = super().__torch_function__(func, types, args, kwargs or {})
        tracer = next(one.tracer for one in args if isinstance(one, _Traced)) if args else None
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, _Traced) and tracer is not None:
                result.tracer = tracer
        return results


class _Tracer:
    """Parameters as ``_Traced``, and the slices of them that other such tensors are."""

    def __init__(self) -> None:
        self._parameters: dict[int, tuple[str, Tensor]] = {}
        self._joined: dict[int, tuple[Tensor, list[Tensor], int]] = {}

    def parameter(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._new(shape)
        self._parameters[_storage(tensor)] = name, tensor
        return tensor

    def join(self, tensors: list[Tensor], dim: int) -> Tensor:
        """Return a tensor for the concatenation of ``tensors``."""
        dim %= tensors[0].dim()
        shape = list(tensors[0].shape)
        shape[dim] = sum(one.shape[dim] for one in tensors)
        joined = self._new(tuple(shape))
        self._joined[_storage(joined)] = joined, tensors, dim
        return joined

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, device="meta", dtype=torch.uint8).as_subclass(_Traced)
        tensor.tracer = self
        return tensor

    def slices(self, name: str, tensor: Tensor) -> list[HubSlice]:
        """Return the slices of parameters that the checkpoint tensor ``name`` consists of.

        Raises:
            UnsupportedModel: its elements are in no slices.
        """
        joined, parts, dim = self._joined.get(_storage(tensor), (None, [tensor], 0))
        if joined is not None and (joined.shape, joined.stride()) != (tensor.shape, tensor.stride()):
            raise _unsupported(name)
        slices, start = [], 0
        for part in parts:
            region: tuple[slice, ...] = ()
            if joined is not None:
                region = (*[slice(None)] * dim, slice(start, start + part.shape[dim]))
                start += part.shape[dim]
            slices.append(self._slice(name, part, region))
        return slices

    def _slice(self, name: str, view: Tensor, region: tuple[slice, ...]) -> HubSlice:
        """Return the slice of a parameter that a view of it is."""
        parameter, full = self._parameters.get(_storage(view), ("", view))
        if not parameter:
            raise _unsupported(name)
        offset, starts = int(view.storage_offset()), []
        for stride in full.stride():
            start, offset = divmod(offset, stride) if stride else (0, offset)
            starts.append(start)
        order: list[int] = []
        for size, stride in zip(view.shape, view.stride(), strict=True):
            fits = (
                d
                for d in range(full.dim())
                if d not in order and full.stride(d) == stride and starts[d] + size <= full.shape[d]
            )
            if (d := next(fits, None)) is None:
                raise _unsupported(name)
            order.append(d)
        place = tuple(
            slice(start, start + view.shape[order.index(d)]) if d in order else start for d, start in enumerate(starts)
        )
        return HubSlice(name, place, parameter, region, tuple(order))


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _unsupported(name: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the elements of {name} are not slices of parameters in the order of the file; checkpoints of this model "
        "family on the hub are not supported. Save the model in the layout of its state dict"
    )
