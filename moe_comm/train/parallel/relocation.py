"""Moves experts between the ranks of a run: master weights and optimizer state, between two steps.

The weights that the model computes with follow from the masters, by ``DataParallel.publish``. So a moved expert costs
its masters and its state once, whatever the sharding of the optimizer is.

Where gradients are reduced during the passes of the model (``DataParallelOptions.overlap``), only the masters move
between the steps. The state, which the next optimizer step needs, moves in a thread:

    main thread    optimizer ─▶ move masters ─▶ publish ─▶ forward, backward of the next step ─▶ wait ─▶ optimizer
    thread                                   [        move state        ]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.relocation import MovedStack, RowMoves, moved_state
from moe_comm.topology import EXPERT_AXES, Placement
from moe_comm.train.parallel.bucket_schedule import Transfer
from moe_comm.train.parallel.parameters import OwnedParameter
from moe_comm.train.parallel.strategy import DataParallel

_STAGE = EXPERT_AXES[:-1]
States = Mapping[str, Mapping[str, Tensor]]
"""The optimizer state by parameter and name, as ``Optimizer.state_tensors`` returns it."""


def expert_size(layer: MoELayer, name: str, data_parallel: DataParallel, states: States) -> tuple[int, int]:
    """Return the size of an expert of ``layer``; all have the same, also on ranks without one.

    Returns:
        Elements that this rank computes with: a complete expert, or a slice of it. Bytes of masters and optimizer state
        that this rank owns of it, and sends if it moves.
    """
    weights = num_bytes = 0
    mesh = data_parallel.mesh
    for item in parameters_of(layer, name, data_parallel).values():
        weights += math.prod(item.sharding.local_shape(mesh.place, mesh.sizes)[1:])
        for tensor in (item.value, *moved_state(item.name, item.value, states.get(item.name, {}))):
            num_bytes += math.prod(tensor.shape[1:]) * tensor.element_size()
    return weights, num_bytes


@torch.no_grad()
def relocate_experts(
    layer: MoELayer, name: str, placement: Placement, data_parallel: DataParallel, states: States
) -> tuple[int, Transfer | None]:
    """Move the experts of ``layer`` to ``placement``. Collective over the pipeline stage, between two steps.

    The ranks have agreed on ``placement`` and checked it (``MoELayer.check_placement``), and that the optimizer state
    can move (``moved_state``). Call ``DataParallel.publish`` afterwards.

    Returns:
        Bytes that this rank sends to other ranks, and the transfer of the state if it is in flight.

    Raises:
        PeerDied, PeerTimeout: a rank failed. The layer of this rank keeps its old placement. The transfer in flight
            raises the same if a rank fails later.
    """
    data_parallel.wait_weights()  # a gather of published weights reads the masters
    mesh = data_parallel.mesh
    ranks, group = mesh.ranks(*_STAGE), mesh.group(*_STAGE)
    items = parameters_of(layer, name, data_parallel)
    shardings = layer.experts.shardings_over(placement)
    places = [mesh.config.place(rank) for rank in ranks]
    masters, moments = list[MovedStack](), list[MovedStack]()
    for key, item in items.items():
        moved, axes = replace(item, sharding=shardings[key]), item.replicated_axes
        old, new = ([parameter.boxes(mesh, rank) for rank in ranks] for parameter in (item, moved))

        def same_replica(source: int, destination: int, axes: tuple[str, ...] = axes) -> bool:
            return all(places[source][axis] == places[destination][axis] for axis in axes)

        masters.append(MovedStack([item.value.detach()], old, new, same_replica))
        if state := moved_state(item.name, item.value, states.get(item.name, {})):
            moments.append(MovedStack(state, old, new, same_replica))
    what, rank = f"relocating the experts of layer {name!r} to version {placement.version}", ranks.index(mesh.rank)
    together = group is None or not moments or not data_parallel.overlaps(group)
    moves = [RowMoves(stacks, rank) for stacks in ([[*masters, *moments]] if together else [masters, moments])]
    moves[0].run(group, what)
    transfer = None
    if group is not None and not together:
        transfer = data_parallel.in_background(
            group, lambda duplicate: moves[1].run(duplicate, f"{what}: optimizer state"), moments[0].tensors[0]
        )
    declare_placement(layer, name, placement, data_parallel)
    return sum(one.sent_bytes for one in moves), transfer


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
