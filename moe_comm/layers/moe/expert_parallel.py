"""The state of an expert-parallel layer on one rank, and the transfer of its rows. All kinds of layers share this code.

    _start_call        ids ─▶ slots ─▶ dispatch ─▶ rows of this rank's experts
    _prepare_experts   lent experts get their weights; which row counts to compute with
    (the layer)        experts on the rows
    _follow_backward   what runs in backward before the experts
    call.combine       sums of each token's results

``MoELayer`` and ``EPExperts``, the experts of swapped Hugging Face blocks, are subclasses. The registries of
transformers keep an instance for each experts module.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import torch
from torch import Tensor, nn

from moe_comm.comm.channel import needs_report
from moe_comm.dispatch import Dispatcher
from moe_comm.dispatch.expert_call import ExpertCall, serial_call, uncounted_call
from moe_comm.dispatch.types import DeviceCounts, OnDevice
from moe_comm.errors import MoeCommError
from moe_comm.kernels.autograd import compute_dtype
from moe_comm.layers.data_parallel.attach import attach_experts
from moe_comm.layers.data_parallel.expert_shard import ExpertShards
from moe_comm.layers.data_parallel.gradients import adapter_fault
from moe_comm.layers.moe.experts import Experts, ExpertSlice
from moe_comm.layers.parallel.module import ParallelModule
from moe_comm.topology import ExpertPlacement, Placement, Sharding
from moe_comm.topology.balance import intervals, rows_of_ranks, share_rows

if TYPE_CHECKING:
    from moe_comm.layers.data_parallel.copies import CallPlan, ExpertCopies
    from moe_comm.layers.data_parallel.lent_call import LentCall
    from moe_comm.overlap.options import Overlap


def overlap_of(overlap: Overlap | Literal["auto"] | None) -> Overlap | None:
    """Return ``Overlap.of(overlap)``; a layer without overlap does not load the settings."""
    if overlap is None:
        return None
    from moe_comm.overlap.options import Overlap

    return Overlap.of(overlap)


class SlotTable:
    """Maps the global expert ids of a layer to ids of the slots to which a dispatcher sends the tokens of an expert.

    A slot is a position among the experts that a rank holds, or one slice of it with expert tensor parallelism. The
    slots of a rank have consecutive ids, so a dispatcher needs no table:

        owners of experts 0..3: ranks 1 0 1 0            slots of rank 0: 0 1    rank 1: 2 3
        expert ids  0 1 2 3   ─▶   slot ids  2 0 3 1

    The rows of an expert with copies are divided over its owners. Each rank divides its own rows, in the order of
    (token, slot), into one interval per owner. Their lengths follow from the rank's own counts
    (``share_rows``), so nothing is exchanged. With ``balance``, the intervals are those of a plan for all ranks' rows.

    Args:
        placement: ranks of each expert.
        parts: number of slices of each expert; each slice has its own slot.
    """

    def __init__(self, placement: Placement, parts: int) -> None:
        slices = placement.layout.slice_ids(parts)
        self._slices_SP = torch.tensor(slices, dtype=torch.int64, device="cpu")
        self._placement, self._owner_slots = placement, placement.slot_ids()
        # Offset from an expert id to its slot id: 0 for negative ids; for ids past the last expert, the number of slots
        # minus experts.
        by_expert = [[slot - expert for slot in slices[home]] for expert, (home, *_) in enumerate(self._owner_slots)]
        more = sum(placement.slots_per_rank) * parts - placement.num_experts
        self._added_EP = torch.tensor([[0] * parts, *by_expert, [more] * parts], dtype=torch.int64, device="cpu")

    def __call__(self, ids_TK: Tensor, weights_TK: Tensor, plan: CallPlan | None = None) -> tuple[Tensor, Tensor]:
        """Return [T, K * parts] ids of the slots of each token's experts, and their weights.

        Negative ids remain. An id past the last expert becomes an id past the last slot, which dispatch rejects.
        """
        if self._added_EP.device != ids_TK.device:
            self._added_EP, self._slices_SP = (one.to(ids_TK.device) for one in (self._added_EP, self._slices_SP))
        parts = self._added_EP.shape[1]
        ids_TK = ids_TK.long()
        ids_TKP = ids_TK.unsqueeze(-1) + self._added_EP[ids_TK.clamp(-1, self._placement.num_experts) + 1]
        ids_N, slots_NP = ids_TK.reshape(-1), ids_TKP.view(-1, parts)
        for expert, slots, lengths in self._cuts(ids_N, plan):
            # With the size, the CPU does not wait for the GPU.
            rows_N = (ids_N == expert).nonzero_static(size=sum(lengths)).squeeze(1)
            for slot, rows in zip(slots, rows_N.split(lengths), strict=True):
                slots_NP[rows] = self._slices_SP[slot]
        if parts == 1:
            return ids_TKP.squeeze(-1), weights_TK
        return ids_TKP.flatten(1), weights_TK.unsqueeze(-1).expand_as(ids_TKP).flatten(1)

    def _cuts(self, ids_N: Tensor, plan: CallPlan | None) -> Iterator[tuple[int, list[int], list[int]]]:
        """Yield the experts that several ranks compute: id, slots of the home and of the others, and the number of this
        rank's rows for each of them, in the order of (token, slot)."""
        placement, experts = self._placement, self._placement.num_experts
        if plan is not None:
            lent, counts = plan.lent, plan.counts
        elif placement.has_copies:
            keys_N = torch.where((ids_N >= 0) & (ids_N < experts), ids_N, experts)
            own_E = torch.bincount(keys_N, minlength=experts + 1).tolist()[:experts]
            lent, counts = share_rows(own_E, placement), (own_E, [0] * experts, own_E)
        else:
            return
        first_W = [a + b for a, b in zip(placement.layout.offsets, placement.homes_per_rank, strict=False)]
        slots: dict[int, list[int]] = {}
        for at, (expert, rank, _) in enumerate(lent):
            held = self._owner_slots[expert]
            copy = held[placement.owners[expert].index(rank)] if plan is None else first_W[rank] + plan.place[at]
            slots.setdefault(expert, held[:1]).append(copy)
        for expert, lengths in intervals(lent, *counts).items():
            yield expert, slots[expert], lengths


