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

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from moe_comm.comm.group_setup import channel_of
from moe_comm.comm.sparse_rows import Read, SharedBlocks, aligned_bytes, new_block, share_blocks
from moe_comm.errors import ConfigError, RankMismatch
from moe_comm.kernels.expert_mlp import Apart
from moe_comm.kernels.native import core
from moe_comm.layers.data_parallel.copies import CallPlan, ExpertCopies, Partials, Values, entered
from moe_comm.layers.data_parallel.expert_shard import ExpertShards
from moe_comm.topology import Placement
from moe_comm.topology.balance import Balance, Lent, Limits, digest, plan_rows, rows_of_ranks

EMPTY = -1
Orient = Callable[[Values], Sequence[Tensor | None]]
"""Returns the tensors of an ``ExpertMLP`` for those of parameters; None for missing ones."""


@dataclass(eq=False, slots=True)
class LentCall:
    """A call with its plan, and the tensors that its experts compute with.

    Attributes:
        plan: the plan.
        homes: number of experts of this rank.
        params: the parameters; {} if no expert is lent.
        borrowed: for each expert of another rank that this rank computes its weights, [1, ...].
        lends: rows of the experts that this rank lends, if their gradients need more precision.
        partials: gradients of both.
    """

    plan: CallPlan
    homes: int
    params: Values
    borrowed: list[Values]
    lends: tuple[int, ...]
    partials: Partials | None

    @property
    def slots(self) -> int:
        """Slots that the plan uses on this rank: its experts, then those that are lent to it."""
        return self.homes + len(self.borrowed)

    def apart(self, weights: Orient, gradients: Orient, b2_columns: slice | None = None) -> dict[int, Apart]:
        """Return the experts whose weights or gradients are not in those of ``params``.

        Args:
            weights, gradients: as the experts need them. Gradients are views.
            b2_columns: columns of the last bias that the parameter has.
        """
        partials = self.partials

        def outputs(borrowed: bool, at: int) -> Sequence[Tensor | None]:
            if partials is None:
                return (None,) * 4
            return gradients(partials.copies(slice(at, at + 1)) if borrowed else partials.home(at))

        result = {row: Apart(None, partial(outputs, False, row), b2_columns) for row in self.lends}
        for at, values in enumerate(self.borrowed):
            result[self.homes + at] = Apart(tuple(weights(values)), partial(outputs, True, at), b2_columns)
        return result


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
        self._memory: list[Tensor] = []  # this rank's parameters in shared memory
        self._peers: list[dict[str, Tensor]] = []  # parameters of all ranks of the group, [homes, ...] by name
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
        seen = self._present()
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
        counts = loads_E, counts_WE[:rank].sum(0).tolist(), counts_WE[rank].tolist()
        rows = tuple(rows_of_ranks(loads_E, placement.homes, world, lent))
        return CallPlan(lent, () if self._in_place else self._places(lent), hashed, rows, counts)

    def _present(self) -> list[tuple[int, int]]:
        """Return memory and version of each parameter."""
        return list(zip([param.data_ptr() for param in self.parameters], self._present_versions(), strict=True))

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
        homes_W = [self.placement.homes_per_rank[rank // parts] for rank in range(channel.world)]
        size_P = [param.shape[1:].numel() * param.element_size() for param in params.values()]
        own: dict[str, Tensor] = {}

        def sizes(homes: int) -> list[int]:
            return [aligned_bytes(homes * size) for size in size_P]

        def place(block: Tensor, homes: int) -> dict[str, Tensor]:
            rows = [part[: homes * size] for part, size in zip(block.split(sizes(homes)), size_P, strict=True)]
            return {
                name: part.view(param.dtype).view(homes, *param.shape[1:])
                for part, (name, param) in zip(rows, params.items(), strict=True)
            }

        def fill(block: Tensor) -> None:
            own.update(place(block, homes_W[channel.rank]))
            for name, rows_HX in own.items():
                rows_HX.copy_(params[name])

        def use(read: Read) -> None:
            self._peers = [
                own if rank == channel.rank else place(read(rank, 0, sum(sizes(homes))), homes)
                for rank, homes in enumerate(homes_W)
            ]

        with torch.inference_mode(False), torch.no_grad():
            blocks = SharedBlocks(sum(sizes(homes_W[channel.rank])), sum(size_P), fill, use)
            shared = channel.uses_shared_memory(next(iter(params.values())))
            self._in_place = shared and share_blocks(channel, blocks, f"sharing the experts of layer {self._label!r}")
            if self._in_place:
                for name, param in params.items():
                    param.data = own[name]
                self._memory = list(own.values())

    def begin(self, ids_TK: Tensor | None) -> LentCall:
        """Plan a call and send the weights of lent experts, before its rows are dispatched. Collective.

        ids_TK and errors are those of ``plan``. The parameters enter the autograd graph before the dispatch, so
        their backward, which returns gradients, follows that of the dispatch: no rows are in flight then.
        """
        if ids_TK is not None and ids_TK.device.type != "cpu":
            raise ConfigError(f"balance supports experts on the CPU only; got tokens on {ids_TK.device}")
        plan, ep = self.plan(ids_TK, torch.is_grad_enabled()), self._shards.place["ep"]
        call = LentCall(plan, self.placement.homes_per_rank[ep], {}, [], (), None)
        self.materialize(plan)
        if not plan.lent:
            return call
        call.borrowed = [self._weights_of(plan, at) for at in plan.of_rank(ep)]
        params = self._params()
        call.params, trained = params, self._trained()
        if torch.is_grad_enabled() and trained:
            partials = call.partials = Partials(trained, len(call.borrowed), self._new_rows)
            if next(iter(trained.values())).dtype != self._wide:
                call.lends = tuple(sorted({self._row[one.expert] for one in plan.lent if self._home(one) == ep}))
            values = {name: param.detach() for name, param in params.items()}
            call.params = entered(values, trained, lambda _, grads: self.return_gradients(plan, partials, grads))
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
            row = self.placement.homes_per_rank[one.rank] + plan.place[at]
            return {name: self._stack(name)[row : row + 1] for name in self._params()}
        peer, row = self._peers[self._home(one) * shards.sizes["etp"] + shards.place["etp"]], self._row[one.expert]
        return {name: rows[row : row + 1] for name, rows in peer.items()}

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

    def materialize(self, plan: CallPlan | None = None) -> None:
        """Send the weights of lent experts that are not in their slots yet. Collective if there are any.

        Args:
            plan: that of the call whose experts run next.
        """
        assert plan is not None
        fresh = [
            one for one in zip(plan.lent, plan.place, strict=False) if self._held[one[0].rank][one[1]] != one[0].expert
        ]
        if not fresh:
            return
        for one, place in fresh:
            self._held[one.rank][place] = one.expert
        homes, unchanged = self.placement.homes_per_rank, self._seen == self._present()
        copies = [(one.expert, one.rank, homes[one.rank] + place) for one, place in fresh]
        self._send(copies, f"lending experts of layer {self._label!r}")
        if unchanged:
            self._seen = self._present()  # the first call moves the parameters into stacks

    def return_gradients(self, plan: CallPlan, partials: Partials, grads: list[Tensor]) -> list[Tensor]:
        """Add the gradients of lent experts to those of their homes. Collective. Return the gradients.

        Args:
            grads: of the trained parameters. Changed in place.
        """
        positions = [plan.of_rank(rank) for rank in range(self.placement.world)]
        copies = [(one.expert, one.rank, positions[one.rank].index(at)) for at, one in enumerate(plan.lent)]
        sent = self._add(copies, partials, grads, f"returning the gradients of experts of layer {self._label!r}")
        self.published_bytes += sent
        return grads


def choose_rows(
    loads_E: Sequence[int], placement: Placement, limits: Limits, residents: Iterable[tuple[int, int]]
) -> tuple[tuple[Lent, ...], int]:
    """Return the plan of the native core, or of the reference if it is not built, and its digest."""
    native = core()
    if native is None:
        lent = plan_rows(loads_E, placement.homes, placement.world, limits, residents)
        return lent, digest(lent)
    triples, hashed = native.plan_rows(loads_E, placement.homes, placement.world, limits, list(residents))
    return tuple(Lent(*one) for one in triples), hashed
