"""The MoE layer: router, dispatch, experts, combine, and what runs beside them.

x ──▶ router ──ids, weights──┐
│                            ▼
├──────────▶ dispatch ──rows by expert──▶ experts ──rows──▶ combine ──▶ + ──▶ y
├──────────▶ shared expert (every token) ───────────────────────────────┤
└──────────▶ identity experts: weight * x, nothing travels ─────────────┘

Expert tensor parallelism (etp ranks hold a part of each expert's width) is dispatch to parts. A part is an expert to
the dispatcher, a token goes to all parts of its experts, and combine adds their partial results, in fp32:

    ep 2, etp 2, experts 0 1 | 2 3, a token for experts 1 and 2, parts a and b

    rank (ep, etp)    0 (0, 0)    1 (0, 1)    2 (1, 0)    3 (1, 1)
    holds             0a 1a       0b 1b       2a 3a       2b 3b
    gets the token       1a          1b       2a          2b           y = w1 * (1a + 1b) + w2 * (2a + 2b)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.deprecated import renamed_attributes
from moe_comm.dispatch import Dispatcher, DispatchHandle, DispatchOptions, Traffic, make_dispatcher
from moe_comm.dispatch.capacity import Capacity, apply_capacity
from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.autocast import compute_dtype
from moe_comm.layers.data_parallel.attach import attach_experts, gradients_of
from moe_comm.layers.data_parallel.expert_shard import ExpertShards
from moe_comm.layers.data_parallel.sync import prepare_ddp
from moe_comm.layers.moe.config import MoEConfig, ZeroExperts
from moe_comm.layers.moe.experts import Experts, Part
from moe_comm.layers.moe.losses import attach_loss
from moe_comm.layers.moe.router import Router, Routing, recomputing
from moe_comm.layers.moe.shared import SharedExpert, split_zero_experts
from moe_comm.layers.parallel.collectives import channel_of, gather_values, group_rank, group_size
from moe_comm.layers.parallel.interleave import Steps
from moe_comm.layers.parallel.module import ParallelModule
from moe_comm.overlap.executors.base import ExpertCall
from moe_comm.overlap.executors.serial import serial_call
from moe_comm.overlap.options import Overlap
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS
from moe_comm.topology import ExpertPlacement, Sharding

__all__ = ["DispatchStats", "MoEConfig", "MoELayer", "ZeroExperts"]


@dataclass(frozen=True)
class DispatchStats:
    """Where the (token, slot) pairs of one call went. None is lost: over all ranks, etp * sent adds up to received.

    slots: T * K of this rank. sent: those that went to an expert; the others were dropped by the capacity, or had no
        real expert in the first place. received: rows that this rank's experts, or parts of experts, were given.
    dropped: by the capacity, a scalar tensor; None without capacity.
    """

    slots: int
    sent: int
    received: int
    dropped: Tensor | None


class MoECall:
    """What ``MoELayer.begin`` returns. Every rank calls ``compute`` and then ``result``, once each:

        call = layer.begin(x)     tokens are dispatched
        ...                       other work: attention of another micro-batch, a dense branch beside the experts
        call.compute()            the shared expert, while tokens are in transfer; then the experts
        ...                       other work
        y = call.result()         results are combined

    Autograd runs the same other work between the same parts in backward, in the other order: it goes by when an
    operator ran in forward.
    """

    def __init__(self, steps: Steps[Tensor]) -> None:
        self._steps = steps
        next(steps)

    def compute(self) -> None:
        """Run the shared expert, and the experts on the rows as they complete; begin to return the results."""
        next(self._steps)

    def result(self) -> Tensor:
        """[..] in the shape of the input: what ``MoELayer.forward`` returns."""
        try:
            next(self._steps)
        except StopIteration as end:
            y: Tensor = end.value
            return y
        raise RuntimeError("call compute before result")


@renamed_attributes(flow="dispatch_stats")
class MoELayer(ParallelModule):
    """Mixture-of-Experts layer over the ranks of an expert-parallel group. A drop-in for a feed-forward block.

    Each rank gives its own tokens (any number, zero included) and gets their outputs. Every rank of the group must
    call the layer, and its backward, alike.

    Gradients are plain sums: an expert's gradient is that of the sum of all ranks' losses and needs no reduction
    over the group; the router's and the shared expert's parameters are replicated, and theirs do.

    Output, input gradient, routing-weight gradients and expert weight gradients have the same bits for any number of
    expert-parallel ranks (deterministic mode, CPU). Expert tensor parallelism adds partial sums in another order.

    Args:
        router: routes to the real experts and the ``zero_experts.total`` others. What it counts over its ``group``,
            the layer counts too: a capacity of scope "batch" is decided over the tokens of that group.
        experts: this rank's, ``len(dispatcher.local_experts)`` of them, or that many parts.
        dispatcher: of experts, or of their parts (``ExpertPlacement.sliced``).
        label: the layer's name in error messages.
        overlap: which executor runs dispatch, experts and combine (``overlap/executors``); "auto": serial or pipelined,
            as a cost model predicts (``explain_overlap``); None: serial. The numbers are the same.

    Attributes:
        placement: which experts each expert-parallel rank holds, whole or in parts.
        place, sizes: of this rank on the axes "ep" and "etp", and those axes' sizes.
        num_dropped: slots that the capacity dropped in the last call, a scalar tensor; None without capacity.
        dropped_total: the same since ``take_loads``, counted in training and once under activation checkpointing.
        dispatch_stats: where the slots of the last call went.
        aux_scale: what the main loss is multiplied by before backward; the auxiliary losses get the same factor.
    """

    counters = ("dropped_total",)
    """Buffers that count this rank's tokens."""
    dropped_total: Tensor

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
        overlap: Overlap | Literal["auto"] | None = None,
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self.dispatcher = dispatcher
        self.capacity = capacity
        self.zero_experts = zero_experts or ZeroExperts()
        self.label, self.overlap = label, Overlap.of(overlap)
        self.aux_scale: float | Tensor = 1.0
        self.num_dropped: Tensor | None = None
        self.dispatch_stats: DispatchStats | None = None
        dropped = torch.zeros((), dtype=torch.int64, device=router.weight.device)
        self.register_buffer("dropped_total", dropped, persistent=False)
        part = getattr(experts, "part", Part())
        self.placement = ExpertPlacement(dispatcher.placement.experts_per_rank[:: part.of])
        self.place: Mapping[str, int] = {"ep": dispatcher.rank // part.of, "etp": part.index}
        self.sizes: Mapping[str, int] = {"ep": self.placement.world, "etp": part.of}
        if self.placement.sliced(part.of) != dispatcher.placement or dispatcher.rank % part.of != part.index:
            raise ConfigError(
                f"rank {dispatcher.rank} holds part {part.index} of {part.of} of its experts, which does not fit the "
                f"dispatcher's placement {dispatcher.placement.experts_per_rank}: the {part.of} ranks that share "
                "experts stand next to each other and hold as many"
            )
        if router.config.num_experts != self.num_experts + self.zero_experts.total:
            raise ConfigError(
                f"the router chooses among {router.config.num_experts} experts, but the dispatcher has "
                f"{self.num_experts} and there are {self.zero_experts.total} zero-computation experts"
            )
        if experts.num_experts != len(dispatcher.local_experts):
            raise ConfigError(
                f"rank {dispatcher.rank} holds {len(dispatcher.local_experts)} experts by the dispatcher's placement "
                f"{dispatcher.placement.experts_per_rank}, but its weights are for {experts.num_experts}"
            )
        if dispatcher.group is not None and dispatcher.world > 1:
            shards = ExpertShards(dispatcher.group, experts.shardings_over(self.placement), self.place, self.sizes)
            attach_experts(experts, shards, partial(getattr, router, "weight"), label)
            prepare_ddp(self)

    @classmethod
    def build(
        cls,
        config: MoEConfig,
        group: ProcessGroup | None = None,
        backend: str = "auto",
        *,
        etp: int = 1,
        tokens_group: ProcessGroup | None = None,
        sequence_group: ProcessGroup | None = None,
        seed: int | None = None,
        options: DispatchOptions | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        label: str = "",
        overlap: Overlap | Literal["auto"] | None = None,
    ) -> MoELayer:
        """A layer with fresh weights, the same for every number of ranks. Collective over ``group``.

        Args:
            group: the ranks that share one set of experts, ep * etp of them, etp fastest; None holds every expert here.
            backend: see ``make_dispatcher``.
            etp: ranks that share each expert, by parts of its width.
            tokens_group: the ranks, those of ``group`` among them, that hold the tokens of one micro-batch: all of a
                pipeline stage. Auxiliary losses and a capacity of scope "batch" are over their tokens together.
                None: ``group``.
            sequence_group: those of them over which each sequence is spread (context and tensor parallelism), for
                the sequence-wise balance loss. None: sequences are whole.
            seed: of the weights; drawn by the first rank from torch's generator if not given.
            device: on "meta" there are shapes and no dispatcher yet (``dispatch/deferred.py``), and nothing is
                collective if there is a seed.

        Raises:
            ConfigError: ``etp`` does not divide the ranks of ``group`` or ``config.ffn``.
        """
        ranks = group_size(group)
        if etp < 1 or ranks % etp:
            raise ConfigError(f"etp = {etp} must divide the {ranks} ranks that share one set of experts")
        if config.ffn % etp:
            raise ConfigError(f"an expert's width ffn = {config.ffn} must be a multiple of etp = {etp}, which cuts it")
        experts_per_rank = config.experts_per_rank
        if etp > 1:
            placement = ExpertPlacement.of(config.num_experts, ranks // etp, experts_per_rank)
            experts_per_rank = placement.sliced(etp).experts_per_rank
        tokens_group = group if tokens_group is None else tokens_group
        traffic = Traffic(
            config.router.top_k * etp,
            config.hidden,
            (dtype or torch.get_default_dtype()).itemsize,
            (options or DispatchOptions()).deterministic,
            (options or DispatchOptions()).wire_dtypes,
            overlap is not None,
        )

        def make(where: torch.device | str | None) -> Dispatcher:
            return make_dispatcher(
                config.num_experts * etp,
                group,
                backend,
                experts_per_rank=experts_per_rank,
                options=options,
                traffic=traffic,
                device=where,
            )

        if device is not None and torch.device(device).type == "meta":
            from moe_comm.dispatch.deferred import DeferredDispatcher  # only on "meta"

            parts = ExpertPlacement.of(config.num_experts * etp, ranks, experts_per_rank)
            dispatcher: Dispatcher = DeferredDispatcher(parts, group, group_rank(group), options, make)
        else:
            dispatcher = make(device)
        router = Router(
            config.hidden, config.router, tokens_group, sequence_group=sequence_group, dtype=dtype, device=device
        )
        experts = Experts(
            len(dispatcher.local_experts),
            config.hidden,
            config.ffn,
            config.activation,
            bias=config.expert_bias,
            recompute=config.recompute,
            part=Part(dispatcher.rank % etp, etp),
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
            overlap=overlap,
        )
        layer.reset_parameters(_same_seed(tokens_group) if seed is None else seed)
        return layer

    @cached_property
    def num_experts(self) -> int:
        """Real experts of all ranks together."""
        return self.placement.num_experts

    @property
    def local_experts(self) -> range:
        """Global ids of the real experts that this rank holds, whole or in part."""
        return self.placement.local_range(self.place["ep"])

    def shardings(self) -> dict[str, Sharding]:
        """How the experts' parameters are cut, by name in this layer; all others are replicated."""
        return {f"experts.{name}": s for name, s in self.experts.shardings_over(self.placement).items()}

    def reset_parameters(self, seed: int, std: float = 0.02) -> None:
        """Fresh weights that depend on ``seed`` alone, not on how the experts are spread."""
        device = self.router.weight.device
        generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)
        self.router.reset_parameters(std, generator)
        if self.shared is not None:
            self.shared.reset_parameters(std, generator)
        self.experts.reset_parameters(seed, self.local_experts.start, std)
        self.dropped_total.zero_()

    def shared_by_copies(self) -> list[Any]:
        """What reaches other processes."""
        return [self.dispatcher, self.router.group, self.router.sequence_group]

    def extra_repr(self) -> str:
        place = f"rank {self.dispatcher.rank} of {self.dispatcher.world}"
        return f"label={self.label!r}, dispatcher={self.dispatcher.name}, {place}"

    # torch.compile breaks its graph here: collectives and row counts that change from call to call do not trace, and
    # a compiler that fuses or reorders sums would break the promise about bits. (Unlike torch.compiler.disable, this
    # decorator imports the compiler at the first call and not, at a second of cost, with this module.)
    @torch._disable_dynamo
    def forward(self, x: Tensor, routing: Routing | None = None, token_index: Tensor | None = None) -> Tensor:
        """Run the layer on this rank's tokens.

        Args:
            x: [..., D]; with three dimensions the first counts sequences, for the sequence-wise balance loss.
            routing: use this instead of asking the router.
            token_index: int64, the leading shape of ``x`` or flat: each token's place in the micro-batch, by which a
                capacity of scope "batch" decides the same drops at every mapping. None: tokens stand in order of rank.

        Returns:
            The shape of ``x``, in its dtype or autocast's.

        Raises:
            InputError, RoutingError, RankMismatch: on every rank, before rows move.
            PeerDied, PeerTimeout: a rank failed, or did not call in time.
        """
        call = MoECall(self._steps(x, routing, token_index))
        call.compute()
        return call.result()

    @torch._disable_dynamo
    def begin(self, x: Tensor, routing: Routing | None = None, token_index: Tensor | None = None) -> MoECall:
        """The first of ``forward``'s three parts: dispatch the tokens.

        ``compute`` and ``result`` of what it returns are the others. What is computed between them, forward and
        backward, hides the transfers, if the layer overlaps and rows are sent by the network; else nothing is in
        transfer between them. The numbers are those of ``forward``. Arguments and errors are, too.
        """
        return MoECall(self._steps(x, routing, token_index, in_parts=True))

    def _steps(
        self, x: Tensor, routing: Routing | None, token_index: Tensor | None, in_parts: bool = False
    ) -> Steps[Tensor]:
        """One call. It gives way where other work can hide transfers: after dispatch, and after the experts."""
        x_TD, routing = self._routed(x, routing, token_index)
        ids_TK, weights_TK, identity_T1 = self._chosen(routing, token_index)
        wide_TD = x_TD.to(compute_dtype(x_TD)) if torch.is_autocast_enabled(x_TD.device.type) else x_TD
        call = self._dispatched(wide_TD, ids_TK, weights_TK)
        self._note(call.handle)
        if in_parts:
            call.complete()
        yield
        with call.abort_on_error():
            shared_TD = None if self.shared is None else self.shared(x_TD)
            with EVENTS.span(Kind.COMPUTE, "experts", layer=self.label):
                # Call the module, so that its hooks run: FSDP gathers the weights in one.
                rows = self.experts(call.rows, call.handle.rows_per_expert, call.compute)
        yield
        y_TD = call.combine(rows)
        if identity_T1 is not None and self.zero_experts.identity:
            y_TD = (y_TD.to(identity_T1.dtype) + identity_T1 * x_TD.to(y_TD.dtype)).to(y_TD.dtype)
        if shared_TD is not None:
            y_TD = y_TD + shared_TD
        if routing.aux_loss is not None and routing.aux_loss.requires_grad:
            y_TD = attach_loss(y_TD, routing.aux_loss, self.aux_scale * self._copies_averaged())
        return y_TD.view(x.shape)

    def _routed(self, x: Tensor, routing: Routing | None, token_index: Tensor | None) -> tuple[Tensor, Routing]:
        """[T, D] the tokens, and where they go."""
        if x.shape[-1] != self.router.hidden:
            fault = InputError(f"this layer's hidden size is {self.router.hidden}; got x {tuple(x.shape)}")
            self._meet_without_tokens(x, routing, token_index)
            self.dispatcher.refuse(fault, x, label=self.label)
        x_TD = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        if routing is None:
            routing = self.router(x_TD, x.shape[0] if x.dim() == 3 else 1)
        return x_TD, routing

    def _chosen(self, routing: Routing, token_index: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """What is dispatched: ids and weights, less what goes to identity experts, and the weights of these."""
        ids_TK, weights_TK = routing.ids_TK, routing.weights_TK
        num_experts, zero = self.num_experts, self.zero_experts
        identity_T1 = None
        if zero.identity or zero.zero:
            ids_TK, identity_T1 = split_zero_experts(ids_TK, weights_TK, num_experts, zero.identity)
        if self.capacity is not None:
            index_T = None if token_index is None else token_index.reshape(-1)
            ids_TK, self.num_dropped = apply_capacity(
                ids_TK, weights_TK, num_experts, self.capacity, self._batch_channel(), index_T
            )
            if self.training and not recomputing():
                self.dropped_total += self.num_dropped
        if self.sizes["etp"] > 1:
            ids_TK, weights_TK = self._to_parts(ids_TK, weights_TK)
        return ids_TK, weights_TK, identity_T1

    def _dispatched(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> ExpertCall:
        overlap = self.overlap
        if overlap is None:
            return serial_call(self.dispatcher, x_TD, ids_TK, weights_TK, self.label)
        from moe_comm.overlap.executors.choice import dispatch_rows  # all executors, which most layers do not need

        return dispatch_rows(
            self.dispatcher, x_TD, ids_TK, weights_TK, overlap, width=self.experts.ffn, label=self.label
        )

    def _copies_averaged(self) -> int:
        """Each rank's gradient has a part of that of an auxiliary loss over all ranks' tokens. Under DDP and FSDP2 the
        mean of the parts is taken where their sum is needed."""
        gradients = gradients_of(self.experts)
        return group_size(self.router.group) if gradients is not None and gradients.averaged else 1

    def _meet_without_tokens(self, x: Tensor, routing: Routing | None, token_index: Tensor | None) -> None:
        """Take part in what the other ranks exchange before dispatch, where they hear of this rank's fault."""
        if routing is None:
            routing = self.router(x.new_zeros(0, self.router.hidden), x.shape[0] if x.dim() == 3 else 1)
        if self.capacity is not None:
            index_T = None if token_index is None else token_index.reshape(-1)[:0]
            ids_TK, weights_TK = routing.ids_TK[:0], routing.weights_TK[:0]
            apply_capacity(ids_TK, weights_TK, self.num_experts, self.capacity, self._batch_channel(), index_T)

    @cached_property
    def _slice_ids(self) -> Tensor:
        return torch.tensor(self.placement.slice_ids(self.sizes["etp"]), device=self.router.weight.device)

    def _to_parts(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """[T, K * etp] ids of all parts of each token's experts, and their weights. Ids of no expert stay so."""
        if self._slice_ids.device != ids_TK.device:
            self._slice_ids = self._slice_ids.to(ids_TK.device)
        slice_ids, last = self._slice_ids, self.num_experts - 1
        # Past the last expert becomes past the last part, for dispatch to refuse.
        away_TK = torch.where(ids_TK < 0, ids_TK, ids_TK + (slice_ids.numel() - last - 1)).long()
        known_TK1 = ((ids_TK >= 0) & (ids_TK <= last)).unsqueeze(-1)
        parts_TKP = torch.where(known_TK1, slice_ids[ids_TK.clamp(0, last).long()], away_TK.unsqueeze(-1))
        return parts_TKP.flatten(1), weights_TK.unsqueeze(-1).expand_as(parts_TKP).flatten(1)

    def _batch_channel(self) -> Channel | None:
        group = self.router.group
        if group is None or self.capacity is None or self.capacity.scope != "batch":
            return None
        return channel_of(group)

    def _note(self, handle: DispatchHandle) -> None:
        etp = self.sizes["etp"]
        slots = handle.num_tokens * handle.top_k // etp
        dropped = None if self.capacity is None else self.num_dropped
        self.dispatch_stats = DispatchStats(slots, slots - handle.num_dropped // etp, handle.num_rows, dropped)


def _same_seed(group: ProcessGroup | None) -> int:
    """A seed from this process's generator; that of the group's first rank. Collective."""
    seed = torch.randint(2**31, (), device="cpu")
    return int(gather_values(seed, group, "agreeing on a seed")[0])