LENT_COUNTS = ("rows", "fixed", "busiest", "calls", "experts", "resident", "bytes")
"""Counts of a layer that lends experts, in training. Over all calls: rows of all ranks; rows of the busiest rank, times
the number of ranks, with all experts at home and as computed; calls; lent experts, and those whose weights were sent
before the call. Then the bytes that this rank sent for copies. Recomputed calls count, so compare sums of calls only
with each other."""
_layers: weakref.WeakValueDictionary[int, ExpertParallel] = weakref.WeakValueDictionary()
_numbers = count()


def layer_with(number: int) -> ExpertParallel:
    """Return the layer whose ``compiled_id`` has the value ``number``."""
    return _layers[number]


class ExpertParallel(ParallelModule):
    """Dispatcher, placement, slots, copies and shards of the experts of one layer.

    ``experts`` is in all methods the module with the parameters of this rank's experts, which the caller may replace.

    Args:
        dispatcher: dispatcher of the experts, or of their slices.
        overlap: executor; None overlaps nothing.
        part: slice of each expert that this rank holds; None: complete experts.

    Attributes:
        placement: the expert-parallel ranks that hold each expert, complete or as slices.
        place: coordinates of this rank on the axes "ep" and "etp".
        sizes: sizes of these axes.
        slots: ids of slots by id of an expert; None if they are equal.
        last_plan: the experts that were lent in the last call, and the rows of each rank; None without
            ``DispatchOptions.balance``.
        in_flight_hook: see ``MoELayer``.
        compiled_id: the layer's number in the graphs of ``torch.compile`` (``compiled.py``). A tensor, which is an
            input of a graph, so layers of equal modules use one graph.
    """

    compiled_id: Tensor

    def __init__(
        self,
        dispatcher: Dispatcher,
        overlap: Overlap | Literal["auto"] | None = None,
        label: str = "",
        part: ExpertSlice | None = None,
    ) -> None:
        super().__init__()
        part = part or ExpertSlice()
        self.dispatcher, self.overlap, self.label = dispatcher, overlap_of(overlap), label
        layout = ExpertPlacement(dispatcher.placement.experts_per_rank[:: part.count])
        self.place: Mapping[str, int] = {"ep": dispatcher.rank // part.count, "etp": part.index}
        self.sizes: Mapping[str, int] = {"ep": layout.world, "etp": part.count}
        self._use_placement(dispatcher.expert_placement or Placement.of_layout(layout))
        self.last_plan: CallPlan | None = None
        self._lent_counts, self._sent_bytes = [0] * (len(LENT_COUNTS) - 1), 0
        self.in_flight_hook: Callable[[], None] | None = None
        self._number()

    def _number(self) -> None:
        number = next(_numbers)
        _layers[number] = self
        self.compiled_id = torch.tensor(number, dtype=torch.int64, device="cpu")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = super().__deepcopy__(memo)
        copied._number()
        return copied

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied._number()
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number()

    def is_traced(self) -> bool:
        """Return whether ``torch.compile`` traces this call, and ``compiled.py`` supports the parameters.

        FSDP replaces sharded parameters inside the call, and copies of experts have no parameters of their own.
        """
        if not torch.compiler.is_dynamo_compiling() or getattr(self, "copies", None) is not None:
            return False
        return all(type(p) is nn.Parameter for p in self.parameters())

    def _eager(self, *inputs: Any) -> Tensor:
        """Run the forward pass. The inputs are those of ``compiled.call_layer``."""
        raise NotImplementedError

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of the real experts that this rank holds, complete or as slices, in the order of their rows.

        The experts of the parameters come first, then copies.
        """
        return self.placement.experts_of(self.place["ep"])

    def shared_by_copies(self) -> list[Any]:
        """Return the objects that communicate with other processes."""
        return [self.dispatcher]

    def _attach(
        self, experts: Any, shardings: Mapping[str, Sharding], replicated: Callable[[], nn.Parameter | None]
    ) -> bool:
        """Install the hooks of distributed parameters of ``experts``; see ``attach_experts``. Return False on one
        rank."""
        dispatcher = self.dispatcher
        if dispatcher.group is None or dispatcher.world == 1:
            return False
        shards = ExpertShards(dispatcher.group, shardings, self.place, self.sizes)
        dispatcher.has_unknown_experts = False
        attach_experts(experts, shards, replicated, self.label)
        experts.copies = None
        if (balance := dispatcher.options.balance) is not None:
            capacity = None if dispatcher.name != "peer_to_peer" else dispatcher.options.peer_to_peer.capacity_rows
            own = type(experts).forward is Experts.forward  # others, and overlap, need row counts on the CPU
            if capacity is not None and own and self.overlap is None:
                from moe_comm.dispatch.peer_to_peer.lending import LendingPrimitives
                from moe_comm.layers.data_parallel.device_lending import DeviceLentExperts

                assert isinstance(dispatcher, LendingPrimitives)
                experts.copies = DeviceLentExperts(dispatcher, experts, shards, self.placement, balance, self.label)
            else:
                from moe_comm.layers.data_parallel.lending import LentExperts

                in_place = dispatcher.name == "shared_memory"
                experts.copies = LentExperts(experts, shards, self.placement, balance, in_place, self.label)
        elif self.placement.slots_per_rank != self.placement.homes_per_rank:  # slots for copies
            from moe_comm.layers.data_parallel.copies import ExpertCopies

            experts.copies = ExpertCopies(experts, shards, self.placement, self.label)
        return True

    def _lend(self, experts: Any, ids_TK: Tensor | None, on_device: Tensor | None = None) -> LentCall | None:
        """Choose the experts to lend in the next call, and send their weights. Collective with ``balance``.

        Args:
            ids_TK: global expert ids; None: this rank raises an error in its next dispatch.
            on_device: the tokens, if row counts stay on the device.

        Returns:
            The call; None without ``balance``.
        """
        copies: Any = getattr(experts, "copies", None)
        if copies is None or self.dispatcher.options.balance is None:
            return None
        if on_device is not None:
            lent: LentCall = copies.begin_on_device(on_device, ids_TK, self.training)
        else:
            lent = copies.begin(ids_TK)
        if (adapters := getattr(experts, "adapters", None)) and lent.plan.lent:
            copies.lend_adapters(lent, adapters)
        self.last_plan = plan = lent.plan
        if self.training and on_device is None:
            loads_E, world = plan.counts[0], self.placement.world
            fixed = max(rows_of_ranks(loads_E, self.placement.homes, world, ()))
            counts = (sum(loads_E), fixed * world, max(plan.rows) * world, 1, len(plan.lent), plan.resident)
            self._lent_counts = [a + b for a, b in zip(self._lent_counts, counts, strict=True)]
        return lent

    def take_lent(self, copies: ExpertCopies | None) -> Tensor:
        """Return ``LENT_COUNTS`` since the last call, int64. copies: those of the experts."""
        sent = 0 if copies is None else copies.published_bytes
        counts = torch.tensor([*self._lent_counts, sent - self._sent_bytes], dtype=torch.int64, device="cpu")
        self._lent_counts, self._sent_bytes = [0] * len(self._lent_counts), sent
        tally = None if copies is None else copies.take_tally()
        return counts if tally is None else tally + counts.to(tally.device)

    def _plans_on_device(self, experts: Any) -> bool:
        """Return whether the next call plans on the device. Does not depend on its tokens, which one rank may lack."""
        copies: ExpertCopies | None = getattr(experts, "copies", None)
        if copies is None or not copies.plans_on_device or self.overlap is not None:
            return False
        like = experts.w13.new_empty(0, dtype=compute_dtype(experts.w13))
        return bool(experts.on_device(like)) and self.dispatcher.keeps_counts(like)

    def _lend_nothing(self, experts: Any) -> None:
        """Take part in what the other ranks do before their plan on the device, or their dispatch. Collective."""
        if self._plans_on_device(experts):
            experts.copies.prepare()
        else:
            self._lend(experts, None)

    def _refuse(self, experts: Any, fault: MoeCommError) -> NoReturn:
        """Raise ``fault`` of this rank on every rank, in place of the next dispatch."""
        self._lend_nothing(experts)
        self.dispatcher.refuse(fault, label=self.label)

    def _abort(self, experts: Any, error: Exception) -> None:
        """Report an exception before a dispatch to the other ranks; see ``Dispatcher.abort``."""
        if needs_report(error, self.dispatcher.comm):
            with suppress(MoeCommError):  # the other ranks plan before they dispatch
                self._lend_nothing(experts)
        self.dispatcher.abort(error, label=self.label)

    def _use_placement(self, placement: Placement) -> None:
        parts = self.sizes["etp"]
        self.placement = placement
        self.slots: SlotTable | None = None
        if parts > 1 or not placement.is_contiguous:  # else the id of each expert is the id of its slot
            self.slots = SlotTable(placement, parts)

    def _agree_on_executor(self, x: Any) -> None:
        """Call ``agree_on_choice`` for tokens [..., D], which may be invalid. Collective, so it precedes all checks."""
        if self.overlap is not None and self.overlap.may_use_kernels:
            from moe_comm.overlap.executors.choice import agree_on_choice  # slow: imports all executors

            agree_on_choice(self.dispatcher, math.prod(x.shape[:-1]) if isinstance(x, Tensor) and x.dim() else 0)

    def _publish_if_due(self, experts: nn.Module) -> MoeCommError | None:
        """Publish the copies of experts if needed. Publishing is collective, so it precedes all checks of a call.

        Returns:
            The error of this rank's experts, or None.
        """
        copies: ExpertCopies | None = getattr(experts, "copies", None)
        fault: MoeCommError | None = None if copies is None else copies.publish_if_due()
        if experts._modules and self.dispatcher.world > 1:
            fault = adapter_fault(experts, self.label) or fault
        return fault

    def _start_call(
        self,
        experts: nn.Module,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        width: int = 0,
        fp8: bool = False,
        beside: tuple[int, int] = (0, 0),
        in_place: bool = False,
        on_device: OnDevice = "",
        observed: bool = False,
        stacked: bool = False,
    ) -> ExpertCall:
        """Dispatch the rows of a call. Collective.

        Args:
            x_TD: tokens in the dtype of the experts.
            ids_TK: global expert ids; -1 drops a slot.
            width: F of the experts.
            fp8: the experts have fp8 GEMMs.
            beside: work of the caller while rows, and later results, are in flight, as widths of dense MLPs with the
                same FLOPs.
            in_place: whether the experts can read rows in place; the same on every rank.
            on_device: what the experts can be computed from without row counts on the CPU.
            observed: see ``serial_call``. stacked: see ``dispatch_rows``.
        """
        dispatcher = self.dispatcher
        gradients = getattr(experts, "expert_gradients", None)
        if gradients is not None:
            dispatcher.trained = gradients.trained(experts, weights_TK.requires_grad)
        lent: LentCall | None = None
        if getattr(experts, "copies", None) is None:
            uncounted = bool(on_device) and self.overlap is None and dispatcher.keeps_counts(x_TD)
        else:
            uncounted = self._plans_on_device(experts)
        if self.slots is not None:
            with dispatcher.abort_on_error(self.label):
                lent = self._lend(experts, ids_TK, x_TD if uncounted else None)
                if lent is not None and lent.slots_TK is not None:
                    ids_TK = lent.slots_TK
                else:
                    ids_TK, weights_TK = self.slots(ids_TK, weights_TK, None if lent is None else lent.plan)
        dispatcher.plan_digest = 0 if lent is None else lent.plan.digest
        if on_device == "tokens" and self.overlap is None and self.in_flight_hook is None:
            from moe_comm.dispatch.device_call import device_call  # only for experts on a GPU

            on_gpu = device_call(dispatcher, x_TD, ids_TK, weights_TK, self.label)
            if on_gpu is not None:
                return on_gpu
        if uncounted:
            call = uncounted_call(dispatcher, x_TD, ids_TK, weights_TK, label=self.label, observed=observed)
            call.lent = lent
            return call
        # Lent experts that FSDP shards communicate between the dispatch and combine, also in backward.
        overlap = None if lent is not None and lent.enter is not None and lent.plan.lent else self.overlap
        if overlap is None:
            call = serial_call(
                dispatcher, x_TD, ids_TK, weights_TK, label=self.label, scaled=fp8, in_place=in_place, observed=observed
            )
            call.lent = lent
            return call
        from moe_comm.overlap.executors.choice import beside_columns, dispatch_rows  # slow: imports all executors

        top_k = ids_TK.shape[1]
        call = dispatch_rows(
            dispatcher,
            x_TD,
            ids_TK,
            weights_TK,
            overlap,
            width=width,
            beside=(beside_columns(beside[0], top_k), beside_columns(beside[1], top_k)),
            label=self.label,
            scaled=fp8,
            in_place=in_place,
            observed=observed,
            stacked=stacked,
        )
        call.lent = lent
        return call

    def _prepare_experts(self, experts: nn.Module, call: ExpertCall) -> tuple[int, ...]:
        """Send the weights of lent experts that are not in their slots. Collective if there are any.

        Returns:
            Row counts of the slots to compute with.
        """
        counts, copies, lent = call.handle.rows_per_expert, getattr(experts, "copies", None), call.lent
        if copies is None or lent is None:
            return counts
        if lent.values:
            copies.materialize(lent.plan)
        return counts if isinstance(counts, DeviceCounts) else counts[: lent.slots]

    def _follow_backward(self, experts: nn.Module, call: ExpertCall, out_RD: Tensor) -> None:
        """Register the hooks that run in backward before the experts that computed ``out_RD``."""
        if self.in_flight_hook is not None:
            self._call_in_backward(out_RD)
        copies, lent = getattr(experts, "copies", None), call.lent
        if copies is not None and lent is not None and lent.lends and out_RD.requires_grad:
            out_RD.register_hook(lambda _: copies.materialize(lent.plan))  # after the hook, which runs other layers

    def _call_in_backward(self, rows: Tensor) -> None:
        """Call ``in_flight_hook`` in backward before the operator that returned ``rows``."""
        hook = self.in_flight_hook
        if hook is not None and rows.requires_grad:
            rows.register_hook(lambda _: hook())
