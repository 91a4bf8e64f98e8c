"""Moves experts between the ranks of a run: master weights and optimizer state, between two steps.

The weights that the model computes with follow from the masters, by ``DataParallel.publish``. So a moved expert costs
its masters and its state once, whatever the sharding of the optimizer is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from moe_comm.comm.group_setup import compare
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.relocation import MovedStack, stage
from moe_comm.layers.parallel.collectives import channel_of
from moe_comm.topology import EXPERT_AXES, Placement
from moe_comm.train.parallel.parameters import OwnedParameter
from moe_comm.train.parallel.strategy import DataParallel

_STAGE = EXPERT_AXES[:-1]


@torch.no_grad()
def relocate_experts(
    layer: MoELayer,
    name: str,
    placement: Placement,
    data_parallel: DataParallel,
    state_tensors: Callable[[], Mapping[str, Mapping[str, Tensor]]],
) -> int:
    """Move the experts of ``layer`` to ``placement``. Collective over the pipeline stage, between two steps.

    Call ``DataParallel.publish`` afterwards.

    Args:
        name: name of the layer in the model.
        state_tensors: returns the optimizer state by parameter and name, as ``Optimizer.state_tensors``.

    Returns:
        Bytes that this rank sent to other ranks.

    Raises:
        ConfigError: the placement has another number of experts on a rank.
        RankMismatch: ranks pass different placements; on every rank.
        PeerDied, PeerTimeout: a rank failed. The layer of this rank keeps its old placement.
    """
    layer.check_placement(placement)
    mesh = data_parallel.mesh
    ranks, group = mesh.ranks(*_STAGE), mesh.group(*_STAGE)
    if group is not None:
        same = {"layer": name, "placement of experts": placement.digest, "present placement": layer.placement.digest}
        compare(channel_of(group), "a relocation of experts", same)
    items = parameters_of(layer, name, data_parallel)
    states = state_tensors()
    shardings = layer.experts.shardings_over(placement)
    places = [mesh.config.place(rank) for rank in ranks]
    stacks = []
    for key, item in items.items():
        moved, axes = replace(item, sharding=shardings[key]), item.replicated_axes
        old, new = ([one.boxes(mesh, rank) for rank in ranks] for one in (item, moved))

        def same_replica(source: int, destination: int, axes: tuple[str, ...] = axes) -> bool:
            return all(places[source][axis] == places[destination][axis] for axis in axes)

        tensors: list[Tensor] = [item.value.detach(), *states.get(item.name, {}).values()]
        stacks.append(MovedStack(tensors, old, new, same_replica))
    what = f"relocating the experts of layer {name!r} to version {placement.version}"
    staged = stage(stacks, group, ranks.index(mesh.rank), what)
    staged.apply()
    declare_placement(layer, name, placement, data_parallel)
    return staged.sent_bytes


def declare_placement(layer: MoELayer, name: str, placement: Placement, data_parallel: DataParallel) -> None:
    """Declare that weights and optimizer state of ``layer`` are those of ``placement``. Moves nothing."""
    layer.set_placement(placement)
    shardings = layer.experts.shardings_over(placement)
    for key, item in parameters_of(layer, name, data_parallel).items():
        item.sharding = shardings[key]


def parameters_of(layer: MoELayer, name: str, data_parallel: DataParallel) -> dict[str, OwnedParameter]:
    """Return the parameters of the experts by their name in the module; those that are not trained as they are."""
    owned = {item.name: item for item in data_parallel.owned()}
    shardings = layer.experts.shardings_over(layer.placement)
    return {
        key: owned.get(f"{name}.experts.{key}") or OwnedParameter(f"{name}.experts.{key}", param, shardings[key])
        for key, param in layer.experts.named_parameters()
    }
