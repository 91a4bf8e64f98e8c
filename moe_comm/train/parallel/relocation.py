"""Moves experts between the ranks of a run: master weights and optimizer state, between two steps.

The weights that the model computes with follow from the masters, by ``DataParallel.publish``. So a moved expert costs
its masters and its state once, whatever the sharding of the optimizer is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.relocation import MovedStack, move_rows, moved_state
from moe_comm.layers.parallel.collectives import channel_of
from moe_comm.topology import EXPERT_AXES, Placement
from moe_comm.train.parallel.parameters import OwnedParameter
from moe_comm.train.parallel.strategy import DataParallel

_STAGE = EXPERT_AXES[:-1]


StateTensors = Callable[[], Mapping[str, Mapping[str, Tensor]]]
"""Returns the optimizer state by parameter and name, as ``Optimizer.state_tensors``."""


@dataclass(frozen=True)
class ExpertSize:
    """One expert on a rank.

    Attributes:
        weights: elements that the rank computes with: a complete expert, or a slice of it.
        num_bytes: bytes of masters and optimizer state that the rank owns of it, and sends if it moves.
    """

    weights: int
    num_bytes: int

    @classmethod
    def of(cls, layer: MoELayer, name: str, data_parallel: DataParallel, state_tensors: StateTensors) -> ExpertSize:
        """Return the size of an expert of ``layer``. All have the same, also on ranks without one."""
        weights = num_bytes = 0
        mesh, states = data_parallel.mesh, state_tensors()
        for item in parameters_of(layer, name, data_parallel).values():
            weights += math.prod(item.sharding.local_shape(mesh.place, mesh.sizes)[1:])
            for tensor in (item.value, *moved_state(item.name, item.value, states.get(item.name, {}))):
                num_bytes += math.prod(tensor.shape[1:]) * tensor.element_size()
        return cls(weights, num_bytes)


def check_relocation(
    layer: MoELayer, name: str, placement: Placement, data_parallel: DataParallel, state_tensors: StateTensors
) -> None:
    """Raise ConfigError if ``relocate_experts`` could not move the experts of ``layer`` to ``placement``.

    Args:
        name: name of the layer in the model.
    """
    layer.check_placement(placement)
    states = state_tensors()
    for item in parameters_of(layer, name, data_parallel).values():
        moved_state(item.name, item.value, states.get(item.name, {}))


@torch.no_grad()
def relocate_experts(
    layer: MoELayer, name: str, placement: Placement, data_parallel: DataParallel, state_tensors: StateTensors
) -> int:
    """Move the experts of ``layer`` to ``placement``. Collective over the pipeline stage, between two steps.

    The ranks have agreed on ``placement`` and checked it (``check_relocation``). Call ``DataParallel.publish``
    afterwards.

    Returns:
        Bytes that this rank sent to other ranks.

    Raises:
        PeerDied, PeerTimeout: a rank failed. The layer of this rank keeps its old placement.
    """
    data_parallel.wait_weights()  # a gather of published weights reads the masters
    mesh = data_parallel.mesh
    ranks, group = mesh.ranks(*_STAGE), mesh.group(*_STAGE)
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

        tensors = [item.value.detach(), *moved_state(item.name, item.value, states.get(item.name, {}))]
        stacks.append(MovedStack(tensors, old, new, same_replica))
    what = f"relocating the experts of layer {name!r} to version {placement.version}"
    sent_bytes = move_rows(stacks, group, ranks.index(mesh.rank), what)
    declare_placement(layer, name, placement, data_parallel)
    return sent_bytes


def reserve_memory(layer: MoELayer, name: str, data_parallel: DataParallel, state_tensors: StateTensors) -> None:
    """Reserve shared memory for a switch in which half of the experts of ``layer`` leave this rank.

    Collective, as ``channel_of``. Otherwise the first switch waits for new pages.
    """
    group = data_parallel.mesh.group(*_STAGE)
    if group is not None:
        size = ExpertSize.of(layer, name, data_parallel, state_tensors)
        channel_of(group).reserve(max(layer.placement.homes_per_rank) // 2 * size.num_bytes)


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
