"""The MoE layer: router, dispatch, experts, combine, and what runs beside them.

x ──▶ router ──ids, weights──┐
│                            ▼
├──────────▶ dispatch ──rows by expert──▶ experts ──rows──▶ combine ──▶ + ──▶ y
├──────────▶ shared expert (every token) ───────────────────────────────┤
└──────────▶ identity experts: weight * x, nothing travels ─────────────┘
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.dispatch import Dispatcher, DispatchOptions, Traffic, make_dispatcher
from moe_comm.dispatch.capacity import Capacity, apply_capacity
from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.activations import Activation
from moe_comm.layers.autocast import compute_dtype
from moe_comm.layers.experts import Experts
from moe_comm.layers.losses import attach_loss
from moe_comm.layers.router import Router, RouterConfig, Routing
from moe_comm.layers.shared import SharedExpert, split_zero_experts


@dataclass(frozen=True)
class ZeroExperts:
    """Zero-computation experts, whose ids follow those of the real ones: first identities, then those that add 0."""

    identity: int = 0
    zero: int = 0

    def __post_init__(self) -> None:
        if self.identity < 0 or self.zero < 0:
            raise ConfigError(f"numbers of zero-computation experts cannot be negative; got {self}")

    @property
    def total(self) -> int:
        return self.identity + self.zero


@dataclass(frozen=True)
class MoEConfig:
    """A whole MoE layer.

    hidden, ffn: D, and F of one expert.
    router: its ``num_experts`` counts real and zero-computation experts.
    shared_ffn: width of the shared expert; 0 for none. shared_gate: it has a sigmoid gate.
    capacity: bound on the rows per expert; None drops nothing.
    recompute: experts keep less for backward.
    experts_per_rank: how many real experts each rank holds; None spreads them evenly.
    """

    hidden: int
    ffn: int
    router: RouterConfig
    activation: str | Activation = "swiglu"
    expert_bias: bool = False
    zero_experts: ZeroExperts = ZeroExperts()
    shared_ffn: int = 0
    shared_gate: bool = False
    capacity: Capacity | None = None
    recompute: bool = False
    experts_per_rank: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.ffn < 1 or self.shared_ffn < 0:
            raise ConfigError(f"hidden and ffn must be at least 1; got {self.hidden}, {self.ffn}, {self.shared_ffn}")
        if self.num_experts < 1:
            raise ConfigError(
                f"no real expert is left of {self.router.num_experts}: all are zero-computation ({self.zero_experts})"
            )
        if self.shared_gate and not self.shared_ffn:
            raise ConfigError("shared_gate needs a shared expert; set shared_ffn")

    @property
    def num_experts(self) -> int:
        """Real experts of all ranks together."""
        return self.router.num_experts - self.zero_experts.total


class MoELayer(nn.Module):
    """Mixture-of-Experts layer over the ranks of an expert-parallel group. A drop-in for a feed-forward block.

    Each rank gives its own tokens (any number, zero included) and gets their outputs. Every rank of the group must
    call the layer, and its backward, alike.

    Gradients are plain sums: an expert's gradient is that of the sum of all ranks' losses and needs no reduction
    over the group; the router's and the shared expert's parameters are replicated, and theirs do.

    Output, input gradient, routing-weight gradients and expert weight gradients have the same bits for any number of
    ranks (deterministic mode, CPU).

    Args:
        router: routes to ``dispatcher.num_experts + zero_experts.total`` experts.
        experts: this rank's, ``len(dispatcher.local_experts)`` of them.
        label: the layer's name in error messages.

    Attributes:
        num_dropped: slots that the capacity dropped in the last call, a scalar tensor; None without capacity.
        aux_scale: what the main loss is multiplied by before backward; the auxiliary losses get the same factor.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        dispatcher: Dispatcher,
        shared: SharedExpert | None = None,
        *,
        capacity: Capacity | None = None,
        zero_experts: ZeroExperts | None = None,
        label: str = "",
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self.dispatcher = dispatcher
        self.capacity = capacity
        self.zero_experts = zero_experts or ZeroExperts()
        self.label = label
        self.aux_scale: float | Tensor = 1.0
        self.num_dropped: Tensor | None = None
        if router.config.num_experts != dispatcher.num_experts + self.zero_experts.total:
            raise ConfigError(
                f"the router chooses among {router.config.num_experts} experts, but the dispatcher has "
                f"{dispatcher.num_experts} and there are {self.zero_experts.total} zero-computation experts"
            )
        if experts.num_experts != len(dispatcher.local_experts):
            raise ConfigError(
                f"rank {dispatcher.rank} holds {len(dispatcher.local_experts)} experts by the dispatcher's placement "
                f"{dispatcher.placement.experts_per_rank}, but its weights are for {experts.num_experts}"
            )

    @classmethod
    def build(
        cls,
        config: MoEConfig,
        group: ProcessGroup | None = None,
        backend: str = "auto",
        *,
        seed: int | None = None,
        options: DispatchOptions | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        label: str = "",
    ) -> MoELayer:
        """A layer with fresh weights, the same for every number of ranks. Collective over ``group``.

        Args:
            group: expert-parallel process group; None holds every expert here.
            backend: see ``make_dispatcher``.
            seed: of the weights; drawn by the group's first rank from torch's generator if not given.
        """
        traffic = Traffic(
            config.router.top_k,
            config.hidden,
            (dtype or torch.get_default_dtype()).itemsize,
            (options or DispatchOptions()).deterministic,
        )
        dispatcher = make_dispatcher(
            config.num_experts,
            group,
            backend,
            experts_per_rank=config.experts_per_rank,
            options=options,
            traffic=traffic,
            device=device,
        )
        router = Router(config.hidden, config.router, group, dtype=dtype, device=device)
        experts = Experts(
            len(dispatcher.local_experts),
            config.hidden,
            config.ffn,
            config.activation,
            bias=config.expert_bias,
            recompute=config.recompute,
            dtype=dtype,
            device=device,
        )
        shared = None
        if config.shared_ffn:
            shared = SharedExpert(
                config.hidden,
                config.shared_ffn,
                config.activation,
                gate=config.shared_gate,
                dtype=dtype,
                device=device,
            )
        layer = cls(
            router,
            experts,
            dispatcher,
            shared,
            capacity=config.capacity,
            zero_experts=config.zero_experts,
            label=label,
        )
        layer.reset_parameters(_same_seed(group) if seed is None else seed)
        return layer

    def reset_parameters(self, seed: int, std: float = 0.02) -> None:
        """Fresh weights that depend on ``seed`` alone, not on how the experts are spread."""
        device = self.router.weight.device
        generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)
        self.router.reset_parameters(std, generator)
        if self.shared is not None:
            self.shared.reset_parameters(std, generator)
        self.experts.reset_parameters(seed, self.dispatcher.local_experts.start, std)

    def __deepcopy__(self, memo: dict[int, Any]) -> MoELayer:
        # A copy (EMA, reference model) has its own weights; what reaches other processes is shared with it.
        for shared in (self.dispatcher, self.router.group):
            memo[id(shared)] = shared
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied

    def extra_repr(self) -> str:
        place = f"rank {self.dispatcher.rank} of {self.dispatcher.world}"
        return f"label={self.label!r}, dispatcher={self.dispatcher.name}, {place}"

    # torch.compile breaks its graph here: collectives and row counts that change from call to call do not trace, and
    # a compiler that fuses or reorders sums would break the promise about bits. (Unlike torch.compiler.disable, this
    # decorator imports the compiler at the first call and not, at a second of cost, with this module.)
    @torch._disable_dynamo
    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """Run the layer on this rank's tokens.

        Args:
            x: [..., D]; with three dimensions the first counts sequences, for the sequence-wise balance loss.
            routing: use this instead of asking the router.

        Returns:
            The shape of ``x``, in its dtype or autocast's.

        Raises:
            InputError, RoutingError, RankMismatch: on every rank, before rows move.
            PeerDied, PeerTimeout: a rank is gone, or did not call in time.
        """
        if x.shape[-1] != self.router.hidden:
            fault = InputError(f"this layer's hidden size is {self.router.hidden}; got x {tuple(x.shape)}")
            self.dispatcher.refuse(fault, x, label=self.label)
        x_TD = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        if routing is None:
            routing = self.router(x_TD, x.shape[0] if x.dim() == 3 else 1)
        y_TD = self.routed(x_TD.to(compute_dtype(x_TD)), routing)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        if routing.aux_loss is not None and routing.aux_loss.requires_grad:
            y_TD = attach_loss(y_TD, routing.aux_loss, self.aux_scale)
        return y_TD.view(x.shape)

    def routed(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """[T, D] the weighted sum of each token's experts, zero-computation ones included; no shared expert."""
        ids_TK, weights_TK = routing.ids_TK, routing.weights_TK
        num_experts, zero = self.dispatcher.num_experts, self.zero_experts
        identity_T1 = None
        if zero.total:
            ids_TK, identity_T1 = split_zero_experts(ids_TK, weights_TK, num_experts, zero.identity)
        if self.capacity is not None:
            ids_TK, self.num_dropped = apply_capacity(ids_TK, weights_TK, num_experts, self.capacity)
        dispatched = self.dispatcher.dispatch(x_TD, ids_TK, label=self.label)
        rows_RD = self.experts(dispatched.rows_RD, dispatched.layout.rows_per_expert, alloc=self.dispatcher.empty_rows)
        y_TD = self.dispatcher.combine(rows_RD, weights_TK, dispatched.layout)
        if identity_T1 is not None and zero.identity:
            y_TD = (y_TD.to(identity_T1.dtype) + identity_T1 * x_TD).to(y_TD.dtype)
        return y_TD


def _same_seed(group: ProcessGroup | None) -> int:
    """A seed from this process's generator; that of the group's first rank. Collective."""
    seed = torch.randint(2**31, (), device="cpu")
    if group is not None and dist.get_world_size(group) > 1:
        kinds = {device.type for device in group._device_types}
        seed = seed if "cpu" in kinds else seed.cuda()
        dist.broadcast(seed, group=group, group_src=0)
    return int(seed)
