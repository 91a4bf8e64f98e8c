"""Configuration of an MoE layer, the ranks that it runs on, and its parts. ``MoELayer.build`` builds the layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import nn
from torch.distributed import ProcessGroup

from moe_comm.comm.group_setup import as_group
from moe_comm.dispatch import Dispatcher, DispatchOptions, Traffic
from moe_comm.dispatch.selection.factory import DeferredDispatcher, new_dispatcher, refuse_dispatcher
from moe_comm.dispatch.slots.capacity import Capacity
from moe_comm.errors import ConfigError
from moe_comm.kernels.activations import Activation
from moe_comm.kernels.fp8 import GemmDtype, check_gemm_dtype
from moe_comm.layers.moe.experts import Experts, ExpertSlice
from moe_comm.layers.moe.router import Router, RouterConfig, ZeroExperts
from moe_comm.layers.parallel.collectives import gather_values, group_rank, group_size
from moe_comm.topology import ExpertPlacement, Placement

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from moe_comm.layers.moe.shared import SharedExpert
    from moe_comm.overlap.options import Overlap


@dataclass(frozen=True)
class MoEConfig:
    """Configuration of an MoE layer.

    Args:
        hidden: width D of the tokens.
        ffn: width F of one expert.
        router: router, with the number of experts.
        activation: name of a registered activation, or an ``Activation``.
        expert_bias: both linears of the experts have biases.
        shared_ffn: width of the shared expert; 0 builds none.
        shared_gate: scale the shared expert's output by a learned sigmoid gate.
        capacity: maximum number of rows per expert; None drops no row.
        recompute: recompute the activations of experts in backward instead of storing them.
        experts_per_rank: number of real experts on each expert-parallel rank; None distributes them evenly.
        placement: the expert-parallel ranks that hold each expert, in place of ``experts_per_rank``. The results have
            the same bits for every placement.
        expert_gemm_dtype: operands of the experts' forward GEMMs, see ``Experts.gemm_dtype``. "fp8" needs ``hidden`` to
            be a multiple of 128, and another executor than "device". If the wire dtype of dispatch is fp8, experts read
            the received bytes.

    Raises:
        ConfigError: a size is out of range, ``shared_gate`` without a shared expert, fp8 with another ``hidden``, or a
            placement that does not fit.
    """

    hidden: int
    ffn: int
    router: RouterConfig
    activation: str | Activation = "swiglu"
    expert_bias: bool = False
    shared_ffn: int = 0
    shared_gate: bool = False
    capacity: Capacity | None = None
    recompute: bool = False
    experts_per_rank: tuple[int, ...] | None = None
    expert_gemm_dtype: GemmDtype = field(default="same", kw_only=True)
    placement: Placement | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.ffn < 1 or self.shared_ffn < 0:
            raise ConfigError(f"hidden and ffn must be at least 1; got {self.hidden}, {self.ffn}, {self.shared_ffn}")
        check_gemm_dtype(self.expert_gemm_dtype, self.hidden)
        if self.shared_gate and not self.shared_ffn:
            raise ConfigError("shared_gate needs a shared expert; set shared_ffn")
        if self.placement is not None and self.experts_per_rank is not None:
            raise ConfigError("placement determines the experts of each rank; do not set experts_per_rank as well")

    def placement_on(self, world: int) -> Placement:
        """Return the placement of the experts on ``world`` expert-parallel ranks.

        Raises:
            ConfigError: ``placement`` or ``experts_per_rank`` is for another number of experts or ranks.
        """
        if self.placement is None:
            return Placement.contiguous(self.num_experts, world, self.experts_per_rank)
        return self.placement.fitting(self.num_experts, world)

    @property
    def num_experts(self) -> int:
        """Number of real experts of all ranks together."""
        return self.router.num_experts

    @property
    def zero_experts(self) -> ZeroExperts:
        """Zero-computation experts of the router."""
        return self.router.zero_experts


@dataclass(frozen=True)
class MoEGroups:
    """Process groups of an MoE layer in a folded mapping: attention and experts group the same ranks differently.

    Args:
        experts: the ep * etp ranks that share one set of experts, etp fastest; None holds every expert on this rank.
        etp: number of ranks that share each expert (expert tensor parallelism).
        tokens: the ranks that hold the tokens of one micro-batch: all ranks of a pipeline stage. Auxiliary losses and
            a capacity of scope "batch" cover their tokens together. None: ``experts``.
        sequence: the ranks that share each sequence (context and tensor parallelism), for the sequence-wise balance
            loss. None: each sequence is on one rank.
    """

    experts: ProcessGroup | None = None
    etp: int = 1
    tokens: ProcessGroup | None = None
    sequence: ProcessGroup | None = None

    @classmethod
    def of(cls, group: ProcessGroup | DeviceMesh | MoEGroups | None) -> MoEGroups:
        """Return ``group`` itself, or the groups of a layer whose experts are distributed over ``group`` alone."""
        return group if isinstance(group, MoEGroups) else cls(as_group(group, "ep"))


class LayerSettings(TypedDict, total=False):
    """Settings of ``MoELayer.from_modules``; see ``MoEConfig`` and ``MoELayer.build``."""

    shared: nn.Module | None
    capacity: Capacity | None
    recompute: bool
    experts_per_rank: tuple[int, ...] | None
    placement: Placement | None
    expert_gemm_dtype: GemmDtype
    backend: str
    options: DispatchOptions | None
    overlap: Overlap | Literal["auto"] | None
    label: str


def token_group(groups: MoEGroups) -> ProcessGroup | None:
    """Return the ranks that hold the tokens of one micro-batch."""
    return groups.experts if groups.tokens is None else groups.tokens


def check_etp(config: MoEConfig, groups: MoEGroups) -> None:
    """Raise ConfigError unless the experts can be sliced over ``groups.etp`` ranks."""
    etp, ranks = groups.etp, group_size(groups.experts)
    if etp < 1 or ranks % etp:
        raise ConfigError(f"etp = {etp} must divide the {ranks} ranks that share one set of experts")
    if config.ffn % etp:
        raise ConfigError(f"ffn = {config.ffn} must be a multiple of etp = {etp}, which splits the expert's width")


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
    check_etp(config, groups)
    on_meta = device is not None and torch.device(device).type == "meta"
    try:
        placement = config.placement_on(ranks // etp)
    except ConfigError as fault:
        refuse_dispatcher(fault, None if on_meta else group, options)
    rows = Traffic(config.router.top_k * etp, config.hidden, (dtype or torch.get_default_dtype()).itemsize)
    fp8 = config.expert_gemm_dtype == "fp8"

    def make_on(target: torch.device | str | None) -> Dispatcher:
        return expert_dispatcher(placement, group, backend, options, overlap, fp8, device=target, etp=etp, rows=rows)

    if not on_meta:
        return make_on(device)
    if options is not None and options.balance is not None:
        placement = options.balance.placement(placement)
    dispatcher = DeferredDispatcher(placement.layout.sliced(etp), group, group_rank(group), options, make_on)
    dispatcher.expert_placement = placement
    return dispatcher


def expert_dispatcher(
    placement: Placement,
    group: ProcessGroup | None,
    backend: str,
    options: DispatchOptions | None,
    overlap: Overlap | None,
    fp8: bool,
    *,
    device: torch.device | str | None,
    etp: int = 1,
    rows: Traffic | None = None,
) -> Dispatcher:
    """Return the dispatcher for the slots of ``placement``. Collective over ``group``; None: this process alone.

    Args:
        fp8: the experts have fp8 GEMMs.
        etp: slices of each expert. The dispatcher treats each slice as an expert.
        rows: sizes of the rows, for the choice of the backend.
    """
    if options is not None and options.balance is not None:
        try:
            placement = options.balance.placement(placement)
        except ConfigError as fault:
            refuse_dispatcher(fault, group, options)
    slots = placement.layout.sliced(etp)
    fused = overlap is not None and overlap.uses_kernels
    return new_dispatcher(
        slots.num_experts,
        group,
        backend=backend,
        experts_per_rank=slots.experts_per_rank,
        options=options,
        traffic=replace(rows or Traffic(), overlap=overlap is not None, fused=fused, scaled=fp8),
        device=device,
        expert_placement=placement,
    )


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
    router = Router(config.hidden, config.router, token_group(groups), sequence_group=groups.sequence, **factory)
    experts = build_experts(config, groups, dispatcher, **factory)
    shared = None
    if config.shared_ffn:
        from moe_comm.layers.moe.shared import SharedExpert

        shared = SharedExpert(config.hidden, config.shared_ffn, config.activation, gate=config.shared_gate, **factory)
    return router, experts, shared


def build_experts(
    config: MoEConfig,
    groups: MoEGroups,
    dispatcher: Dispatcher,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> Experts:
    """Return the experts of this rank, whose weights are not initialized."""
    placement = dispatcher.expert_placement
    assert placement is not None
    part = ExpertSlice(dispatcher.rank % groups.etp, groups.etp)
    num_local = placement.homes_per_rank[dispatcher.rank // groups.etp]
    # On "meta" first: values are drawn once, by layer.reset_parameters.
    factory: dict[str, Any] = {"bias": config.expert_bias, "part": part, "dtype": dtype, "device": "meta"}
    experts = Experts(num_local, config.hidden, config.ffn, config.activation, **factory)
    experts.to_empty(device=device or torch.get_default_device())
    experts.recompute, experts.gemm_dtype = config.recompute, config.expert_gemm_dtype
    return experts


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
