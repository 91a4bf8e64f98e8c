"""Checks before experts are relocated: of the new placement, and that all ranks pass the same one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_comm.comm.agree import compare
from moe_comm.errors import ConfigError
from moe_comm.layers.data_parallel.expert_shard import plain
from moe_comm.layers.data_parallel.gradients import managed_by_fsdp
from moe_comm.layers.moe.relocation import MovedStack, moved_state
from moe_comm.layers.parallel.collectives import channel_of
from moe_comm.topology import Placement

if TYPE_CHECKING:
    from moe_comm.layers.moe.layer import MoELayer


def check_relocation(old: Placement, new: Placement) -> None:
    """Raise ConfigError unless ``new`` keeps the number of experts and slots of each rank."""
    new.fitting(old.num_experts, old.world)
    if new.homes_per_rank != old.homes_per_rank:
        raise ConfigError(
            f"a relocation keeps the number of experts of each rank, {old.homes_per_rank}; the new placement has "
            f"{new.homes_per_rank}"
        )
    if new.slots_per_rank != old.slots_per_rank:
        raise ConfigError(
            f"a relocation keeps the slots of each rank, {old.slots_per_rank} with those for copies; the new placement "
            f"has {new.slots_per_rank}. Set Placement.slots of both to the copies that a rank can hold"
        )


def stacks_to_move(layer: MoELayer, placement: Placement, state: Mapping[Any, Mapping[str, Any]]) -> list[MovedStack]:
    """Return the expert weights of ``layer``, each with the tensors of ``state`` that move with it. Collective.

    Raises:
        ConfigError, RankMismatch: ``placement`` is invalid, or it or the tensors differ between ranks; on all ranks.
    """
    fault: ConfigError | None = None
    moved: dict[str, list[Tensor]] = {}
    try:
        check_relocation(layer.placement, placement)
        for name, param in layer.experts.named_parameters():
            moved[name] = [param.data, *map(plain, moved_state(name, param, state.get(param, {})))]
        if any(managed_by_fsdp(param) for param in layer.experts.parameters()):
            raise ConfigError(f"FSDP shards the experts of layer {layer.label!r}, which cannot be relocated")
    except ConfigError as error:
        fault = error
    dispatcher = layer.dispatcher
    if dispatcher.group is not None and dispatcher.world > 1:
        same = {
            "new placement of experts": placement.digest,
            "present placement": layer.placement.digest,
            "layer": layer.label,
            "weights and optimizer state": str([(name, [t.dtype for t in parts]) for name, parts in moved.items()]),
        }
        compare(channel_of(dispatcher.group), "a relocation of experts", same, fault=fault)
    elif fault is not None:
        raise fault
    old, new = (layer.experts.shardings_over(one) for one in (layer.placement, placement))
    etp = layer.sizes["etp"]
    places = [{"ep": rank // etp, "etp": rank % etp} for rank in range(dispatcher.world)]
    return [MovedStack.of(tensors, old[name], new[name], places) for name, tensors in moved.items()]
