"""The MoE layer: router, dispatch, experts, combine, and the branches that run in parallel with them.

x ──▶ router ──ids, weights──┐
│                            ▼
├──────────▶ dispatch ──rows by expert──▶ experts ──rows──▶ combine ──▶ + ──▶ y
├──────────▶ shared expert (all tokens) ────────────────────────────────┤
└──────────▶ identity experts: weight * x, no rows are sent ────────────┘

With expert tensor parallelism, etp ranks divide the width of each expert into slices. The dispatcher treats each slice
as an expert: it sends a token to all slices of the token's experts, and combine adds their partial results in fp32:

    ep 2, etp 2, experts 0 1 | 2 3, a token routed to experts 1 and 2, slices a and b

    rank (ep, etp)    0 (0, 0)    1 (0, 1)    2 (1, 0)    3 (1, 1)
    holds             0a 1a       0b 1b       2a 3a       2b 3b
    token is sent to     1a          1b       2a          2b           y = w1 * (1a + 1b) + w2 * (2a + 2b)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.dispatch import Dispatcher, DispatchHandle, DispatchOptions
from moe_comm.dispatch.arguments import as_tensors, tokens_fault
from moe_comm.dispatch.expert_call import ExpertCall
from moe_comm.dispatch.slots.capacity import Capacity, apply_capacity
from moe_comm.errors import InputError, MoeCommError
from moe_comm.kernels.autograd import compute_dtype
from moe_comm.layers.data_parallel.attach import attach_experts, gradients_of
from moe_comm.layers.data_parallel.copies import ExpertCopies
from moe_comm.layers.data_parallel.expert_shard import ExpertShards
from moe_comm.layers.data_parallel.gradients import adapter_fault, replicated_parameter
from moe_comm.layers.data_parallel.optimizers import mark_parameter
from moe_comm.layers.data_parallel.sync import prepare_ddp
from moe_comm.layers.moe.build import agree_on_seed, build_dispatcher, build_modules, check_parts
from moe_comm.layers.moe.call import DispatchStats, MoECall
from moe_comm.layers.moe.config import MoEConfig, MoEGroups
from moe_comm.layers.moe.experts import Experts, ExpertSlice
from moe_comm.layers.moe.losses import attach_loss
from moe_comm.layers.moe.padding import RealTokens, mask_fault
from moe_comm.layers.moe.relocation import move_rows
from moe_comm.layers.moe.relocation_checks import check_relocation, stacks_to_move
from moe_comm.layers.moe.router import Router, Routing
from moe_comm.layers.moe.shared import SharedExpert, split_zero_experts
from moe_comm.layers.moe.slots import SlotTable
from moe_comm.layers.parallel.collectives import channel_of, group_size
from moe_comm.layers.parallel.interleave import Steps, finish
from moe_comm.layers.parallel.module import ParallelModule
from moe_comm.layers.parallel.recompute import recomputing
from moe_comm.overlap.options import Overlap
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.groups import warn_if_alone
from moe_comm.topology import ExpertPlacement, Placement, Sharding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["MoEConfig", "MoELayer"]


class MoELayer(ParallelModule):
    """Mixture-of-Experts layer over the ranks of an expert-parallel group; replaces a feed-forward block.

    Each rank passes its own tokens (any number, including zero) and receives their outputs. All ranks of the group must
    call the layer, and its backward, in the same order.

    Gradients are plain sums. The gradient of an expert covers the losses of all ranks of the group and needs no
    reduction over it. The parameters of the router and of the shared expert are replicated, and their gradients must be
    reduced.

    In deterministic mode on the CPU, the output and the gradients of the input, routing weights and expert weights have
    the same bits for any number of expert-parallel ranks. Expert tensor parallelism changes the order of partial sums.

    Args:
        router: selects real and zero-computation experts. The layer counts over the router's ``group`` as well: a
            capacity of scope "batch" applies to the tokens of that group.
        experts: the experts whose home is this rank, or as many expert slices.
        dispatcher: dispatcher of the experts, or of their slices (``ExpertPlacement.sliced``). Its ``expert_placement``
            is the placement of the complete experts; None: consecutive experts.
        shared: shared expert, or None.
        capacity: maximum number of rows per expert; None drops no row.
        label: name of the layer in error messages.
        overlap: the executor that runs dispatch, experts and combine (``overlap/executors``). "auto" selects serial or
            pipelined by a cost model (``explain_overlap``). None: serial. The results have the same bits.

    Attributes:
        placement: the expert-parallel ranks that hold each expert, complete or as slices.
        place: coordinates of this rank on the axes "ep" and "etp".
        sizes: sizes of these axes.
        num_dropped: slots that the capacity dropped in the last call, a scalar tensor; None without capacity.
        dropped_total: dropped slots since ``take_loads``; counted in training, and once under activation checkpointing.
        dispatch_stats: statistics of the last call.
        beside: widths of dense MLPs with as much work as what the caller runs while rows, and results, are in flight
            (``begin``). With the shared expert, "auto" hides transfers behind it.
        in_flight_hook: called in each backward pass when it has started to send the gradients of the experts' outputs,
            and when it has started to send those of the dispatched rows. It may use the group.
        aux_scale: factor of the auxiliary losses of one call. It must be the factor by which the loss of a micro-batch
            is scaled before backward: 1 / number of micro-batches, times the scale of a loss scaler. None: the factor
            that ``scale_aux_like`` found, which Trainer, accelerate, Lightning and DeepSpeed call; 1 without it.
            An auxiliary loss is a mean over the tokens of a call, on all ranks of the router's group. Over a step it is
            the mean of those of the micro-batches, each with the same weight.
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
        label: str = "",
        overlap: Overlap | Literal["auto"] | None = None,
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self.dispatcher = dispatcher
        self.capacity = capacity
        self.zero_experts = router.config.zero_experts
        self.label, self.overlap = label, Overlap.of(overlap)
        self.beside = (0, 0)
        self.in_flight_hook: Callable[[], None] | None = None
        self.aux_scale: float | Tensor | None = None
        self.num_dropped: Tensor | None = None
        self.dispatch_stats: DispatchStats | None = None
        dropped = torch.zeros((), dtype=torch.int64, device=router.weight.device)
        self.register_buffer("dropped_total", dropped, persistent=False)
        part = getattr(experts, "part", ExpertSlice())
        layout = ExpertPlacement(dispatcher.placement.experts_per_rank[:: part.count])
        self.placement = dispatcher.expert_placement or Placement.of_layout(layout)
        self.place: Mapping[str, int] = {"ep": dispatcher.rank // part.count, "etp": part.index}
        self.sizes: Mapping[str, int] = {"ep": layout.world, "etp": part.count}
        check_parts(router, experts, dispatcher, self.placement, layout)
        self._slots = SlotTable.of(self.placement, part.count)
        if dispatcher.group is not None and dispatcher.world > 1:
            shards = ExpertShards(dispatcher.group, experts.shardings_over(self.placement), self.place, self.sizes)
            dispatcher.has_unknown_experts = False
            attach_experts(experts, shards, partial(replicated_parameter, router, "weight"), label)
            experts.copies = ExpertCopies.of(experts, shards, self.placement, label)
            prepare_ddp(self)

    @classmethod
    def build(
        cls,
        config: MoEConfig,
        group: ProcessGroup | DeviceMesh | MoEGroups | None = None,
        *,
        backend: str = "auto",
        options: DispatchOptions | None = None,
        overlap: Overlap | Literal["auto"] | None = None,
        seed: int | None = None,
        label: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> MoELayer:
        """Build a layer with fresh weights, which do not depend on the number of ranks. Collective over ``group``.

        Args:
            group: ranks that share one set of experts, or all groups of a folded mapping. None: this rank holds every
                expert, as with a group of one rank or ``MoEGroups(None)``; a warning says so if ``torch.distributed``
                has several ranks.
            backend: dispatch backend, see ``make_dispatcher``.
            options: dispatch options.
            overlap: executor, see the class.
            seed: seed of the weights; None: the first rank draws one from torch's generator.
            label: name of the layer in error messages.
            dtype: dtype of the parameters.
            device: device of the parameters. On "meta" the dispatcher is created with the first real device, and
                nothing is collective if ``seed`` is given.

        Raises:
            ConfigError: ``etp`` does not divide the number of ranks or ``config.ffn``, or ``config.placement`` is for
                another number of ranks or experts.
            RankMismatch: ranks pass different placements.
        """
        if group is None:
            warn_if_alone("MoELayer.build", "holds all experts and runs them on its own tokens")
        groups, overlap = MoEGroups.of(group), Overlap.of(overlap)
        dispatcher = build_dispatcher(config, groups, backend, options, overlap, dtype=dtype, device=device)
        router, experts, shared = build_modules(config, groups, dispatcher, dtype=dtype, device=device)
        layer = cls(router, experts, dispatcher, shared, capacity=config.capacity, label=label, overlap=overlap)
        layer.reset_parameters(agree_on_seed(router.group) if seed is None else seed)
        return layer

    @cached_property
    def num_experts(self) -> int:
        """Number of real experts of all ranks together."""
        return self.placement.num_experts

    @property
    def copies(self) -> ExpertCopies | None:
        """Copies of experts on other ranks than their homes; None without slots for copies."""
        return getattr(self.experts, "copies", None)

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of the real experts that this rank holds, complete or as slices, in the order of their rows.

        The experts of the parameters come first, then copies.
        """
        return self.placement.experts_of(self.place["ep"])

    def shardings(self) -> dict[str, Sharding]:
        """Return the sharding of each expert parameter by name in this layer; other parameters are replicated."""
        return {f"experts.{name}": s for name, s in self.experts.shardings_over(self.placement).items()}

    def reset_parameters(self, seed: int, std: float = 0.02) -> None:
        """Initialize the weights. They depend on ``seed`` only, not on the distribution of the experts."""
        device = self.router.weight.device
        generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)
        self.router.reset_parameters(std, generator)
        if self.shared is not None:
            self.shared.reset_parameters(std, generator)
        self.experts.reset_parameters(seed, self.placement.homes_of(self.place["ep"]), std)
        if self.copies is not None:
            self.copies.weights_changed()
        self.dropped_total.zero_()

    def publish_copies(self) -> int:
        """Send the weights of experts to the ranks that hold copies. Collective over the expert group.

        ``forward`` does so itself after the layer is built, ``relocate``, ``moe_comm.sync_gradients`` and
        ``load_state_dict``. Call this method on every rank after any other change of the weights.

        Returns:
            Bytes of this rank's experts that other ranks received; 0 without copies.
        """
        return 0 if self.copies is None else self.copies.publish()

    def relocate(self, placement: Placement, optimizer: torch.optim.Optimizer | None = None) -> int:
        """Move experts to other ranks: weights, and the state of ``optimizer``. Collective over the expert group.

        Call it between steps: the experts' gradients are reset, and no call of the layer may be pending. Only the rows
        of experts that change their home are sent; the next forward pass publishes the copies. The layer computes the
        same bits as before. A state dict of the weights that was taken before is not a part of the new experts.

        Args:
            placement: the new placement, with as many homes and slots on each rank as before.
            optimizer: its state tensors of expert parameters move with them, except scalars. None: state does not move.

        Returns:
            Bytes that this rank sent to other ranks.

        Raises:
            ConfigError: the placement does not fit, a state tensor has not the shape of its parameter, or FSDP shards
                the experts; on every rank.
            RankMismatch: ranks pass different placements; on every rank.
            PeerDied, PeerTimeout: a rank failed. The layer of this rank keeps its old placement.
        """
        stacks = stacks_to_move(self, placement, {} if optimizer is None else optimizer.state)
        what = f"relocating the experts of layer {self.label!r} to version {placement.version}"
        sent_bytes = move_rows(stacks, self.dispatcher.group, self.dispatcher.rank, what)
        self.set_placement(placement)
        return sent_bytes

    def check_placement(self, placement: Placement) -> None:
        """Raise ConfigError unless ``placement`` keeps the number of experts and slots of each rank."""
        check_relocation(self.placement, placement)

    def set_placement(self, placement: Placement) -> None:
        """Declare that the weights are those of ``placement``. ``relocate`` moves them; this method moves nothing.

        All ranks call it between steps. The experts' gradients are reset.
        """
        self.check_placement(placement)
        self.placement = self.dispatcher.expert_placement = placement
        self._slots = SlotTable.of(placement, self.sizes["etp"])
        gradients = gradients_of(self.experts)
        if gradients is not None:
            gradients.shards = replace(gradients.shards, shardings=self.experts.shardings_over(placement))
        for name, param in self.experts.named_parameters():
            param.grad = None
            if gradients is not None:
                mark_parameter(param, gradients.shards, name)
        if self.copies is not None:
            self.copies.set_placement(placement)

    def shared_by_copies(self) -> list[Any]:
        """Return the objects that communicate with other processes."""
        return [self.dispatcher, self.router.group, self.router.sequence_group]

    def extra_repr(self) -> str:
        place = f"rank {self.dispatcher.rank} of {self.dispatcher.world}"
        return f"label={self.label!r}, dispatcher={self.dispatcher.name}, {place}"

    # A graph break for torch.compile: collectives and varying row counts cannot be traced, and a compiler that fuses or
    # reorders sums would change bits. Unlike torch.compiler.disable, this decorator does not import the compiler, which
    # takes a second, with this module.
    @torch._disable_dynamo
    def forward(
        self,
        x: Tensor,
        routing: Routing | None = None,
        token_index: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Run the layer on this rank's tokens.

        Args:
            x: [..., D]; with three dimensions, the first one counts sequences, for the sequence-wise balance loss.
            routing: routing to use instead of the router's.
            token_index: int64, flat or in the leading shape of ``x``: the position of each token in the global
                micro-batch. With it, a capacity of scope "batch" drops the same slots for every mapping. None: tokens
                are ordered by rank.
            mask: bool, flat or in the leading shape of ``x``: False for padding, which is not routed, counted, sent or
                computed, also by the shared expert. None: no padding. Ranks may differ in it.

        Returns:
            A tensor of the shape of ``x``, in its dtype or autocast's; zeros for padding. Real tokens have the bits of
            a call without padding.

        Raises:
            InputError, RoutingError, RankMismatch: invalid input; raised on all ranks, before rows move.
            PeerDied, PeerTimeout: a rank failed, or did not call in time.
        """
        return finish(self._steps(x, routing, token_index, mask))

    @torch._disable_dynamo
    def begin(
        self,
        x: Tensor,
        routing: Routing | None = None,
        token_index: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> MoECall:
        """Start ``forward`` and return after the tokens are dispatched; ``MoECall`` runs the rest.

        If the layer overlaps and rows are sent over the network, work between the calls hides the transfers, in forward
        and backward. Otherwise no transfer is in flight between the calls. Arguments, results and errors are those of
        ``forward``.
        """
        return MoECall(self._steps(x, routing, token_index, mask, in_parts=True))

    def _steps(
        self,
        x: Tensor,
        routing: Routing | None,
        token_index: Tensor | None,
        mask: Tensor | None,
        in_parts: bool = False,
    ) -> Steps[Tensor]:
        """Run one call. Yields where other work can hide transfers: after dispatch, and after the experts.

        in_parts: the caller uses the group between the steps, so the dispatch must not occupy it.
        """
        with self.dispatcher.abort_on_error(self.label):
            x = self._readable(x, routing, token_index, mask, in_parts)
            x_TD, real = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), RealTokens.of(mask)
            index_T = None if token_index is None else token_index.reshape(-1)
            if real is not None:
                x_TD, routing = real.take(x_TD), None if routing is None else real.take_routing(routing)
                index_T = real.take(index_T) if index_T is not None and index_T.shape == real.mask_N.shape else index_T
            if routing is None:
                arguments = {} if real is None else {"mask_N": real.mask_N}  # a router of the caller may not have it
                routing = self.router(x_TD, x.shape[0] if x.dim() == 3 else 1, **arguments)
            ids_TK, weights_TK, identity_T1 = self._select_slots(routing, index_T)
            cast_TD = x_TD.to(compute_dtype(x_TD)) if torch.is_autocast_enabled(x_TD.device.type) else x_TD
        call = self._dispatch(cast_TD, ids_TK, weights_TK)
        self._record_stats(call.handle)
        if in_parts:
            call.complete()
        self._add_hook(call.rows)
        yield
        copies = self._used_copies(call)
        with call.abort_on_error():
            if copies is not None:
                copies.materialize()
            shared_TD = None if self.shared is None else self.shared(x_TD)
            with EVENTS.span(Kind.COMPUTE, "experts", layer=self.label):
                # Call the module, so that its hooks run: FSDP gathers the weights in one.
                rows = self.experts(call.rows, self._computed(call), call.compute)
            self._add_hook(rows)
            if copies is not None:  # after the hook, in which other layers may use the stack
                copies.materialize_in_backward(rows)
        yield
        y_TD = call.combine(rows)
        if identity_T1 is not None and self.zero_experts.identity:
            y_TD = (y_TD.to(identity_T1.dtype) + identity_T1 * x_TD.to(y_TD.dtype)).to(y_TD.dtype)
        if shared_TD is not None:
            y_TD = y_TD + shared_TD
        if routing.aux_loss is not None and routing.aux_loss.requires_grad:
            y_TD = attach_loss(y_TD, routing.aux_loss, self.aux_scale, self._aux_loss_factor())
        return (y_TD if real is None else real.spread(y_TD)).view(x.shape)

    def _add_hook(self, rows: Tensor) -> None:
        """Call ``in_flight_hook`` in backward before the operator that returned ``rows``."""
        hook = self.in_flight_hook
        if hook is not None and rows.requires_grad:
            rows.register_hook(lambda _: hook())

    def _readable(
        self, x: Tensor, routing: Routing | None, token_index: Tensor | None, mask: Tensor | None, in_parts: bool
    ) -> Tensor:
        """Return ``x`` with its values in memory, or raise the error of invalid arguments on all ranks."""
        copies = getattr(self.experts, "copies", None)  # without the call of a property
        fault: MoeCommError | None = None if copies is None else copies.publish_if_due(later=in_parts)
        if self.dispatcher.world > 1:
            fault = adapter_fault(self.experts, self.label) or fault
        given = routing is not None
        (x,), unusable = as_tensors(x=x)
        if unusable is None:
            unusable = tokens_fault(x, self.router.hidden)
        if unusable is None and routing is not None:
            _, unusable = as_tensors(ids=routing.ids_TK, weights=routing.weights_TK)
            routing = routing if unusable is None else None
        if unusable is None:
            unusable = mask_fault(mask, x, routing)
        fault = fault or unusable
        if fault is not None:
            if given and routing is None:  # it cannot be read, and the other ranks do not call the router
                weights_TK = x.new_empty(0, 1, dtype=torch.float32, device=self.router.weight.device)
                routing = Routing(weights_TK.long(), weights_TK)
            with suppress(InputError):  # of the same fault, as of ranks with other numbers of sequences
                self._exchange_without_tokens(routing, token_index, x.shape[0] if x.dim() == 3 else 1)
            self.dispatcher.refuse(fault, label=self.label)
        return x

    def _select_slots(self, routing: Routing, index_T: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ids and weights to dispatch, and the summed weights of each token's identity experts (or None)."""
        ids_TK, weights_TK = routing.ids_TK, routing.weights_TK
        num_experts, zero = self.num_experts, self.zero_experts
        identity_T1 = None
        if zero.identity or zero.zero:
            ids_TK, identity_T1 = split_zero_experts(ids_TK, weights_TK, num_experts, zero.identity)
        if self.capacity is not None:
            ids_TK, self.num_dropped = apply_capacity(
                ids_TK, weights_TK, num_experts, self.capacity, self._batch_channel(), index_T
            )
            if self.training and not recomputing():
                self.dropped_total += self.num_dropped
        if self._slots is not None:
            ids_TK, weights_TK = self._slots(ids_TK, weights_TK)
        return ids_TK, weights_TK, identity_T1

    def _dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> ExpertCall:
        overlap, scaled = self.overlap, getattr(self.experts, "gemm_dtype", "same") == "fp8"
        if (gradients := gradients_of(self.experts)) is not None:
            self.dispatcher.trained = gradients.trained(self.experts, weights_TK)
        if overlap is None:
            return ExpertCall.start(self.dispatcher, x_TD, ids_TK, weights_TK, self.label, scaled)
        from moe_comm.overlap.executors.choice import beside_columns, dispatch_rows  # slow: imports all executors

        shared = getattr(self.shared, "ffn", 0)
        top_k = ids_TK.shape[1]
        return dispatch_rows(
            self.dispatcher,
            x_TD,
            ids_TK,
            weights_TK,
            overlap,
            width=self.experts.ffn,
            beside=(beside_columns(shared + self.beside[0], top_k), beside_columns(self.beside[1], top_k)),
            label=self.label,
            scaled=scaled,
        )

    def _computed(self, call: ExpertCall) -> tuple[int, ...]:
        """Return the rows of the slots to compute with: without the slots for copies while there is no copy."""
        rows_per_expert, homes = call.handle.rows_per_expert, self.placement.homes_per_rank[self.place["ep"]]
        empty = call.skips_empty_slots and homes and not self.placement.has_copies
        return rows_per_expert[:homes] if empty else rows_per_expert

    def _used_copies(self, call: ExpertCall) -> ExpertCopies | None:
        """Return the copies if a rank may compute with their slots. Equal on all ranks, unlike ``_computed``."""
        copies = getattr(self.experts, "copies", None)  # without the call of a property
        if copies is None or (call.skips_empty_slots and not self.placement.has_copies):
            return None
        return copies  # type: ignore[no-any-return]

    def _aux_loss_factor(self) -> int:
        """Return the factor that compensates the mean over ranks that DDP and FSDP2 take of the auxiliary gradients.

        Each rank's gradient covers its part of an auxiliary loss over the tokens of all ranks, so the parts must be
        summed.
        """
        gradients = gradients_of(self.experts)
        return group_size(self.router.group) if gradients is not None and gradients.averaged else 1

    def _exchange_without_tokens(self, routing: Routing | None, token_index: Tensor | None, sequences: int) -> None:
        """Take part in the exchanges before dispatch without tokens, so that all ranks reach the failing dispatch."""
        if routing is None:
            weight = self.router.weight
            x_TD = torch.zeros(0, self.router.hidden, dtype=weight.dtype, device=weight.device)
            routing = self.router(x_TD, sequences)
        empty = routing._replace(ids_TK=routing.ids_TK[:0], weights_TK=routing.weights_TK[:0])
        self._select_slots(empty, None if token_index is None else token_index.reshape(-1)[:0])

    def _batch_channel(self) -> Channel | None:
        group = self.router.group
        if group is None or self.capacity is None or self.capacity.scope != "batch":
            return None
        return channel_of(group)

    def _record_stats(self, handle: DispatchHandle) -> None:
        etp = self.sizes["etp"]
        slots = handle.num_tokens * handle.top_k // etp
        dropped = None if self.capacity is None else self.num_dropped
        self.dispatch_stats = DispatchStats(slots, slots - handle.num_dropped // etp, handle.num_rows, dropped)
