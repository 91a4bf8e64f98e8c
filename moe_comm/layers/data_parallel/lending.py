"""Experts that other ranks compute in one call (``topology/balance.py``): plan, weights and gradients.

    forward    row counts of all ranks ─▶ plan ─▶ weights of lent experts ─▶ rows to ranks of the plan ─▶ experts
    backward   experts ─▶ gradients in fp32: rank of the plan ─▶ home

Ranks that dispatch through shared memory have their parameters there, and read the weights of other ranks where they
are. Otherwise the home sends them into buffers, and again in backward if another call has used these. Weights that are
in a buffer already are not sent again: in the other micro-batches of a step, and in inference, where the plan also
prefers them.

The gradient of a lent expert is that of its home, then those of the other ranks in order, added in fp32 and rounded
once. The home reads them where they are in shared memory. After backward the gradient of the parameter is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor, nn

from moe_comm.comm.group_setup import channel_of
from moe_comm.comm.sparse_rows import (
    Read,
    RowTransfer,
    SharedBlocks,
    aligned_bytes,
    new_block,
    share_blocks,
    transfer_rows,
)
from moe_comm.errors import ConfigError, RankMismatch
from moe_comm.kernels.autograd import once_differentiable
from moe_comm.layers.data_parallel.copies import ExpertCopies
from moe_comm.layers.data_parallel.expert_shard import ExpertShards
from moe_comm.layers.data_parallel.lent_call import CallPlan, LentCall, Partials, choose_rows
from moe_comm.topology import Placement
from moe_comm.topology.balance import Balance, Lent, intervals, rows_of_ranks

EMPTY = -1


class _Lent(torch.autograd.Function):
    """Return the parameters. Backward returns the gradients of lent experts to their homes."""

    @staticmethod
    def forward(ctx: Any, lending: LentExperts, plan: CallPlan, partials: Partials, *params: Tensor) -> Any:
        ctx.save_for_backward(*params)  # backward raises if one has changed
        ctx.lending, ctx.plan, ctx.partials = lending, plan, partials
        return tuple(param.detach() for param in params)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        grads_P = [grad.contiguous() for grad in grads]
        ctx.lending.return_gradients(ctx.plan, ctx.partials, grads_P)
        return None, None, None, *grads_P


class LentExperts(ExpertCopies):
    """The experts of one module that are lent to other ranks. All ranks of its group make the same calls.

    Args:
        experts, shards, label: see ``ExpertCopies``.
        placement: homes of the experts, and slots for copies.
        balance: when to lend.
        in_place: ranks may read the weights of others in shared memory: they wait for all ranks in each dispatch and
            combine.
    """

    def __init__(
        self,
        experts: nn.Module,
        shards: ExpertShards,
        placement: Placement,
        balance: Balance,
        in_place: bool,
        label: str = "",
    ) -> None:
        self.balance, self._in_place = balance, in_place
        self._shared: Any = None
        self._memory: list[Tensor] = []  # this rank's parameters in shared memory
        self._peers: list[dict[str, Tensor]] = []  # parameters of all ranks of the group, [homes, ...] by name
        self._buffers: dict[str, Tensor] = {}
        super().__init__(experts, shards, placement, label)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that shares its parameters in its first call: a copy of those of all ranks takes memory."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        own = vars(self) | {"_memory": [], "_peers": []}
        vars(copied).update({key: deepcopy(value, memo) for key, value in own.items()})
        return copied

    def set_placement(self, placement: Placement) -> None:
        """Use other homes, with the same layout."""
        if placement.has_copies:
            raise ConfigError(f"balance of layer {self._label!r} chooses the copies; pass a placement without copies")
        super().set_placement(placement)
        world, slots = placement.world, placement.slots or 0
        self._held = [[EMPTY] * slots for _ in range(world)]  # experts whose weights are in the buffers of each rank
        self._seen: list[tuple[int, int]] = []
        self._row = [0] * placement.num_experts
        for rank in range(world):
            for row, expert in enumerate(placement.homes_of(rank)):
                self._row[expert] = row

    def weights_changed(self) -> None:
        """Send weights again from the next call on. ``plan`` also detects changes itself."""
        super().weights_changed()
        self._seen = []

    def share(self, stacks: Any) -> None:
        raise ConfigError(f"layer {self._label!r} lends experts (balance), which rematerialized copies do not support")

    @property
    def changed(self) -> bool:
        """False: each call sends the weights that it needs."""
        return False

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
        placement, channel = self.placement, channel_of(self._shards.group)
        experts, rank = placement.num_experts, channel.rank
        params = self.parameters
        moved = self._in_place and [param.data_ptr() for param in params] != [one.data_ptr() for one in self._memory]
        seen = list(zip([param.data_ptr() for param in params], self._present_versions(), strict=True))
        changed, self._seen = seen != self._seen, seen
        weights, size = sum(param.shape[1:].numel() for param in params), params[0].element_size()
        costs = self.balance.costs(weights, size, len(set(channel.comm.hosts)))
        settings = (*self.balance.words(), *costs)
        own = torch.zeros(experts + 3 + len(settings), dtype=torch.int64, device="cpu")
        if ids_TK is not None and not ids_TK.is_floating_point():
            ids_N = ids_TK.reshape(-1)
            own[:experts] = torch.bincount(ids_N[(ids_N >= 0) & (ids_N < experts)], minlength=experts)
        own[experts:] = torch.tensor((changed, trains, moved, *settings), dtype=torch.int64, device="cpu")
        words_WX = channel.all_gather(own, f"the row counts of layer {self._label!r}")
        if (words_WX[:, experts + 3 :] != own[experts + 3 :]).any():
            of_ranks = [tuple(one) for one in words_WX[:, experts + 3 :].tolist()]
            raise RankMismatch(f"ranks balance layer {self._label!r} with other settings: {of_ranks}")
        counts_WE = words_WX[:, :experts]
        changed_W, grads_W, moved_W = words_WX[:, experts : experts + 3].T.tolist()
        if any(moved_W):
            self._share_parameters()
        parts = self._shards.sizes["etp"]
        changed_homes = {one // parts for one, flag in enumerate(changed_W) if flag}
        for held in self._held:
            held[:] = [EMPTY if e != EMPTY and placement.homes[e] in changed_homes else e for e in held]
        # Recomputation must find the same plan, so only inference prefers copies that happen to be present.
        residents = [] if any(grads_W) else [(e, r) for r, held in enumerate(self._held) for e in held if e != EMPTY]
        loads_E, world = counts_WE.sum(0).tolist(), placement.world
        # With slices, each (token, slot) pair is a row of ``parts`` ranks.
        largest = parts * int(counts_WE.sum(1).max())
        limits = self.balance.limits(sum(loads_E), largest, world, placement.slots or 0, costs)
        lent, hashed = choose_rows(loads_E, placement, limits, residents)
        lengths = intervals(lent, loads_E, counts_WE[:rank].sum(0).tolist(), counts_WE[rank].tolist())
        offsets, used = placement.layout.offsets, list(placement.homes_per_rank)
        slots_of = {e: [offsets[placement.homes[e]] + self._row[e]] for e in lengths}
        for one in lent:
            slots_of[one.expert].append(offsets[one.rank] + used[one.rank])
            used[one.rank] += 1
        cuts = {expert: (slots_of[expert], rows) for expert, rows in lengths.items()}
        rows = tuple(rows_of_ranks(loads_E, placement.homes, world, lent))
        return CallPlan(lent, () if self._in_place else self._places(lent), hashed, rows, cuts)

    def _places(self, lent: Sequence[Lent]) -> tuple[int, ...]:
        """Return the buffer of each lent expert: the one that has its weights, or else the first that is not used."""
        place, used = [], {(one.rank, self._held[one.rank].index(one.expert)) for one in lent if self._has(one)}
        for one in lent:
            held = self._held[one.rank]
            if self._has(one):
                place.append(held.index(one.expert))
            else:
                place.append(next(slot for slot in range(len(held)) if (one.rank, slot) not in used))
                used.add((one.rank, place[-1]))
        return tuple(place)

    def _has(self, one: Lent) -> bool:
        return one.expert in self._held[one.rank]

    def _share_parameters(self) -> None:
        """Move the parameters into shared memory, where other ranks read them. Collective."""
        params, channel, parts = self._params(), channel_of(self._shards.group), self._shards.sizes["etp"]
        sizes = {name: param.shape[1:].numel() * param.element_size() for name, param in params.items()}
        own: dict[str, Tensor] = {}

        def place(block: Tensor, homes: int) -> dict[str, Tensor]:
            end, placed = 0, {}
            for name, param in params.items():
                first, end = end, end + aligned_bytes(homes * sizes[name])
                rows = block[first : first + homes * sizes[name]]
                placed[name] = rows.view(param.dtype).view(homes, *param.shape[1:])
            return placed

        def fill(block: Tensor) -> None:
            own.update(place(block, len(next(iter(params.values())))))
            for name, rows_HX in own.items():
                rows_HX.copy_(params[name])

        def use(read: Read) -> None:
            peers = []
            for rank in range(channel.world):
                homes = self.placement.homes_per_rank[rank // parts]
                size = sum(aligned_bytes(homes * one) for one in sizes.values())
                peers.append(own if rank == channel.rank else place(read(rank, 0, size), homes))
            self._peers = peers

        homes = len(next(iter(params.values())))
        size = sum(aligned_bytes(homes * one) for one in sizes.values())
        with torch.inference_mode(False), torch.no_grad():
            blocks, what = (
                SharedBlocks(size, sum(sizes.values()), fill, use),
                f"sharing the experts of layer {self._label!r}",
            )
            shared = channel.uses_shared_memory(next(iter(params.values())))
            self._in_place = shared and share_blocks(channel, blocks, what)
            if self._in_place:
                for name, param in params.items():
                    param.data = own[name]
                self._memory = list(own.values())

    def begin(self, ids_TK: Tensor | None) -> LentCall:
        """Plan a call and send the weights of lent experts, before its rows are dispatched. Collective.

        ids_TK and errors are those of ``plan``. The parameters enter the autograd graph before the dispatch, so
        their backward, which returns gradients, follows that of the dispatch: no rows are in flight then.
        """
        plan, ep = self.plan(ids_TK, torch.is_grad_enabled()), self._shards.place["ep"]
        call = LentCall(plan, self.placement.homes_per_rank[ep], {}, [], (), None)
        self.materialize(call)
        if not plan.lent:
            return call
        call.borrowed = [self._weights_of(plan, at) for at in plan.of_rank(ep)]
        params = self._params()
        call.params = dict(params)
        trained = {name: param for name, param in params.items() if param.requires_grad}
        if torch.is_grad_enabled() and trained:
            call.partials = Partials(trained, len(call.borrowed), self._new_rows)
            if next(iter(trained.values())).dtype != self._wide:
                call.lends = tuple(sorted({self._row[one.expert] for one in plan.lent if self._home(one) == ep}))
            values = _Lent.apply(self, plan, call.partials, *trained.values())
            call.params |= dict(zip(trained, values, strict=True))
        return call

    @property
    def _wide(self) -> torch.dtype:
        """The dtype in which gradients are added."""
        return torch.promote_types(next(iter(self._params().values())).dtype, torch.float32)

    def _home(self, one: Lent) -> int:
        return self.placement.homes[one.expert]

    def _weights_of(self, plan: CallPlan, at: int) -> dict[str, Tensor]:
        """Return the weights of the expert ``plan.lent[at]``, which this rank has been lent, [1, ...] by name."""
        one, shards = plan.lent[at], self._shards
        if plan.place:
            return {name: rows[plan.place[at]].unsqueeze(0) for name, rows in self._buffers.items()}
        peer = self._peers[self._home(one) * shards.sizes["etp"] + shards.place["etp"]]
        return {name: rows[self._row[one.expert]].unsqueeze(0) for name, rows in peer.items()}

    def _new_rows(self, count: int, width: int) -> tuple[Tensor, Tensor | None]:
        """Return [count, width] in shared memory if it is used, and the block."""
        wide = self._wide
        stride = aligned_bytes(width * wide.itemsize)
        if self._in_place and count:
            block = new_block(channel_of(self._shards.group), count * stride)
            if block is not None:
                memory, whole = block
                return memory.view(wide).view(count, -1)[:, :width], whole
        return torch.empty(count, width, dtype=wide, device="cpu"), None

    def materialize(self, call: LentCall | None = None) -> None:
        """Send the weights of lent experts that are not in their buffers yet. Collective if there are any.

        Args:
            call: the call whose experts run next.
        """
        assert call is not None
        plan = call.plan
        fresh = [
            one for one in zip(plan.lent, plan.place, strict=False) if self._held[one[0].rank][one[1]] != one[0].expert
        ]
        if not fresh:
            return
        for one, index in fresh:
            self._held[one.rank][index] = one.expert
        params, slots = self._params(), self.placement.slots or 0
        for name, param in params.items():
            old, like = self._buffers.get(name), param.detach()
            if old is None or (old.dtype, old.device) != (like.dtype, like.device):
                with torch.inference_mode(False):
                    self._buffers[name] = torch.empty(slots, *like.shape[1:], dtype=like.dtype, device=like.device)
        transfers = tuple(self._transfers_of(fresh))

        def receive(one: RowTransfer, rows: Sequence[Tensor]) -> None:
            for buffer, row in zip(self._buffers.values(), rows, strict=True):
                buffer[one.destination_row].copy_(row)

        what, stacks = f"lending experts of layer {self._label!r}", [param.detach() for param in params.values()]
        with torch.no_grad():
            transfer_rows(channel_of(self._shards.group), transfers, stacks, receive, what)
        self._count_sent(transfers, stacks)

    def materialize_in_backward(self, result: Tensor, call: LentCall | None = None) -> None:
        """Call ``materialize`` in backward before the operator that computed ``result`` from the weights."""
        if call is not None and call.plan.place and result.requires_grad:
            again = LentCall(call.plan, call.homes, {}, [], (), None)  # ``call`` would keep its own graph alive
            result.register_hook(lambda _: self.materialize(again))

    @torch.no_grad()
    def return_gradients(self, plan: CallPlan, partials: Partials, grads: list[Tensor]) -> None:
        """Add the gradients of lent experts to those of their homes. Collective.

        Args:
            grads: of the trained parameters. Changed in place.
        """
        positions = [plan.of_rank(rank) for rank in range(self.placement.world)]
        transfers = [
            one.reversed()
            for one in self._transfers_of((one, positions[one.rank].index(at)) for at, one in enumerate(plan.lent))
        ]
        rows_NX, block = partials.rows()
        lends = {one.destination_row for one in transfers if one.destination == self._shards.group.rank()}
        wide = grads[0].dtype == self._wide
        sums = {row: [grad[row : row + 1] for grad in grads] for row in lends}
        if not wide:
            sums = {row: list(partials.home(row).values()) for row in lends}

        def receive(one: RowTransfer, rows: Sequence[Tensor]) -> None:
            for total, part in zip(sums[one.destination_row], partials.values(rows[0]).values(), strict=True):
                total += part

        what = f"returning the gradients of experts of layer {self._label!r}"
        transfer_rows(channel_of(self._shards.group), transfers, [rows_NX], receive, what, block)
        self._count_sent(transfers, [rows_NX])
        partials.release()
        if not wide:
            for row, totals in sums.items():
                for grad, total in zip(grads, totals, strict=True):
                    grad[row : row + 1] = total

    def _transfers_of(self, lent: Any) -> Iterator[RowTransfer]:
        """Yield the transfer of each lent expert to a row of its rank."""
        etp, part = self._shards.sizes["etp"], self._shards.place["etp"]
        for one, row in lent:
            yield RowTransfer(self._home(one) * etp + part, self._row[one.expert], one.rank * etp + part, row)
