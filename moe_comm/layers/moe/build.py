"""The parts of an ``MoELayer``: builds them from its configuration, and checks that they match."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from moe_comm.dispatch import Dispatcher, DispatchOptions, Traffic
from moe_comm.dispatch.selection.factory import DeferredDispatcher, new_dispatcher, refuse_dispatcher
from moe_comm.errors import ConfigError
from moe_comm.layers.moe.config import MoEConfig, MoEGroups
from moe_comm.layers.moe.experts import Experts, ExpertSlice
from moe_comm.layers.moe.router import Router
from moe_comm.layers.parallel.collectives import gather_values, group_rank, group_size
from moe_comm.topology import ExpertPlacement, Placement

if TYPE_CHECKING:
    from moe_comm.layers.moe.shared import SharedExpert
    from moe_comm.overlap.options import Overlap


def build_dispatcher(
    config: MoEConfig,
    groups: MoEGroups,
    backend: str,
    options: DispatchOptions | None,
    overlap: Overlap | None,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> Dispatcher:
    """Return the dispatcher of a layer. Collective over ``groups.experts``, except on "meta"."""
    group, etp = groups.experts, groups.etp
    ranks = group_size(group)
    if etp < 1 or ranks % etp:
        raise ConfigError(f"etp = {etp} must divide the {ranks} ranks that share one set of experts")
    if config.ffn % etp:
        raise ConfigError(f"ffn = {config.ffn} must be a multiple of etp = {etp}, which splits the expert's width")
    on_meta = device is not None and torch.device(device).type == "meta"
    try:
        placement = config.placement_on(ranks // etp)
    except ConfigError as fault:
        refuse_dispatcher(fault, None if on_meta else group, options)
    # The dispatcher treats each slice of an expert as an expert.
    slots = placement.layout.sliced(etp)
    traffic = Traffic(
        config.router.top_k * etp,
        config.hidden,
        (dtype or torch.get_default_dtype()).itemsize,
        overlap=overlap is not None,
        fused=overlap is not None and overlap.uses_kernels,
        scaled=config.expert_gemm_dtype == "fp8",
    )

    def make_on(target: torch.device | str | None) -> Dispatcher:
        return new_dispatcher(
            slots.num_experts,
            group,
            backend=backend,
            experts_per_rank=slots.experts_per_rank,
            options=options,
            traffic=traffic,
            device=target,
            expert_placement=placement,
        )

    if not on_meta:
        return make_on(device)
    dispatcher = DeferredDispatcher(slots, group, group_rank(group), options, make_on)
    dispatcher.expert_placement = placement
    return dispatcher


def build_modules(
    config: MoEConfig,
    groups: MoEGroups,
    dispatcher: Dispatcher,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[Router, Experts, SharedExpert | None]:
    """Return the modules of a layer. The weights of the experts are not initialized."""
    factory: dict[str, Any] = {"dtype": dtype, "device": device}
    hidden, activation, placement = config.hidden, config.activation, dispatcher.expert_placement
    assert placement is not None
    tokens = groups.experts if groups.tokens is None else groups.tokens
    router = Router(hidden, config.router, tokens, sequence_group=groups.sequence, **factory)
    part = ExpertSlice(dispatcher.rank % groups.etp, groups.etp)
    num_local = placement.homes_per_rank[dispatcher.rank // groups.etp]
    # On "meta" first: values are drawn once, by layer.reset_parameters.
    bias, empty = config.expert_bias, factory | {"device": "meta"}
    experts = Experts(num_local, hidden, config.ffn, activation, bias=bias, part=part, **empty)
    experts.to_empty(device=device or torch.get_default_device())
    experts.recompute, experts.gemm_dtype = config.recompute, config.expert_gemm_dtype
    shared = None
    if config.shared_ffn:
        from moe_comm.layers.moe.shared import SharedExpert

        shared = SharedExpert(hidden, config.shared_ffn, activation, gate=config.shared_gate, **factory)
    return router, experts, shared


def check_parts(router: Router, experts: Experts, dispatcher: Dispatcher, placement: Placement) -> None:
    """Raise ConfigError unless the parts of a layer are for the same experts. placement: of the complete experts."""
    part = getattr(experts, "part", ExpertSlice())
    layout = ExpertPlacement(dispatcher.placement.experts_per_rank[:: part.count])
    if layout.sliced(part.count) != dispatcher.placement or dispatcher.rank % part.count != part.index:
        raise ConfigError(
            f"slice {part.index} of {part.count} of the experts of rank {dispatcher.rank} does not match the "
            f"dispatcher's placement {dispatcher.placement.experts_per_rank}: the {part.count} ranks that share "
            "experts must be adjacent and hold the same number of slices"
        )
    if placement.layout != layout:
        raise ConfigError(
            f"the placement has {placement.slots_per_rank} experts on each rank, but the dispatcher has "
            f"{layout.experts_per_rank}"
        )
    if router.config.num_experts != placement.num_experts:
        raise ConfigError(
            f"the router chooses among {router.config.num_experts} real experts, but the dispatcher has "
            f"{placement.num_experts}"
        )
    homes = placement.homes_per_rank[dispatcher.rank // part.count]
    if experts.num_experts != homes:
        raise ConfigError(
            f"rank {dispatcher.rank} is the home of {homes} experts, with the slots {layout.experts_per_rank} of "
            f"all ranks, but its weights are for {experts.num_experts}"
        )


def agree_on_seed(group: ProcessGroup | None) -> int:
    """Return a seed drawn by the first rank of the group. Collective."""
    seed = torch.randint(2**31, (), device="cpu")
    return int(gather_values(seed, group, "agreeing on a seed")[0])
