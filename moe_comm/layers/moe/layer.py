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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import AbortOnError, Channel
from moe_comm.dispatch import Dispatcher, DispatchHandle, DispatchOptions
from moe_comm.dispatch.expert_call import ExpertCall
from moe_comm.dispatch.operation import tokens_fault
from moe_comm.dispatch.types import DeviceCounts
from moe_comm.errors import ConfigError, InputError, MoeCommError
from moe_comm.kernels.activations import SwiGLU
from moe_comm.kernels.autograd import compute_dtype
from moe_comm.kernels.native import TRITON_DEVICES
from moe_comm.layers.data_parallel.attach import exclude_from_ddp, gradients_of
from moe_comm.layers.data_parallel.gradients import replicated_parameter
from moe_comm.layers.data_parallel.optimizers import mark_parameter
from moe_comm.layers.moe.config import (
    LayerSettings,
    MoEConfig,
    MoEGroups,
    agree_on_seed,
    build_dispatcher,
    build_modules,
    check_parts,
)
from moe_comm.layers.moe.expert_parallel import ExpertParallel, overlap_of
from moe_comm.layers.moe.experts import Experts, ExpertSlice, has_hooks
from moe_comm.layers.moe.router import Router, RouterConfig, Routing
from moe_comm.layers.parallel.collectives import channel_of, group_size
from moe_comm.layers.parallel.recompute import recomputing
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.groups import warn_if_alone
from moe_comm.runtime.memory import as_tensors
from moe_comm.topology import Placement, Sharding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from moe_comm.dispatch.device_call import DeviceHandle
    from moe_comm.dispatch.slots.capacity import Capacity
    from moe_comm.layers.data_parallel.copies import ExpertCopies
    from moe_comm.layers.moe.formula import MoEBlock
    from moe_comm.layers.moe.modules import ModuleOrigin
    from moe_comm.layers.moe.padding import RealTokens
    from moe_comm.layers.moe.shared import SharedExpert
    from moe_comm.overlap.options import Overlap

# Modules that few layers need are imported in functions.

__all__ = ["MoEConfig", "MoELayer"]


@dataclass(frozen=True)
class DispatchStats:
    """Statistics of the (token, slot) pairs of one call. Summed over all ranks, etp * sent equals received.

    Attributes:
        slots: T * K of this rank.
        sent: slots that were dispatched to an expert. The other slots were dropped, or have no real expert.
        received: rows that this rank received for its experts or expert slices.
        dropped: slots that the capacity dropped, a scalar tensor; None without capacity.
    """

    slots: int
    sent: int
    received: int
    dropped: Tensor | None


