"""Experts that other ranks compute in one call (``topology/balance.py``): plan, weights and gradients.

    forward    row counts of all ranks ─▶ plan ─▶ weights of lent experts ─▶ rows to ranks of the plan ─▶ experts
    backward   experts ─▶ gradients in fp32: rank of the plan ─▶ home

    first forward pass after weights have changed
    weights of residents:  start ─ attention, router ─ wait │ row counts ─▶ plan that prefers residents ─▶ as above

Ranks that dispatch through shared memory have their parameters there, and read the weights of other ranks where they
are. Otherwise the home sends them into the slots for copies of the stacks of ``ExpertCopies``, and again in backward if
another call has used these. Experts then compute with one tensor of each parameter, on any device. Weights that are in
a slot already are not sent again. Plans prefer them: in inference all of them, and in training only those of residents
(``Residents``), which do not change until weights change, because recomputation must find the same plan.

FSDP2 gathers the parameters when the experts are called, and frees them afterwards. Each call sends its weights there,
after the dispatch, into slots that are not in the stacks (``LentCall.others``). The parameters enter the autograd graph
there as well, so their gradients are complete before FSDP2 reduces them. There are no residents.

The gradient of a lent expert is that of its home, then those of the other ranks in order, added in fp32 and rounded
once. So the experts write all gradients of a call that lends in fp32, and not as results of autograd. The home reads
those of other ranks where they are in shared memory. After backward the gradients of the parameters are complete.

A split backward pass computes and returns gradients in the pass for weights, when no rows are in flight. All ranks of a
stage run the same passes, and in each of them torch takes the module's parameters in order, so the ranks return the
gradients of layers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor, nn

from moe_comm.comm.agree import digest as checksum
from moe_comm.comm.group_setup import channel_of
from moe_comm.comm.sparse_rows import Read, SharedBlocks, aligned_bytes, into, share_blocks, transfer_rows
from moe_comm.errors import ConfigError, RankMismatch
from moe_comm.layers.data_parallel.copies import CallPlan, ExpertCopies, entered
from moe_comm.layers.data_parallel.expert_shard import ExpertShards, is_dtensor
from moe_comm.layers.data_parallel.lent_adapters import Adapters, lend_adapters
from moe_comm.layers.data_parallel.lent_call import LentCall, LentGradients
from moe_comm.runtime.row_plan import Residents, choose_rows
from moe_comm.topology import Placement
from moe_comm.topology.balance import Balance, rows_of_ranks

EMPTY = -1


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
        self._sent_dtype: torch.dtype | None = None  # of the weights that FSDP gathers
        self._memory: list[Tensor] = []  # this rank's parameters in shared memory
        self._peers: list[dict[str, Tensor]] = []  # parameters of all ranks of the group, [homes, ...] by name
        super().__init__(experts, shards, placement, label)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that shares its parameters in its first call: a copy of those of all ranks takes memory."""
        self._wait()
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
        self._due = self._stale = False  # residents may change; the weights of all ranks have. Equal on all ranks
        self._residents = Residents(placement)
        self._arriving: Callable[[], None] | None = None  # waits for the weights of residents that are being sent

    def weights_changed(self) -> None:
        """Send weights again from the next call on. Ranks may differ; ``plan`` also detects changes itself."""
        self._seen = []

    def forget(self) -> None:
        """Choose no residents before the next step has ended: they are not part of checkpoints. Called on all ranks."""
        self._residents = Residents(self.placement)

    @property
    def _sharded(self) -> bool:
        """Whether FSDP shards the parameters. Equal on all ranks."""
        return self._sent_dtype is not None or any(map(is_dtensor, self.parameters))

    def shard(self, dtype: torch.dtype | None) -> None:
        self._sent_dtype = dtype or self.parameters[0].dtype
        self._memory, self._peers, self._stacks = [], [], {}
        self.set_placement(self.placement)

    def end_step(self) -> None:
        """Choose other residents before the next call, which sends trained weights again. Called on all ranks."""
        if self._trained():
            self.publish()
        self._due = True

    def publish_if_due(self) -> ConfigError | None:
        """Call ``prefetch``. ``materialize`` sends the other weights that a call needs.

        Returns:
            An error if FSDP shards experts that compute with one tensor of each parameter.
        """
        self.prefetch()
        if not self._sharded or (self.parameters[0].device.type == "cpu" and not self._one_tensor):
            return None
        return ConfigError(
            f"experts of layer {self._label!r} that FSDP shards can be lent (balance) only on the CPU, and without fp8 "
            'GEMMs. Use DistributedDataParallel, or the trainer\'s sharding = "fsdp", which does not shard experts '
            "that are lent"
        )

    @property
    def _one_tensor(self) -> bool:
        """Whether the experts compute with one tensor of each parameter: those that are quantized."""
        return getattr(self._experts, "gemm_dtype", "same") == "fp8"

    @torch._disable_dynamo
    def prefetch(self) -> None:
        """Start to send the weights of residents, at the start of a step. ``plan`` waits for them. Collective."""
        if self._due:
            self._start_residents(range(self.placement.world) if self._stale else ())

    def _start_residents(self, changed: Collection[int]) -> None:
        """Choose the residents of new weights, and start to send them. Collective. changed: homes with new weights."""
        self._wait()  # a call raised an error before its plan
        self._due, self._stale, homes = False, False, self.placement.homes
        for held in self._held:
            held[:] = [EMPTY if e != EMPTY and homes[e] in changed else e for e in held]
        pairs = self._residents.advance()
        self._arriving = self._start(pairs, self._places(pairs), f"publishing lent experts of layer {self._label!r}")
        if changed:
            self._seen = self._present()

    def _wait(self) -> None:
        """Wait for the weights of residents. Collective if they are being sent."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving()

    def publish(self) -> int:
        """Send weights again from the next call on. Return 0: the plan of a call determines the copies. Called on all
        ranks."""
        self.weights_changed()
        self._due = self._stale = True
        return 0

    @torch.no_grad()
    def plan(self, ids_TK: Tensor | None, trains: bool) -> CallPlan:
        """Return the plan of the next call. Collective.

        Args:
            ids_TK: expert ids of this rank's tokens. Invalid ones are not counted. None: this rank has none.
            trains: whether a backward pass may follow.

        Raises:
            RankMismatch: ranks have other settings, or other plans; on every rank.
        """
        self.prefetch()  # a rank that has raised an error calls only this
        self._wait()
        placement, channel = self.placement, channel_of(self._shards.group)
        experts, rank = placement.num_experts, channel.rank
        params = self.parameters
        if self._one_tensor or self._sharded:
            self._in_place = False
        moved = self._in_place and [param.data_ptr() for param in params] != [one.data_ptr() for one in self._memory]
        changed = self._sharded or self._seen != self._present()
        weights = sum(param.shape[1:].numel() for param in params)
        size = (self._sent_dtype or params[0].dtype).itemsize
        costs = self.balance.costs(weights, size, len(set(channel.comm.hosts)), params[0].device.type)
        settings = (*self.balance.words(), *costs)
        own = torch.zeros(experts + 3 + len(settings), dtype=torch.int64, device="cpu")
        if ids_TK is not None and not ids_TK.is_floating_point():
            ids_N = ids_TK.reshape(-1)
            own[:experts] = torch.bincount(ids_N[(ids_N >= 0) & (ids_N < experts)], minlength=experts)
        own[experts:] = torch.tensor((changed, trains, moved, *settings), dtype=torch.int64, device="cpu")
        words_WX = channel.all_gather(own.to(channel.control_device), f"the row counts of layer {self._label!r}").cpu()
        if (words_WX[:, experts + 3 :] != own[experts + 3 :]).any():
            of_ranks = [tuple(one) for one in words_WX[:, experts + 3 :].tolist()]
            raise RankMismatch(f"ranks balance layer {self._label!r} with other settings: {of_ranks}")
        counts_WE = words_WX[:, :experts]
        changed_W, grads_W, moved_W = words_WX[:, experts : experts + 3].T.tolist()
        if any(moved_W):
            self._share_parameters()
        parts = self._shards.sizes["etp"]
        if any(changed_W):
            self._start_residents({one // parts for one, flag in enumerate(changed_W) if flag})
            self._wait()
        residents: Sequence[tuple[int, int]] = self._residents.pairs
        if not any(grads_W):  # recomputation need not find the same plan
            residents = [(e, r) for r, held in enumerate(self._held) for e in held if e != EMPTY]
        loads_E, world = counts_WE.sum(0).tolist(), placement.world
        # With slices, each (token, slot) pair is a row of ``parts`` ranks.
        largest = parts * int(counts_WE.sum(1).max())
        limits = self.balance.limits(sum(loads_E), largest, world, placement.slots or 0, costs)
        lent, hashed = choose_rows(loads_E, placement, limits, residents)
        pairs = [(one.expert, one.rank) for one in lent]
        places = self._places(pairs)
        if not self._in_place and max(rows_of_ranks(loads_E, placement.homes, world, ())) > limits.rows:
            # Weights are sent before the header of the dispatch, which compares plans.
            state = checksum(hashed, places, self._held)
            hashes = channel.gather_values((state, 0), f"the plan of layer {self._label!r}")
            if any(one != hashes[0] for one in hashes):
                raise RankMismatch(
                    f"ranks have other plans of lent experts of layer {self._label!r}, from equal row counts"
                )
        if any(grads_W) and not (self._in_place or self._sharded):
            self._residents.record(loads_E, limits, lent)
        counts = loads_E, counts_WE[:rank].sum(0).tolist(), counts_WE[rank].tolist()
        rows = tuple(rows_of_ranks(loads_E, placement.homes, world, lent))
        return CallPlan(lent, places, hashed, rows, counts, len(set(residents).intersection(pairs)))

    def _present(self) -> list[tuple[int, int]]:
        """Return memory and version of each parameter; [] if FSDP shards them, which changes both."""
        if self._sharded:
            return []
        return list(zip([param.data_ptr() for param in self.parameters], self._present_versions(), strict=True))

    def _places(self, pairs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Return the slot of each (expert, rank): the one that has its weights, or else the first that is not used,
        at best by no resident."""
        used, kept, held = set(pairs), set(self._residents.pairs), self._held
        free = [
            sorted(
                (at for at, e in enumerate(of_rank) if (e, rank) not in used),
                key=lambda at: (of_rank[at], rank) in kept,
            )
            for rank, of_rank in enumerate(held)
        ]
        return tuple(held[rank].index(e) if e in held[rank] else free[rank].pop(0) for e, rank in pairs)

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
        their backward, which returns gradients, follows that of the dispatch: no rows are in flight then. Those that
        FSDP shards enter it when the experts run.
        """
        plan, ep = self.plan(ids_TK, torch.is_grad_enabled()), self._shards.place["ep"]
        call = LentCall(plan, self.placement.homes_per_rank[ep] + max(plan.of_rank(ep), default=-1) + 1)
        if self._sharded:
            call.enter = self._enter
        else:
            self._enter(call)
        return call

    def _enter(self, call: LentCall) -> None:
        """Send the weights of the experts that ``call`` lends, and set what its experts compute with. Collective."""
        plan, ep = call.plan, self._shards.place["ep"]
        self.materialize(plan)
        if not plan.lent:
            # Not the parameters: their gradients would go to ``main_grad``, and those of calls that lend to ``grad``.
            call.values = {name: param.view_as(param) for name, param in self._params().items()}
            call.lends = False
            return
        homes, stacked = self.placement.homes_per_rank[ep], not (self._in_place or self._sharded)
        if self._sharded:
            names, slots = list(self._params()), self._buffers()[1]
            call.others = [
                {name: rows[at : at + 1] for name, rows in zip(names, slots, strict=True)}
                for at in range(call.slots - homes)
            ]
        elif self._in_place:
            call.others = [self._peer(expert) for expert in plan.of_rank(ep).values()]
        call.values = stacks = {
            name: self._stack(name)[: call.slots].data if stacked else param.detach()
            for name, param in self._params().items()
        }
        trained = self._trained() if torch.is_grad_enabled() else {}
        if not trained:
            return
        count, channel = call.slots if stacked else homes, channel_of(self._shards.group)
        gradients = LentGradients(trained, count, None if stacked else len(call.others), channel)
        call.gradients = gradients
        call.values = entered(stacks, trained, lambda names, _: self.return_gradients(plan, gradients, names))

    def _trained(self) -> dict[str, nn.Parameter]:
        gradients = getattr(self._experts, "expert_gradients", None)
        frozen = set() if gradients is None else gradients.frozen_by_fsdp
        # A rank without experts returns the gradients of those that it is lent.
        params = {name: nn.Parameter(p.detach()) if name in frozen else p for name, p in self._params().items()}
        return {name: param for name, param in params.items() if param.requires_grad}

    def stacked(self) -> dict[str, Tensor]:
        if not self._sharded:
            return super().stacked()
        return {name: torch.cat(parts) for name, *parts in zip(self._params(), *self._buffers(), strict=True)}

    def _buffers(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        if not self._sharded:
            return super()._buffers()
        params = {name: param.detach() for name, param in self._params().items()}
        for name, param in params.items():
            slots = self._stacks.get(name)
            if slots is None or (slots.dtype, slots.device) != (param.dtype, param.device):
                self._stacks[name] = param.new_zeros(self.placement.slots or 0, *param.shape[1:])
        return list(params.values()), [self._stacks[name] for name in params]

    @property
    def _first_slots(self) -> Sequence[int]:
        """For each rank, the row of its first slot for copies in the tensors of ``_buffers``."""
        homes = self.placement.homes_per_rank
        return [0] * len(homes) if self._sharded else homes

    def lend_adapters(self, call: LentCall, adapters: Adapters) -> None:
        """Add the adapters of the experts of ``call`` to it, which lends experts. adapters: those of this rank."""
        plan, channel, ep = call.plan, channel_of(self._shards.group), self._shards.place["ep"]
        homes, placement = self.placement.homes_per_rank, self.placement
        copies = [
            (one.expert, one.rank, homes[one.rank] + place) for one, place in zip(plan.lent, plan.place, strict=True)
        ]
        transfers, what = [self._transfer_of(*one) for one in copies], f"adapters of experts of layer {self._label!r}"

        def send(tensors: Sequence[Tensor], out: Sequence[Tensor]) -> None:
            self.published_bytes += transfer_rows(channel, transfers, tensors, into(out), f"lending {what}")

        def add(partials: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
            self.published_bytes += self._add(copies, partials, grads, f"returning the gradients of {what}")

        own = plan.of_rank(ep)
        experts = (*placement.homes_of(ep), *(own.get(place, EMPTY) for place in range(call.slots - homes[ep])))
        offsets = tuple(plan.first_row(expert, ep) for expert in experts)
        call.adapters, call.receive_adapters = lend_adapters(adapters, experts, offsets, homes[ep], send, add)

    def _peer(self, expert: int) -> dict[str, Tensor]:
        """Return the weights of an expert of another rank in shared memory, [1, ...] by name."""
        home, row = self.placement.homes[expert], self._row[expert]
        peer = self._peers[home * self._shards.sizes["etp"] + self._shards.place["etp"]]
        return {name: rows[row : row + 1] for name, rows in peer.items()}

    def materialize(self, plan: CallPlan | None = None) -> None:
        """Send the weights of lent experts that are not in their slots yet. Collective if there are any.

        Args:
            plan: that of the call whose experts run next.
        """
        assert plan is not None
        if self._in_place:
            return
        pairs = [(one.expert, one.rank) for one in plan.lent]
        finish = self._start(pairs, plan.place, f"lending experts of layer {self._label!r}")
        if finish is not None:
            finish()

    def _start(self, pairs: Sequence[tuple[int, int]], places: Sequence[int], what: str) -> Callable[[], None] | None:
        """Start to send the weights of (expert, rank) that are not in their slots ``places``. Collective if there are
        any. Return a function that waits for them; None: there are none."""
        first, fresh = self._first_slots, list[tuple[int, int, int]]()
        for (expert, rank), place in zip(pairs, places, strict=True):
            if self._held[rank][place] != expert:
                self._held[rank][place] = expert
                fresh.append((expert, rank, first[rank] + place))
        if not fresh:
            return None
        unchanged = self._seen == self._present()
        finish = self._start_sending(fresh, what)
        if unchanged:
            self._seen = self._present()  # the first call moves the parameters into stacks
        return finish

    def return_gradients(self, plan: CallPlan, gradients: LentGradients, names: Sequence[str]) -> list[Tensor]:
        """Add the gradients of lent experts to those of their homes. Collective.

        Returns:
            The gradients of the parameters ``names``.
        """
        homes, ep = self.placement.homes_per_rank, self._shards.place["ep"]
        first = [0] * len(homes) if gradients.others else homes  # row of the first lent expert of each rank
        partials = list((gradients.others or gradients.stacks).values())
        copies = [
            (one.expert, one.rank, first[one.rank] + place) for one, place in zip(plan.lent, plan.place, strict=True)
        ]
        own = [stack[: homes[ep]] for stack in gradients.stacks.values()]
        what = f"returning the gradients of experts of layer {self._label!r}"
        self.published_bytes += self._add(copies, partials, own, what, gradients.memory)
        # A view would keep the memory of lent experts.
        copied = gradients.stacks[names[0]].shape[0] > homes[ep]
        params = map(self.parameter, names)
        gradients.release()
        return [grad.to(param.grad_dtype or param.dtype, copy=copied) for grad, param in zip(own, params, strict=True)]
