"""State dicts of expert-parallel modules in their global form, as if one rank held every expert.

    rank 0: experts.w13 [4, 2F, D]  ┐  gather_state_dict      ┌ experts.w13 [7, 2F, D] on every rank
    rank 1: experts.w13 [3, 2F, D]  ┘  ◀─ load_full_state_dict └

``module.state_dict()`` itself stays local: each rank's own experts, under the same keys.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_comm.dispatch import make_dispatcher
from moe_comm.errors import ConfigError, InputError
from moe_comm.layers.experts import Experts
from moe_comm.layers.moe import MoELayer
from moe_comm.layers.router import Router


def gather_experts(name: str, local: Tensor, layer: MoELayer) -> Tensor:
    """[E, ...] of all ranks from each rank's part of the experts' ``name``. Collective over the layer's group."""
    group, dispatcher = layer.dispatcher.group, layer.dispatcher
    local = local.detach()
    if group is None or dispatcher.world == 1:
        return local.clone()
    sharding, etp = layer.shardings()[f"experts.{name}"], layer.sizes["etp"]
    full = local.new_empty(sharding.shape)
    for rank in range(dispatcher.world):
        place = {"ep": rank // etp, "etp": rank % etp}
        boxes = sharding.boxes(place, layer.sizes)
        # Whole experts of one rank stand next to each other in the result, and arrive in place.
        in_place = len(boxes) == 1 and full[boxes[0].whole].is_contiguous()
        shape = sharding.local_shape(place, layer.sizes)
        part = full[boxes[0].whole] if in_place else full.new_empty(shape)
        if not part.numel():
            continue
        if rank == dispatcher.rank:
            part.copy_(local)
        dist.broadcast(part, group=group, group_src=rank)
        if not in_place:
            for box in boxes:
                full[box.whole] = part[box.local]
    return full


def own_experts(name: str, full: Tensor, layer: MoELayer) -> Tensor:
    """This rank's part of the experts' ``name``, [E, ...] of all ranks; a view where that is whole experts."""
    if layer.sizes["etp"] == 1:
        return full[layer.local_experts.start : layer.local_experts.stop]
    return layer.shardings()[f"experts.{name}"].take(full, layer.place, layer.sizes)


def state_key(*path: str) -> str:
    """The key in a state dict of what stands at ``path`` in ``named_modules``; checkpointing wrappers leave it out."""
    names = ".".join(path).split(".")
    return ".".join(name for name in names if name and name != "_checkpoint_wrapped_module")


def _owners(module: nn.Module) -> dict[str, MoELayer]:
    """The layer of each expert weight, by its key in the module's state dict."""
    owners = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, MoELayer):
            for name in child.experts.state_dict():
                owners[state_key(prefix, "experts", name)] = child
    return owners


def gather_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """``module.state_dict()`` with every expert weight as [E, ...] over all experts, on every rank. Collective.

    Tensors are copies; they load into the same module built for any number of ranks by ``load_full_state_dict``.
    """
    owners = _owners(module)
    return {
        key: gather_experts(key.rpartition(".")[2], value, owners[key]) if key in owners else value.detach().clone()
        for key, value in module.state_dict().items()
    }


def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
    """Load what ``gather_state_dict`` returned: each rank takes its own experts. Not collective.

    Raises:
        InputError: an expert weight is not for this layer's number of experts.
        RuntimeError: keys are missing or unexpected, as in ``load_state_dict``.
    """
    owners = _owners(module)
    local: dict[str, Tensor] = {}
    for key, value in state.items():
        layer = owners.get(key)
        if layer is not None:
            if value.shape[0] != layer.num_experts:
                raise InputError(
                    f"{key} holds {value.shape[0]} experts, but layer {layer.label!r} has "
                    f"{layer.num_experts}; was it saved by gather_state_dict?"
                )
            value = own_experts(key.rpartition(".")[2], value, layer)
        local[key] = value
    module.load_state_dict(local, strict=strict)


def single_rank_copy(layer: MoELayer, dtype: torch.dtype | None = None) -> MoELayer:
    """A copy of ``layer`` in which this rank holds every expert. Collective over the layer's group.

    Args:
        dtype: of the copy's weights, if another.

    Raises:
        ConfigError: the layer is not made of this library's router and experts.
    """
    router, experts = layer.router, layer.experts
    if not isinstance(router, Router) or not isinstance(experts, Experts):
        raise ConfigError(f"cannot copy a layer made of {type(router).__name__} and {type(experts).__name__}")
    state = gather_state_dict(layer)
    like = experts.w13
    full = Experts(
        layer.num_experts,
        experts.hidden,
        experts.ffn,
        experts.activation,
        bias=experts.b13 is not None,
        transposed=experts.transposed,
        recompute=experts.recompute,
        dtype=like.dtype,
        device=like.device,
    )
    alone = Router(router.hidden, router.config, None, dtype=router.weight.dtype, device=router.weight.device)
    copied = MoELayer(
        alone,
        full,
        make_dispatcher(layer.num_experts, options=layer.dispatcher.options),
        copy.deepcopy(layer.shared),
        capacity=layer.capacity,
        zero_experts=layer.zero_experts,
        label=layer.label,
    )
    copied.load_state_dict(state)
    copied.train(layer.training)
    return copied if dtype is None else copied.to(dtype)
