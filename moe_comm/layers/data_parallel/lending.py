"""Experts that other ranks compute in one call (``topology/balance.py``): plan, weights and gradients.

    forward    row counts of all ranks ─▶ plan ─▶ weights: home ─▶ free slots ─▶ rows to ranks of the plan ─▶ experts
    backward   weights again, if another call has used the slots ─▶ experts ─▶ gradients: slots ─▶ home

Each rank stores its experts and the slots for copies in one stack, as ``copies.py`` describes. Weights that are in a
slot already are not sent again: in the other micro-batches of a step, and in inference, where the plan also prefers
them. The home adds the gradients of the other ranks to its own in order of rank, in fp32, and rounds once; after
backward the gradient of the parameter is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.comm.group_setup import channel_of
from moe_comm.comm.sparse_rows import RowTransfer, transfer_rows
from moe_comm.errors import ConfigError, RankMismatch
from moe_comm.kernels.autograd import once_differentiable
from moe_comm.kernels.native import core
from moe_comm.layers.data_parallel.copies import ExpertCopies, add_rows
from moe_comm.layers.data_parallel.expert_shard import ExpertShards
from moe_comm.topology import Placement
from moe_comm.topology.balance import Balance, Lent, Limits, digest, plan_rows

EMPTY = -1


@dataclass(frozen=True, eq=False, slots=True)
class CallPlan:
    """The plan of one call; equal on all ranks except ``cuts``.

    Attributes:
        lent: (expert, rank, rows).
        place: position of each of ``lent`` among its rank's slots for copies.
        digest: hash of ``lent``; 0 if it is empty.
        rows: rows of each rank.
        cuts: for each lent expert the ids of its slots in the layout, the home's first, and the number of this rank's
            rows for each of them, in the order of (token, slot).
    """

    lent: tuple[Lent, ...]
    place: tuple[int, ...]
    digest: int
    rows: tuple[int, ...]
    cuts: dict[int, tuple[list[int], list[int]]]


@dataclass(eq=False, slots=True)
class LentCall:
    """A call with its plan, and the stacks that its experts compute with.

    Attributes:
        plan: the plan.
        slots: slots that the plan uses on this rank: its experts, then those for copies.
        stacks: [slots, ...] by name; {} if no expert is lent.
    """

    plan: CallPlan
    slots: int
    stacks: dict[str, Tensor]


class _Stacked(torch.autograd.Function):
    """Return the stacks of parameters. Backward returns the gradients of lent experts to their homes."""

    @staticmethod
    def forward(ctx: Any, lending: LentExperts, plan: CallPlan, stacks: list[Tensor], *params: Tensor) -> Any:
        ctx.save_for_backward(*params)  # backward raises if one has changed
        ctx.lending, ctx.plan = lending, plan
        return tuple(stack.data for stack in stacks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return None, None, None, *ctx.lending.return_gradients(ctx.plan, [grad.contiguous() for grad in grads])


class LentExperts(ExpertCopies):
    """The slots of one experts module for experts that are lent. All ranks of its group make the same calls.

    Args:
        experts, shards, label: see ``ExpertCopies``.
        placement: homes of the experts, and slots for copies.
        balance: when to lend.
    """

    def __init__(
        self, experts: nn.Module, shards: ExpertShards, placement: Placement, balance: Balance, label: str = ""
    ) -> None:
        self.balance = balance
        super().__init__(experts, shards, placement, label)

    def set_placement(self, placement: Placement) -> None:
        """Use other homes, with the same layout."""
        if placement.has_copies:
            raise ConfigError(f"balance of layer {self._label!r} chooses the copies; pass a placement without copies")
        super().set_placement(placement)
        world, slots = placement.world, placement.slots or 0
        self._held = [[EMPTY] * slots for _ in range(world)]  # experts whose weights are in the slots of each rank
        self._seen: list[tuple[int, int]] = []
        self._row = [0] * placement.num_experts
        for rank in range(world):
            for row, expert in enumerate(placement.homes_of(rank)):
                self._row[expert] = row
        self._call: LentCall | None = None

    def weights_changed(self) -> None:
        """Send weights again from the next call on. ``plan`` also detects changes itself."""
        super().weights_changed()
        self._seen = []

    def share(self, stacks: Any) -> None:
        raise ConfigError(f"layer {self._label!r} lends experts (balance), which rematerialized copies do not support")

    def publish_if_due(self, *, later: bool = False) -> None:
        """Do nothing: ``materialize`` sends the weights that a call needs."""

    def publish(self) -> int:
        """Send weights again from the next call on. Return 0: the plan of a call determines the copies."""
        self.weights_changed()
        return 0

    @torch.no_grad()
    def plan(self, ids_TK: Tensor | None, trains: bool) -> CallPlan:
        """Return the plan of the next call. Collective.

        Args:
            ids_TK: expert ids of this rank's tokens. Invalid ones are not counted. None: this rank has none.
            trains: whether a backward pass may follow.

        Raises:
            RankMismatch: ranks have other settings; on every rank.
        """
        placement, group = self.placement, self._shards.group
        experts, rank = placement.num_experts, group.rank()
        for name in self._params():
            self._stack(name)
        addresses = [param.data_ptr() for param in self.parameters]
        seen = list(zip(addresses, self._present_versions(), strict=True))
        changed, self._seen = seen != self._seen, seen
        own = torch.zeros(experts + 6, dtype=torch.int64, device="cpu")
        if ids_TK is not None and not ids_TK.is_floating_point():
            ids_N = ids_TK.reshape(-1)
            own[:experts] = torch.bincount(ids_N[(ids_N >= 0) & (ids_N < experts)], minlength=experts)
        settings = self.balance.words()
        own[experts:] = torch.tensor((changed, trains, *settings), dtype=torch.int64, device="cpu")
        what = f"the row counts of layer {self._label!r}"
        words_WX = channel_of(group).all_gather(own, what)
        if (words_WX[:, experts + 2 :] != own[experts + 2 :]).any():
            of_ranks = [tuple(one) for one in words_WX[:, experts + 2 :].tolist()]
            raise RankMismatch(f"ranks balance layer {self._label!r} with other settings: {of_ranks}")
        counts_WE = words_WX[:, :experts]
        changed_W, grads_W = words_WX[:, experts : experts + 2].T.tolist()
        parts = self._shards.sizes["etp"]
        changed_homes = {one // parts for one, flag in enumerate(changed_W) if flag}
        for held in self._held:
            held[:] = [EMPTY if e != EMPTY and placement.homes[e] in changed_homes else e for e in held]
        # Recomputation must find the same plan, so only inference prefers copies that happen to be present.
        residents = [] if any(grads_W) else [(e, r) for r, held in enumerate(self._held) for e in held if e != EMPTY]
        slots = placement.slots or 0
        loads_E, world = counts_WE.sum(0).tolist(), placement.world
        # With slices, each (token, slot) pair is a row of ``parts`` ranks.
        limits = self.balance.limits(sum(loads_E), parts * int(counts_WE.sum(1).max()), world, slots)
        lent, hashed = _plan(loads_E, placement, limits, residents)
        rows = [0] * world
        for load, home in zip(loads_E, placement.homes, strict=True):
            rows[home] += load
        for one in lent:
            rows[placement.homes[one.expert]] -= one.rows
            rows[one.rank] += one.rows
        place = self._places(lent, sticky=not any(grads_W))
        before_E = counts_WE[:rank].sum(0)
        cuts: dict[int, tuple[list[int], list[int]]] = {}
        offsets, homes = placement.layout.offsets, placement.homes_per_rank
        for one, index in zip(lent, place, strict=True):
            home = placement.homes[one.expert]
            slots_of, ends = cuts.setdefault(one.expert, ([offsets[home] + self._row[one.expert]], []))
            slots_of.append(offsets[one.rank] + homes[one.rank] + index)
            ends.append(one.rows)
        for expert, (_, lengths) in cuts.items():
            first, end = int(before_E[expert]), 0
            last = first + int(counts_WE[rank, expert])
            lengths.insert(0, loads_E[expert] - sum(lengths))
            for owner, length in enumerate(lengths):
                start, end = end, end + length
                lengths[owner] = max(0, min(end, last) - max(start, first))
        return CallPlan(lent, place, hashed, tuple(rows), cuts)

    def _places(self, lent: Sequence[Lent], sticky: bool) -> tuple[int, ...]:
        """Return a slot for each lent expert: the first unused one from the number of the expert on, modulo the slots.

        Recomputation must find the same slots, because the order of the rows follows from them. Only ``sticky`` plans
        prefer the slots that have the weights already.
        """
        kept = {(one.rank, self._held[one.rank].index(one.expert)) for one in lent if sticky and self._has(one)}
        used, place = set(kept), []
        for one in lent:
            if sticky and self._has(one):
                place.append(self._held[one.rank].index(one.expert))
                continue
            slots = len(self._held[one.rank])
            order = ((one.expert + step) % slots for step in range(slots))
            place.append(next(slot for slot in order if (one.rank, slot) not in used))
            used.add((one.rank, place[-1]))
        return tuple(place)

    def _has(self, one: Lent) -> bool:
        return one.expert in self._held[one.rank]

    def begin(self, ids_TK: Tensor | None) -> LentCall:
        """Plan a call and send the weights of lent experts, before its rows are dispatched. Collective.

        ids_TK and errors are those of ``plan``. The stacks become part of the autograd graph before the dispatch, so
        their backward, which returns gradients, follows that of the dispatch: no rows are in flight then.
        """
        plan, ep = self.plan(ids_TK, torch.is_grad_enabled()), self._shards.place["ep"]
        homes = self.placement.homes_per_rank[ep]
        used = [index + 1 for one, index in zip(plan.lent, plan.place, strict=True) if one.rank == ep]
        # A rank without experts computes with all slots, so that its parameters have gradients.
        call = LentCall(plan, homes + max(used, default=0) if homes else self._all_slots, {})
        self.materialize(call)
        if plan.lent or not homes:
            params = self._params()
            call.stacks |= {name: self._stack(name)[: call.slots].data for name in params}
            names = [name for name, param in params.items() if param.requires_grad]
            if torch.is_grad_enabled() and names:
                stacks = [call.stacks[name] for name in names]
                values = _Stacked.apply(self, plan, stacks, *(params[name] for name in names))
                call.stacks |= dict(zip(names, values, strict=True))
        return call

    def materialize(self, call: LentCall | None = None) -> None:
        """Send the weights of lent experts that are not in their slots yet. Collective if there are any.

        Args:
            call: the call whose experts run next.
        """
        assert call is not None
        self._call, plan = call, call.plan
        fresh = [
            one for one in zip(plan.lent, plan.place, strict=True) if self._held[one[0].rank][one[1]] != one[0].expert
        ]
        if not fresh:
            return
        for one, index in fresh:
            self._held[one.rank][index] = one.expert
        transfers, stacks = tuple(self._lent_rows(fresh)), [self._stack(name) for name in self._params()]

        def receive(one: RowTransfer, rows: Sequence[Tensor]) -> None:
            for stack, row in zip(stacks, rows, strict=True):
                stack.data[one.destination_row].copy_(row)

        what = f"lending experts of layer {self._label!r}"
        with torch.no_grad():
            transfer_rows(channel_of(self._shards.group), transfers, [one.data for one in stacks], receive, what)
        self._count_sent(transfers, stacks)

    def materialize_in_backward(self, result: Tensor, call: LentCall | None = None) -> None:
        """Call ``materialize`` in backward before the operator that computed ``result`` from the weights."""
        if call is not None and call.plan.lent and result.requires_grad:
            again = LentCall(call.plan, call.slots, {})  # the stacks would keep their own graph alive
            result.register_hook(lambda _: self.materialize(again))

    @property
    def num_slots(self) -> int:
        """Slots that the next experts compute with if experts are lent."""
        return self._call.slots if self._call is not None and self._call.stacks else self._all_slots

    def stacked(self) -> dict[str, Tensor]:
        call, self._call = self._call, None  # not kept: a deep copy of the module could not copy the graph
        assert call is not None
        return call.stacks

    def return_gradients(self, plan: CallPlan, grads: list[Tensor]) -> list[Tensor]:
        """Add the gradients of lent experts to those of their homes. Collective if experts were lent.

        Args:
            grads: of the stacks of the trained parameters. Changed in place.

        Returns:
            The gradients of the parameters.
        """
        homes = len(next(iter(self.parameters)))
        if plan.lent:
            transfers = [one.reversed() for one in self._lent_rows(zip(plan.lent, plan.place, strict=True))]
            what = f"returning the gradients of experts of layer {self._label!r}"
            add_rows(channel_of(self._shards.group), transfers, grads, [grad[:homes] for grad in grads], what)
            self._count_sent(transfers, grads)
        return [grad[:homes] for grad in grads]

    def _lent_rows(self, lent: Any) -> Iterator[RowTransfer]:
        placement, etp, part = self.placement, self._shards.sizes["etp"], self._shards.place["etp"]
        for one, index in lent:
            home, row = placement.homes[one.expert], placement.homes_per_rank[one.rank] + index
            yield RowTransfer(home * etp + part, self._row[one.expert], one.rank * etp + part, row)


def _plan(
    loads_E: list[int], placement: Placement, limits: Limits, residents: list[tuple[int, int]]
) -> tuple[tuple[Lent, ...], int]:
    """Return the plan of the native core, or of the reference if it is not built, and its digest."""
    native = core()
    if native is None:
        lent = plan_rows(loads_E, placement.homes, placement.world, limits, residents)
        return lent, digest(lent)
    triples, hashed = native.plan_rows(loads_E, placement.homes, placement.world, limits, residents)
    return tuple(Lent(*one) for one in triples), hashed
