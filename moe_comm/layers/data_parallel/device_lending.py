"""Experts that are lent over ``peer_to_peer`` with ``capacity_rows``: the device plans each call, and the CPU does not
wait (``dispatch/peer_to_peer/lending.py``).

The parameters are views of stacks that all ranks map. The slots for copies get weights in each call, and again in
backward if another call has used them. Gradients of all slots are in memory that other ranks read. Calls of which the
CPU knows the row counts are those of ``LentExperts``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from moe_comm.comm.group_setup import channel_of
from moe_comm.dispatch.peer_to_peer.lending import (
    DevicePlan,
    ExpertStacks,
    LendingPrimitives,
    LentHomes,
    NativeCall,
    NativeLending,
)
from moe_comm.layers.data_parallel.copies import CallPlan, entered
from moe_comm.layers.data_parallel.expert_shard import ExpertShards
from moe_comm.layers.data_parallel.lending import LentExperts
from moe_comm.layers.data_parallel.lent_call import LentCall, LentGradients
from moe_comm.topology import Placement
from moe_comm.topology.balance import Balance


class HeapGradients(LentGradients):
    """Gradients in the heap of ``peer_to_peer``."""

    def __init__(self, allocate: Callable[[], dict[str, Tensor]]) -> None:
        self._allocate_stacks = allocate
        self.stacks, self.others, self.memory = {}, {}, None

    def _allocate(self) -> None:
        self.stacks = self._allocate_stacks()


PARAMETERS = ("w13", "w2", "b13", "b2")
"""Parameters of ``Experts``."""


def _shapes(params: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: param.shape[1:] for name, param in params.items()}


def _values(stacks: ExpertStacks) -> dict[str, Tensor]:
    return {name: stack.data for name, stack in stacks.values.items()}  # other calls write to slots for copies


class DeviceLentExperts(LentExperts):
    """``LentExperts`` of a layer over ``dispatcher``, which has ``capacity_rows``."""

    def __init__(
        self,
        dispatcher: LendingPrimitives,
        experts: nn.Module,
        shards: ExpertShards,
        placement: Placement,
        balance: Balance,
        label: str = "",
    ) -> None:
        self._dispatcher = dispatcher
        self._mapped: ExpertStacks | None = None
        self._homes: LentHomes | None = None
        self._pulled: Tensor | None = None  # the plan whose weights are in the slots for copies
        super().__init__(experts, shards, placement, balance, False, label)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = super().__deepcopy__(memo)
        copied._mapped = copied._homes = copied._pulled = None
        return copied

    def set_placement(self, placement: Placement) -> None:
        super().set_placement(placement)
        self._homes = self._pulled = None

    @property
    def plans_on_device(self) -> bool:
        dtypes = {(param.dtype, param.device) for param in self.parameters}
        return self._shards.sizes["etp"] == 1 and len(dtypes) == 1 and not self._sharded

    def prefetch(self) -> None:
        """Start to send the weights of residents if calls are planned on the CPU."""
        if not self.plans_on_device:
            super().prefetch()

    def prepare(self, slots: int = -1) -> tuple[ExpertStacks, LentHomes]:
        """Do what precedes the plan of a call. The first call of a layer is collective.

        slots: see ``LendingPrimitives.check_room``.
        """
        stacks = self._share_stacks()
        homes = self._homes_of(stacks)
        self._dispatcher.check_room(slots, homes, self._label)
        return stacks, homes

    def begin_on_device(self, x_TD: Tensor, ids_TK: Tensor, counted: bool) -> LentCall:
        """Plan a call, and copy the weights that this rank is lent. Collective, and the CPU does not wait.

        Args, errors: see ``LendingPrimitives.lend`` and ``check_room``.
        """
        dispatcher, (stacks, homes) = self._dispatcher, self.prepare(ids_TK.numel())
        slots_TK, words = dispatcher.lend(x_TD, ids_TK, homes, self._label, counted)
        plan = self.plan_of(words)
        self.materialize(plan)
        trained = self._trained() if torch.is_grad_enabled() else {}
        gradients = HeapGradients(partial(dispatcher.gradient_stacks, _shapes(trained))) if trained else None
        inside = entered(_values(stacks), trained, lambda names, _: self._collect(plan, gradients, names))
        return LentCall(plan, self.num_slots, inside, (), gradients, slots_TK)

    def native_call(self, slots: int, counted: bool) -> tuple[LentCall, NativeCall]:
        """Return what a native call computes with and lends, instead of ``begin_on_device``. The first call of a layer
        is collective.

        Args:
            slots: (token, slot) pairs of the call. counted: see ``LendingPrimitives.lend``.
        """
        dispatcher, (stacks, homes) = self._dispatcher, self.prepare(slots)
        experts: Any = self._experts
        trained = self._trained() if torch.is_grad_enabled() else {}
        params = [getattr(experts, name) for name in PARAMETERS]
        sums = [
            (param.shape, param.grad_dtype or param.dtype) if name in trained else None
            for name, param in zip(PARAMETERS, params, strict=True)
        ]

        def new_gradients() -> Sequence[Tensor | None]:
            found = dispatcher.gradient_stacks(_shapes(trained))
            w13, w2, b13, b2 = map(found.get, PARAMETERS)
            if experts.transposed:
                w13, w2 = (None if one is None else one.transpose(1, 2) for one in (w13, w2))
            return w13, w2, b13, b2

        lends = NativeLending(homes, stacks, counted, tuple(sums))
        return (
            LentCall(None, self.num_slots, _values(stacks)),
            NativeCall(lends, tuple(params), new_gradients, self._use_slots),
        )

    def plan_of(self, words: Tensor) -> DevicePlan:
        """Return the plan of a call with these words."""
        assert self._homes is not None
        return DevicePlan(words, self._homes, self.placement)

    def _use_slots(self, words: Tensor) -> bool:
        """Return whether the weights of a plan have to be copied into the slots, which have them then."""
        used, self._pulled = self._pulled is words, words
        return not used

    def materialize(self, plan: CallPlan | DevicePlan | None = None) -> None:
        if not isinstance(plan, DevicePlan):
            super().materialize(plan)
        elif self._use_slots(plan.words):
            assert self._mapped is not None
            self._dispatcher.pull_weights(self._homes_of(self._mapped), self._mapped, plan.words)

    def take_tally(self) -> Tensor | None:
        """Return the counts of ``LENT_COUNTS`` of the calls since this method was called, on the device."""
        if self._homes is None:
            return None
        tally = self._homes.tally.clone()
        self._homes.tally.zero_()
        nbytes = tally[-1:] * sum(param.shape[1:].numel() * param.element_size() for param in self.parameters)
        return torch.cat([tally[:-1], torch.zeros_like(nbytes), nbytes])  # no residents

    def _collect(self, plan: DevicePlan, gradients: HeapGradients | None, names: Sequence[str]) -> list[Tensor]:
        """Return the gradients of the parameters ``names``. Collective."""
        assert gradients is not None
        assert self._mapped is not None
        params = [self.parameter(name) for name in names]
        sums = [torch.empty(p.shape, dtype=p.grad_dtype or p.dtype, device=p.device) for p in params]
        first = next(iter(gradients.stacks.values()))
        self._dispatcher.collect_gradients(self._homes_of(self._mapped), plan.words, first, sums, self._label)
        gradients.release()
        return sums

    def _homes_of(self, stacks: ExpertStacks) -> LentHomes:
        if self._homes is None or self._homes.balance is not self.balance:
            size = next(iter(stacks.values.values())).element_size()
            hosts = len(set(channel_of(self._shards.group).comm.hosts))
            costs = self.balance.costs(sum(stacks.sizes), size, hosts)
            self._homes = LentHomes.of(self.placement, self.balance, costs, self._dispatcher.device)
        return self._homes

    @torch.no_grad()
    def _share_stacks(self) -> ExpertStacks:
        """Return the stacks, after making the parameters views of them. The first call is collective."""
        params, stacks = self._params(), self._mapped
        if stacks is None or next(iter(stacks.values.values())).dtype != next(iter(params.values())).dtype:
            shapes = {name: param.shape[1:] for name, param in params.items()}
            with torch.inference_mode(False):
                stacks = self._mapped = self._dispatcher.new_stacks(shapes, next(iter(params.values())).dtype)
            self._pulled = None
        for name, param in params.items():
            if param.data_ptr() != stacks.values[name].data_ptr() and param.numel():
                own = stacks.values[name][: param.shape[0]]
                own.copy_(param)
                param.data = own
        return stacks