def _stats_of(etp: int, slots: int, handle: DispatchHandle | DeviceHandle, dropped: Tensor | None) -> DispatchStats:
    counts = handle.rows_per_expert
    assert isinstance(counts, DeviceCounts)
    return DispatchStats(slots, slots - counts.dropped // etp, sum(counts), dropped)


def _stats_of_ids(ids_TK: Tensor, received: int, dropped: Tensor | None) -> DispatchStats:
    return DispatchStats(ids_TK.numel(), int((ids_TK >= 0).sum()), received, dropped)


def _stats_of_whole(handle_of_call: Callable[[], DeviceHandle], dropped: Tensor | None) -> DispatchStats:
    handle = handle_of_call()
    return _stats_of(1, handle.num_tokens * handle.top_k, handle, dropped)


@dataclass(frozen=True, eq=False, slots=True)
class _Tokens:
    """The real tokens of a call, and their routing.

    identity_T1: summed weights of each token's identity experts. real: None without padding.
    """

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    identity_T1: Tensor | None
    real: RealTokens | None
    aux_loss: Tensor | None


class MoELayer(ExpertParallel):
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
        overlap: the executor that runs dispatch, experts and combine (``overlap/executors``). "auto" selects one by a
            cost model (``explain_overlap``). None: serial. The results have the same bits.

    Attributes:
        placement: the expert-parallel ranks that hold each expert, complete or as slices.
        place: coordinates of this rank on the axes "ep" and "etp".
        sizes: sizes of these axes.
        num_dropped: slots that the capacity dropped in the last call, a scalar tensor; None without capacity.
        dropped_total: dropped slots since ``take_loads``; counted in training, and once under activation checkpointing.
        saved_bytes: bytes that the last call keeps on this rank for backward: rows of the experts, inputs of their
            activation and outputs, without the tokens. 0 without a backward pass. Outputs are kept in fp16, with fp8
            GEMMs, and if hooks may read them. No rows are kept on the CPU if experts read tokens in place, and on a GPU
            over ``local``.
        beside: work of the caller while rows, and later results, are in flight (``begin``), as widths of dense MLPs
            with the same FLOPs. With the shared expert, "auto" hides transfers behind it.
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
        part = getattr(experts, "part", ExpertSlice())
        super().__init__(dispatcher, overlap, label, part)
        self.router, self.experts, self.shared = router, experts, shared
        self.capacity = capacity
        self.zero_experts = router.config.zero_experts
        self.beside = (0, 0)
        self.aux_scale: float | Tensor | None = None
        self.origin: ModuleOrigin | None = None
        self.num_dropped: Tensor | None = None
        self._stats: Callable[[], DispatchStats] | None = None
        self.saved_bytes = 0
        dropped = torch.zeros((), dtype=torch.int64, device=router.weight.device)
        self.register_buffer("dropped_total", dropped, persistent=False)
        check_parts(router, experts, dispatcher, self.placement)
        shardings = experts.shardings_over(self.placement)
        if self._attach(experts, shardings, partial(replicated_parameter, router, "weight")):
            exclude_from_ddp(self)

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
        groups, overlap = MoEGroups.of(group), overlap_of(overlap)
        dispatcher = build_dispatcher(config, groups, backend, options, overlap, dtype=dtype, device=device)
        router, experts, shared = build_modules(config, groups, dispatcher, dtype=dtype, device=device)
        layer = cls(router, experts, dispatcher, shared, capacity=config.capacity, label=label, overlap=overlap)
        layer.reset_parameters(agree_on_seed(router.group) if seed is None else seed)
        return layer

    @classmethod
    def from_modules(
        cls,
        router: nn.Module | Callable[[Tensor], Any],
        experts: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module],
        group: ProcessGroup | DeviceMesh | MoEGroups | None = None,
        *,
        top_k: int | None = None,
        routing: RouterConfig | None = None,
        description: MoEBlock | None = None,
        **settings: Unpack[LayerSettings],
    ) -> MoELayer:
        """Build a layer with the weights of a router and experts that are modules. Collective over ``group``.

        All ranks pass modules with the same weights, which are compared. Each rank copies the weights of its experts;
        those of the others are freed when the caller drops the modules. ``to_modules`` is the inverse.

        The experts are MLPs of two or three linear layers. What they compute is recognised, and each expert is compared
        with the result on random rows in fp32, forward and backward, on the rank that will hold it.

        Args:
            router: an ``nn.Linear`` [D, E]; a module or another callable that maps tokens [T, D] to logits [T, E], or
                to expert ids and weights [T, K], or to a ``Routing``; or a ``Router``. An ``nn.Linear`` is copied;
                other modules become a part of the layer. Parameters of other callables belong to the caller.
            experts: a list, iterator or dict of modules [R, D] to [R, D]; or one module with parameters [E, ...] of all
                experts, which is called with [E, R, D], with rows [R, D] in the order of the experts and their counts
                [E], or with rows, ids and weights. On "meta", the layer is on "meta" as well.
            group: see ``build``.
            top_k: number of experts per token, for logits: the softmax over all experts, normalized over the K.
            routing: how to select experts by logits, in place of ``top_k``.
            description: names the parameters of the experts, in place of recognising them; names are relative to
                ``experts``, such as "{}.w1.weight", or to the module with stacked parameters. Its ``route`` and
                ``output`` are not used. It is needed for a module that cannot be called as above, such as an
                ``nn.ParameterDict``; such a module is not compared with the description.
            settings: ``capacity``, ``recompute``, ``experts_per_rank``, ``placement`` and ``expert_gemm_dtype`` of
                ``MoEConfig``; ``backend``, ``options``, ``overlap`` and ``label`` of ``build``; and ``shared``, a
                module whose output for each token is added, and which remains the caller's.

        Raises:
            UnsupportedModel: an expert computes something else, or the experts have different shapes, dropout, buffers,
                hooks or shared parameters, or an ``nn.Linear`` router has hooks that the layer would lose.
            ConfigError: router, experts, ``top_k`` and placement do not fit each other.
            RankMismatch: ranks pass different weights or placements. These errors are raised on every rank.
            TypeError: an unknown setting.
        """
        from moe_comm.layers.moe.modules import ModuleSource  # most layers are built otherwise

        if group is None:
            warn_if_alone("MoELayer.from_modules", "holds all experts and runs them on its own tokens")
        source = ModuleSource(router, experts, top_k, routing, description)
        return source.build(cls, MoEGroups.of(group), settings)

    def to_modules(self, *, rank0_only: bool = False, cpu: bool = False) -> tuple[Any, Any]:
        """Return router and experts as ``from_modules`` took them, with the weights of this layer. Collective.

        The modules are new, and the caller's own. One expert at a time is sent, so a rank needs memory for the result
        and one expert. ``shared`` remains ``layer.shared``.

        Args:
            rank0_only: only rank 0 of the expert group receives the modules, the other ranks (None, None).
            cpu: in CPU memory; else on the device of the layer.

        Raises:
            ConfigError: ``from_modules`` has not built the layer, it is on "meta", or its router was an ``nn.Linear``
                and has a ``correction_bias``.
        """
        from moe_comm.layers.moe.modules import modules_of

        if self.origin is None:
            raise ConfigError("to_modules converts layers that MoELayer.from_modules has built")
        if self.experts.w13.is_meta:
            raise ConfigError(f"layer {self.label!r} is on the meta device: load it before to_modules")
        return modules_of(self, self.router, self.experts, self.origin, rank0_only=rank0_only, cpu=cpu)

    @property
    def dispatch_stats(self) -> DispatchStats | None:
        """Statistics of the last call; None before it. On a GPU, reading them may wait for it."""
        return None if self._stats is None else self._stats()

    @cached_property
    def num_experts(self) -> int:
        """Number of real experts of all ranks together."""
        return self.placement.num_experts

    @property
    def copies(self) -> ExpertCopies | None:
        """Copies of experts on other ranks than their homes; None without slots for copies."""
        return getattr(self.experts, "copies", None)

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

        ``forward`` does so itself after the layer is built, ``relocate`` and ``load_state_dict``. Call this method on
        every rank after any other change of the weights.

        Returns:
            Bytes of this rank's experts that other ranks received; 0 without copies.
        """
        return 0 if self.copies is None else self.copies.publish()

    def prefetch(self) -> None:
        """Start to send weights that the next call will probably lend (``balance``), if weights have changed.

        Optional: the call does so itself. Collective over the expert group. Work between this method and the call hides
        the transfer.
        """
        if self.copies is not None:
            self.copies.prefetch()

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
        from moe_comm.layers.moe.relocation import RowMoves, stacks_to_move

        state = {} if optimizer is None else optimizer.state
        stacks = stacks_to_move(self, self.experts, placement, self.check_placement, state)
        what = f"relocating the experts of layer {self.label!r} to version {placement.version}"
        moves = RowMoves(stacks, self.dispatcher.rank)
        moves.run(self.dispatcher.group, what)
        self.set_placement(placement)
        return moves.sent_bytes

    def check_placement(self, placement: Placement) -> None:
        """Raise ConfigError unless ``placement`` keeps the number of experts and slots of each rank."""
        old = self.placement
        placement.fitting(old.num_experts, old.world)
        if self.dispatcher.options.balance is not None and placement.has_copies:
            raise ConfigError(f"balance of layer {self.label!r} chooses the copies; pass a placement without copies")
        if placement.homes_per_rank != old.homes_per_rank:
            raise ConfigError(
                f"a relocation keeps the number of experts of each rank, {old.homes_per_rank}; the new placement has "
                f"{placement.homes_per_rank}"
            )
        if placement.slots_per_rank != old.slots_per_rank:
            raise ConfigError(
                f"a relocation keeps the slots of each rank, {old.slots_per_rank} with those for copies; the new "
                f"placement has {placement.slots_per_rank}. Set Placement.slots of both to the copies that a rank can "
                "hold"
            )

    def set_placement(self, placement: Placement) -> None:
        """Declare that the weights are those of ``placement``. ``relocate`` moves them; this method moves nothing.

        All ranks call it between steps. The experts' gradients are reset.
        """
        self.check_placement(placement)
        self._use_placement(placement)
        self.dispatcher.expert_placement = placement
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
        return [self.dispatcher, self.router.group, self.router.sequence_group]

    def extra_repr(self) -> str:
        place = f"rank {self.dispatcher.rank} of {self.dispatcher.world}"
        return f"label={self.label!r}, dispatcher={self.dispatcher.name}, {place}"

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
        if torch.compiler.is_dynamo_compiling() and self.is_traced():
            from moe_comm.layers.moe.compiled import call_layer  # few programs compile

            given = (None, None, None) if routing is None else (routing.ids_TK, routing.weights_TK, routing.aux_loss)
            unused = None if routing is None else self.router
            return call_layer(self, (x, token_index, mask, *given), compute_dtype(x), unused)
        return self._forward(x, routing, token_index, mask)

    def _eager(
        self,
        x: Tensor,
        token_index: Tensor | None,
        mask: Tensor | None,
        ids_TK: Tensor | None,
        weights_TK: Tensor | None,
        aux_loss: Tensor | None,
    ) -> Tensor:
        routing = None
        if ids_TK is not None and weights_TK is not None:
            routing = Routing(ids_TK, weights_TK, None, aux_loss)
        return self._forward(x, routing, token_index, mask)

    # A graph break for torch.compile: collectives and varying row counts cannot be traced, and a compiler that fuses or
    # reorders sums would change bits. Unlike torch.compiler.disable, this decorator does not import the compiler, which
    # takes a second, with this module.
    @torch._disable_dynamo
    def _forward(self, x: Tensor, routing: Routing | None, token_index: Tensor | None, mask: Tensor | None) -> Tensor:
        given = routing is not None or token_index is not None or mask is not None
        if not given and type(x) is Tensor and x.device.type in TRITON_DEVICES:
            from moe_comm.layers.moe.whole_call import whole_call  # only on a GPU

            whole = whole_call(self, x)
            if whole is not None:
                whole_TD, handle, self.saved_bytes = whole
                self._stats = partial(_stats_of_whole, handle, None)
                return whole_TD.view(x.shape)
        try:
            tokens = self._route(x, routing, token_index, mask)
        except Exception as error:  # the other ranks would wait in dispatch
            self._abort(self.experts, error)
            raise
        shared_TD: Tensor | None = None
        at_once = routing is None and not torch.is_grad_enabled() and self._takes_one_call(tokens)
        if at_once:
            if self.shared is not None:
                with self.dispatcher.abort_on_error(self.label):  # after it, the other ranks would have returned
                    shared_TD = self.shared(tokens.x_TD)
            y_TD = self._run_at_once(tokens)
            if y_TD is not None:
                return self._add_branches(y_TD, shared_TD, tokens).view(x.shape)
        run = self._given_call(tokens) if tokens.x_TD.device.type in TRITON_DEVICES else None
        if run is not None:
            if not at_once and self.shared is not None:
                with AbortOnError(partial(self._abort, self.experts)):
                    shared_TD = self.shared(tokens.x_TD)
            y_TD, handle, self.saved_bytes = run()
            self._stats = partial(_stats_of_whole, handle, None if self.capacity is None else self.num_dropped)
            return self._add_branches(y_TD, shared_TD, tokens).view(x.shape)
        call = self._dispatch(tokens)
        try:
            if not at_once and self.shared is not None:
                shared_TD = self.shared(tokens.x_TD)
            out_RD = self._run_experts(call)
        except Exception as error:  # the other ranks would wait in combine
            call.abort(error)
            raise
        y_TD = call.combine(out_RD)
        self.saved_bytes = call.saved_bytes
        return self._add_branches(y_TD, shared_TD, tokens).view(x.shape)

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
        with AbortOnError(partial(self._abort, self.experts)):
            tokens = self._route(x, routing, token_index, mask)
        call = self._dispatch(tokens)
        call.complete()  # the caller uses the group before ``compute``
        return MoECall(self, x.shape, tokens, call)

    def _route(self, x: Tensor, routing: Routing | None, token_index: Tensor | None, mask: Tensor | None) -> _Tokens:
        """Check the arguments of a call, and choose the slots of its real tokens."""
        x = self._readable(x, routing, token_index, mask)
        x_TD, real = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), None
        if mask is not None:
            from moe_comm.layers.moe.padding import RealTokens

            real = RealTokens.of(mask)
        index_T = None if token_index is None else token_index.reshape(-1)
        if real is not None:
            x_TD, routing = real.take(x_TD), None if routing is None else real.take_routing(routing)
            index_T = real.take(index_T) if index_T is not None and index_T.shape == real.mask_N.shape else index_T
        if routing is None:
            arguments = {} if real is None else {"mask_N": real.mask_N}  # other routers may not take a mask
            routing = self.router(x_TD, x.shape[0] if x.dim() == 3 else 1, **arguments)
        ids_TK, weights_TK, identity_T1 = self._select_slots(routing, index_T)
        return _Tokens(x_TD, ids_TK, weights_TK, identity_T1, real, routing.aux_loss)

    def _takes_one_call(self, tokens: _Tokens) -> bool:
        """Return whether ``_run_at_once`` may run a call without autograd. Ranks may differ."""
        experts = self.experts
        gradients = gradients_of(experts)
        if (
            type(experts) is not Experts
            or type(self.router) is not Router  # it has checked the weights
            or experts._modules
            or experts.copies is not None
            or experts.gemm_dtype != "same"
            or experts.part.count > 1
            or not isinstance(experts.activation, SwiGLU)
            or any(one is not None and one.dtype != tokens.x_TD.dtype for one in experts._parameters.values())
            or self.slots is not None
            or self.overlap is not None
            or self.in_flight_hook is not None
            or has_hooks(experts, known=None if gradients is None else gradients.before_forward)
        ):
            return False
        return self._shared_may_come_first()

    def _shared_may_come_first(self) -> bool:
        """Return whether a rank may run the shared expert before its dispatch, and others after theirs."""
        if self.shared is None:
            return True
        from moe_comm.layers.moe.shared import SharedExpert

        # A user's module may communicate, at the same point of the call on every rank.
        return type(self.shared) is SharedExpert

    def _run_at_once(self, tokens: _Tokens) -> Tensor | None:
        """Run dispatch, experts and combine by ``Dispatcher.run_layer``; return None if it needs separate calls."""
        experts, dispatcher = self.experts, self.dispatcher
        gradients = gradients_of(experts)
        if gradients is not None:
            with dispatcher.abort_on_error(self.label):
                gradients.before_forward(experts)
        dispatcher.trained = dispatcher.plan_digest = 0
        run = dispatcher.run_layer(
            (tokens.x_TD, tokens.ids_TK, tokens.weights_TK),
            (experts.w13, experts.w2, experts.b13, experts.b2),
            experts.transposed,
            self.label,
        )
        if run is None:
            return None
        y_TD, received = run
        self.saved_bytes = 0
        self._stats = partial(_stats_of_ids, tokens.ids_TK, received, self.num_dropped if self.capacity else None)
        return y_TD

    def _given_call(self, tokens: _Tokens) -> Callable[[], tuple[Tensor, Callable[[], DeviceHandle], int]] | None:
        """Return the run of dispatch, experts and combine as one function on a GPU, or None if they are separate."""
        from moe_comm.layers.moe.whole_call import given_call  # only on a GPU

        experts = self.experts
        if type(experts) is not Experts or not self._shared_may_come_first():
            return None
        x_TD = tokens.x_TD
        if torch.is_autocast_enabled(x_TD.device.type):
            x_TD = self._in_compute_dtype(x_TD)
        device = experts.on_device(x_TD)
        return given_call(self, experts, x_TD, tokens.ids_TK, tokens.weights_TK, device, partial(experts.mlp_for, x_TD))

    def _in_compute_dtype(self, x_TD: Tensor) -> Tensor:
        """Return tokens in the dtype of autocast, which is on."""
        with AbortOnError(partial(self._abort, self.experts)):  # the cast allocates memory
            return x_TD.to(compute_dtype(x_TD))

    def _dispatch(self, tokens: _Tokens) -> ExpertCall:
        """Dispatch the rows, in autocast's dtype if autocast is on."""
        x_TD = tokens.x_TD
        width = getattr(self.shared, "ffn", 0)
        width = width if isinstance(width, int) else 0  # of a user's module
        if torch.is_autocast_enabled(x_TD.device.type):
            x_TD = self._in_compute_dtype(x_TD)
        own = type(self.experts).forward is Experts.forward
        call = self._start_call(
            self.experts,
            x_TD,
            tokens.ids_TK,
            tokens.weights_TK,
            width=self.experts.ffn,
            fp8=getattr(self.experts, "gemm_dtype", "same") == "fp8",
            beside=(width + self.beside[0], self.beside[1]),
            in_place=own,
            on_device=self.experts.on_device(x_TD) if own else "",
            observed=not own or has_hooks(self.experts, foreign=True),
            stacked=own,
        )
        etp, handle = self.sizes["etp"], call.handle
        slots = handle.num_tokens * handle.top_k // etp
        dropped = None if self.capacity is None else self.num_dropped
        stats = partial(_stats_of, etp, slots, handle, dropped)
        if not isinstance(handle.rows_per_expert, DeviceCounts):  # else reading the counts would wait for the device
            stats = partial(DispatchStats, slots, slots - handle.num_dropped // etp, handle.num_rows, dropped)
        self._stats = stats  # once: attributes of modules are slow to set
        if self.in_flight_hook is not None:
            self._call_in_backward(call.rows)
        return call

    def _run_experts(self, call: ExpertCall) -> Tensor:
        with EVENTS.span(Kind.COMPUTE, "experts", layer=self.label):
            rows_per_expert = self._prepare_experts(self.experts, call)
            # Call the module, so that its hooks run: a hook of FSDP gathers the weights.
            out_RD: Tensor = self.experts(call.rows, rows_per_expert, call)
        self._follow_backward(self.experts, call, out_RD)
        return out_RD

    def _add_branches(self, y_TD: Tensor, shared_TD: Tensor | None, tokens: _Tokens) -> Tensor:
        """Add identity experts, the shared expert and the auxiliary loss; return zeros for padding."""
        if tokens.identity_T1 is not None and self.zero_experts.identity:
            identity_TD = tokens.identity_T1 * tokens.x_TD.to(y_TD.dtype)
            y_TD = (y_TD.to(tokens.identity_T1.dtype) + identity_TD).to(y_TD.dtype)
        if shared_TD is not None:
            y_TD = y_TD + shared_TD
        aux_loss = tokens.aux_loss
        if aux_loss is not None and aux_loss.requires_grad:
            from moe_comm.layers.moe.losses import attach_loss

            y_TD = attach_loss(y_TD, aux_loss, self.aux_scale, self._aux_loss_factor())
        return y_TD if tokens.real is None else tokens.real.spread(y_TD)

    def _readable(self, x: Tensor, routing: Routing | None, token_index: Tensor | None, mask: Tensor | None) -> Tensor:
        """Return ``x`` with its values in memory, or raise the error of invalid arguments on all ranks."""
        self._agree_on_executor(x)
        fault = self._publish_if_due(self.experts)
        given = routing is not None
        (x,), unusable = as_tensors(x=x)
        if unusable is None:
            unusable = tokens_fault(x, self.router.hidden)
        if unusable is None and routing is not None:
            _, unusable = as_tensors(ids=routing.ids_TK, weights=routing.weights_TK)
            routing = routing if unusable is None else None
        if unusable is None and mask is not None:
            from moe_comm.layers.moe.padding import mask_fault

            unusable = mask_fault(mask, x, routing)
        fault = fault or unusable
        if fault is not None:
            if given and routing is None:  # it cannot be read, and the other ranks do not call the router
                weights_TK = torch.empty(0, 1, dtype=torch.float32, device=self.dropped_total.device)
                routing = Routing(weights_TK.long(), weights_TK)
            with suppress(InputError):  # caused by the same fault, such as different numbers of sequences
                self._exchange_without_tokens(routing, token_index, x.shape[0] if x.dim() == 3 else 1)
            self._refuse(self.experts, fault)
        return x

    def _select_slots(self, routing: Routing, index_T: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ids and weights to dispatch, and the summed weights of each token's identity experts (or None)."""
        ids_TK, weights_TK = routing.ids_TK, routing.weights_TK
        num_experts, zero = self.num_experts, self.zero_experts
        identity_T1 = None
        if zero.identity or zero.zero:
            from moe_comm.layers.moe.shared import split_zero_experts

            ids_TK, identity_T1 = split_zero_experts(ids_TK, weights_TK, num_experts, zero.identity)
        if self.capacity is not None:
            from moe_comm.dispatch.slots.capacity import apply_capacity

            ids_TK, self.num_dropped = apply_capacity(
                ids_TK, weights_TK, num_experts, self.capacity, self._batch_channel(), index_T
            )
            if self.training and not recomputing():
                self.dropped_total += self.num_dropped
        return ids_TK, weights_TK, identity_T1

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
            # Weights may be on the host until the router's pass; buffers are not offloaded.
            dtype, device = self.router.weight.dtype, self.dropped_total.device
            x_TD = torch.zeros(0, self.router.hidden, dtype=dtype, device=device)
            routing = self.router(x_TD, sequences)
        empty = routing._replace(ids_TK=routing.ids_TK[:0], weights_TK=routing.weights_TK[:0])
        self._select_slots(empty, None if token_index is None else token_index.reshape(-1)[:0])

    def _batch_channel(self) -> Channel | None:
        group = self.router.group
        if group is None or self.capacity is None or self.capacity.scope != "batch":
            return None
        return channel_of(group)


class MoECall:
    """A pending call of an ``MoELayer``, returned by ``MoELayer.begin``. Each rank calls ``compute``, then ``result``:

        call = layer.begin(x)     dispatch starts
        ...                       other work: attention of another micro-batch, a parallel dense branch
        call.compute()            shared expert, while rows are in flight; then the experts
        ...                       other work
        y = call.result()         results are combined

    In backward, autograd runs the same operators in reverse order, so the other work hides the transfers there as well.
    """

    def __init__(self, layer: MoELayer, shape: torch.Size, tokens: _Tokens, call: ExpertCall) -> None:
        self._layer, self._shape, self._tokens, self._call = layer, shape, tokens, call
        self._computed: tuple[Tensor | None, Tensor] | None = None

    def compute(self) -> None:
        """Run the shared expert, and the experts on the rows as they complete; start to send the results."""
        layer = self._layer
        with self._call.abort_on_error():
            shared_TD = None if layer.shared is None else layer.shared(self._tokens.x_TD)
            self._computed = shared_TD, layer._run_experts(self._call)

    def result(self) -> Tensor:
        """Return what ``MoELayer.forward`` returns."""
        if self._computed is None:
            raise MoeCommError("MoECall.result must be called once, after MoECall.compute")
        (shared_TD, out_RD), self._computed = self._computed, None
        y_TD = self._call.combine(out_RD)
        self._layer.saved_bytes = self._call.saved_bytes
        y_TD = self._layer._add_branches(y_TD, shared_TD, self._tokens).view(self._shape)
        del self._tokens, self._call  # the caller may keep this object longer than their memory
        return y_TD
