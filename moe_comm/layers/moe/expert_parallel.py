"""The state of an expert-parallel layer on one rank, and the transfer of its rows. All kinds of layers share this code.

    _start_call        ids ─▶ slots ─▶ dispatch ─▶ rows of this rank's experts
    _prepare_experts   copies of experts get their weights; which row counts to compute with
    (the layer)        experts on the rows
    _follow_backward   what runs in backward before the experts
    call.combine       sums of each token's results

``MoELayer`` and ``EPExperts``, the experts of swapped Hugging Face blocks, are subclasses. The registries of
transformers keep an instance for each experts module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from moe_comm.dispatch import Dispatcher
from moe_comm.dispatch.expert_call import ExpertCall
from moe_comm.errors import MoeCommError
from moe_comm.layers.data_parallel.attach import attach_experts
from moe_comm.layers.data_parallel.expert_shard import ExpertShards
from moe_comm.layers.data_parallel.gradients import adapter_fault
from moe_comm.layers.moe.experts import ExpertSlice
from moe_comm.layers.parallel.module import ParallelModule
from moe_comm.topology import ExpertPlacement, Placement, Sharding

if TYPE_CHECKING:
    from moe_comm.layers.data_parallel.copies import ExpertCopies
    from moe_comm.layers.moe.slots import SlotTable
    from moe_comm.overlap.options import Overlap


def overlap_of(overlap: Overlap | Literal["auto"] | None) -> Overlap | None:
    """Return ``Overlap.of(overlap)``; a layer without overlap does not load the settings."""
    if overlap is None:
        return None
    from moe_comm.overlap.options import Overlap

    return Overlap.of(overlap)


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
        in_flight_hook: see ``MoELayer``.
    """

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
        self.in_flight_hook: Callable[[], None] | None = None

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
        if self.placement.slots_per_rank != self.placement.homes_per_rank:  # slots for copies
            from moe_comm.layers.data_parallel.copies import ExpertCopies

            experts.copies = ExpertCopies(experts, shards, self.placement, self.label)
        return True

    def _use_placement(self, placement: Placement) -> None:
        parts = self.sizes["etp"]
        self.placement = placement
        self.slots: SlotTable | None = None
        if parts > 1 or not placement.is_contiguous:  # else the id of each expert is the id of its slot
            from moe_comm.layers.moe.slots import SlotTable

            self.slots = SlotTable(placement, parts)

    def _publish_if_due(self, experts: nn.Module, later: bool = False) -> MoeCommError | None:
        """Publish the copies of experts if needed. Publishing is collective, so it precedes all checks of a call.

        Args:
            later: other layers may run before the experts of this call.

        Returns:
            The error of this rank's experts, or None.
        """
        copies: ExpertCopies | None = getattr(experts, "copies", None)
        fault: MoeCommError | None = None if copies is None else copies.publish_if_due(later=later)
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
    ) -> ExpertCall:
        """Dispatch the rows of a call. Collective.

        Args:
            x_TD: tokens in the dtype of the experts.
            ids_TK: global expert ids; -1 drops a slot.
            width: F of the experts.
            fp8: the experts have fp8 GEMMs.
            beside: work of the caller while rows, and later results, are in flight, as widths of dense MLPs with the
                same FLOPs.
        """
        dispatcher = self.dispatcher
        gradients = getattr(experts, "expert_gradients", None)
        if gradients is not None:
            dispatcher.trained = gradients.trained(experts, weights_TK)
        if self.slots is not None:
            with dispatcher.abort_on_error(self.label):
                ids_TK, weights_TK = self.slots(ids_TK, weights_TK)
        if self.overlap is None:
            return ExpertCall.start(dispatcher, x_TD, ids_TK, weights_TK, self.label, fp8)
        from moe_comm.overlap.executors.choice import beside_columns, dispatch_rows  # slow: imports all executors

        top_k = ids_TK.shape[1]
        return dispatch_rows(
            dispatcher,
            x_TD,
            ids_TK,
            weights_TK,
            self.overlap,
            width=width,
            beside=(beside_columns(beside[0], top_k), beside_columns(beside[1], top_k)),
            label=self.label,
            scaled=fp8,
        )

    def _prepare_experts(self, experts: nn.Module, call: ExpertCall) -> tuple[int, ...]:
        """Write the weights of the copies of experts. Collective if another layer has used their memory.

        Returns:
            Row counts of the slots to compute with. Slots for copies are left out if there is no copy.
        """
        copies: ExpertCopies | None = getattr(experts, "copies", None)
        if copies is not None and self._uses_copies(call):
            copies.materialize()
        counts = call.handle.rows_per_expert
        homes = self.placement.homes_per_rank[self.place["ep"]]
        # A rank without experts always computes with the slots for copies, so that its parameters have gradients.
        return counts[:homes] if homes and call.skips_empty_slots and not self.placement.has_copies else counts

    def _follow_backward(self, experts: nn.Module, call: ExpertCall, out_RD: Tensor) -> None:
        """Register the hooks that run in backward before the experts that computed ``out_RD``."""
        if self.in_flight_hook is not None:
            self._call_in_backward(out_RD)
        copies: ExpertCopies | None = getattr(experts, "copies", None)
        if copies is not None and self._uses_copies(call):  # after the hook, in which other layers may use the memory
            copies.materialize_in_backward(out_RD)

    def _call_in_backward(self, rows: Tensor) -> None:
        """Call ``in_flight_hook`` in backward before the operator that returned ``rows``."""
        hook = self.in_flight_hook
        if hook is not None and rows.requires_grad:
            rows.register_hook(lambda _: hook())

    def _uses_copies(self, call: ExpertCall) -> bool:
        """Return whether a rank may compute with the slots for copies; equal on all ranks."""
        return self.placement.has_copies or not call.skips_empty_slots
