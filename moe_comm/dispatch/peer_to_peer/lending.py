"""Experts that ranks lend each other in a call, without the CPU: the kernels of csrc/cuda/lend.h as operations.

    forward    ids ─▶ plan ─▶ ids of slots ─▶ dispatch         stack of the home ─▶ slots for copies
    backward   stack of the home ─▶ slots for copies           gradients of all owners, in fp32 ─▶ home

A stack has a rank's experts, and then its slots for copies. All ranks map the stacks of all, so ``lend`` and
``pull_weights`` need no addresses of a call. The plan of a call is a tensor on the device, which backward uses again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from moe_comm.comm.header import LEND, RETURN
from moe_comm.dispatch.peer_to_peer.memory import shared_blocks
from moe_comm.dispatch.peer_to_peer.primitives import KernelOperation
from moe_comm.dispatch.peer_to_peer.repeated import RecordedHeader, RepeatedPrimitives, or_none
from moe_comm.dispatch.peer_to_peer.rows import offset_of
from moe_comm.errors import HeapError
from moe_comm.gpu.blocks import ALIGN, Blocks, round_up
from moe_comm.gpu.protocol import Offer, chunk_of, words_address
from moe_comm.kernels.recording import Step, record
from moe_comm.runtime.memory import DTYPE_CODES
from moe_comm.runtime.native_core import native
from moe_comm.topology import Placement
from moe_comm.topology.balance import Balance, Lent

if TYPE_CHECKING:
    from moe_comm import _C

TENSORS = 4
"""Maximum number of tensors of a stack."""
COUNTS = 6
"""Number of counts that ``LentHomes.tally`` has; see LendArgs in csrc/cuda/args.h."""
LENT_WORDS = 5
Shapes = Mapping[str, torch.Size]
"""Shapes of the tensors of one expert by name."""


def _offsets(slots: int, sizes: Sequence[int], element: int) -> list[int]:
    """Return the first byte of each tensor of a stack of ``slots`` experts, and the end; see csrc/cuda/lend.h."""
    return list(accumulate((round_up(slots * size * element, ALIGN) for size in sizes), initial=0))


def _padded(sizes: Sequence[int]) -> list[int]:
    return [*sizes, *[0] * (TENSORS - len(sizes))]


@dataclass(frozen=True, eq=False)
class ExpertStacks:
    """Weights of experts, which all ranks of the group map.

    Attributes:
        values: [slots of this rank, ...] by name.
        sizes: elements of one expert in each of them.
        addresses: [W] int64 on the device: the stacks of all ranks.
    """

    values: dict[str, Tensor]
    sizes: list[int]
    addresses: Tensor
    blocks: Blocks


@dataclass(frozen=True, eq=False)
class LentHomes:
    """The homes of a layer's experts, and when to lend them, on the device.

    Attributes:
        table: int64 words; see MOE_P2P_HOMES in csrc/cuda/args.h.
        experts, copies: number of experts, and of slots for copies on each rank.
        settings: rows and memory of ``balance.words``, and the nanoseconds of a row and of a copy.
        digest: of all these, which ranks compare.
        work: memory of the kernel.
        tally: [COUNTS] int64, sums over the calls that count.
    """

    table: Tensor
    experts: int
    copies: int
    balance: Balance
    settings: tuple[int, int, int, int]
    digest: int
    plan_words: int
    work: Tensor
    tally: Tensor

    @classmethod
    def of(cls, placement: Placement, balance: Balance, costs: tuple[int, int], device: torch.device) -> LentHomes:
        """Return the homes of ``placement``, which has slots for copies. costs: see ``Balance.costs``."""
        home_E, world, copies = placement.homes, placement.world, placement.slots or 0
        experts = len(home_E)
        held = sorted(range(experts), key=lambda expert: (home_E[expert], expert))
        first = accumulate(placement.homes_per_rank, initial=0)
        table = [*home_E, *held, *first, *(slots[0] for slots in placement.slot_ids())]
        plan_words, work_words = native().p2p_lend_words(world, experts, 0, copies)
        rows, memory, _ = balance.words()
        settings = rows, memory, *costs

        def words(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device="cpu").to(device)

        digest = zlib.crc32(repr((placement.digest, settings)).encode())
        work = torch.empty(work_words, dtype=torch.int64, device=device)
        tally = words([0] * COUNTS)
        return cls(words(table), experts, copies, balance, settings, digest, plan_words, work, tally)

    def lending(self, plan: Tensor | None) -> tuple[int, int, int, int]:
        """Return the words of MOE_P2P_HOMES."""
        return self.experts, words_address(self.table), self.copies, words_address(plan)


class NativeLending(NamedTuple):
    """The experts that the native calls of a layer lend.

    homes, stacks: of the experts. counted: see ``lend``. sums: shape and dtype of the gradients of w13, w2, b13 and b2;
    None for those that are not trained.
    """

    homes: LentHomes
    stacks: ExpertStacks
    counted: bool
    sums: tuple[tuple[torch.Size, torch.dtype] | None, ...]


@dataclass(eq=False, slots=True)
class NativeCall:
    """The experts that one native call lends.

    Attributes:
        lends: what all calls of the layer lend.
        params: w13, w2, b13 and b2 of this rank, or None for missing ones: the call computes with ``lends.stacks``.
        new_gradients: allocates memory for the gradients of w13, w2, b13 and b2 of all slots (``gradient_stacks``).
        use_slots: takes the plan, and returns whether its weights have to be copied into the slots for copies, as
            another call has used these.
        plan: its words, after the forward pass.
    """

    lends: NativeLending
    params: tuple[Any, ...]
    new_gradients: Callable[[], Sequence[Tensor | None]]
    use_slots: Callable[[Tensor], bool]
    plan: Tensor = field(init=False)


class DevicePlan:
    """The plan of a call, which is copied from the device when it is read. Attributes are those of ``CallPlan``.

    words: LendPlan of csrc/cuda/lend.h.
    """

    def __init__(self, words: Tensor, homes: LentHomes, placement: Placement) -> None:
        self.words, self._homes, self._placement = words, homes, placement
        self._read: tuple[tuple[Lent, ...], tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def digest(self) -> Tensor:
        """The hash of ``lent``, [1] on the device."""
        return self.words[1:2]

    @property
    def lent(self) -> tuple[Lent, ...]:
        return self._known()[0]

    @property
    def place(self) -> tuple[int, ...]:
        return self._known()[1]

    @property
    def rows(self) -> tuple[int, ...]:
        return self._known()[2]

    def _known(self) -> tuple[tuple[Lent, ...], tuple[int, ...], tuple[int, ...]]:
        if self._read is None:
            world, copies, words = self._placement.world, self._homes.copies, self.words.tolist()
            first = len(words) - LENT_WORDS * world * copies
            slots = self._placement.layout.offsets
            lent = [words[first + LENT_WORDS * i :][:LENT_WORDS] for i in range(words[0])]
            homes = self._placement.homes_per_rank
            self._read = (
                tuple(Lent(*one[:3]) for one in lent),
                tuple(slot - slots[rank] - homes[rank] for _, rank, _, _, slot in lent),
                tuple(words[2 : 2 + world]),
            )
        return self._read


class LendingPrimitives(RepeatedPrimitives):
    """The operations of lending."""

    _most_slots: int | None = None  # of a rank, for which ``capacity_rows="memory"`` has room

    def new_stacks(self, shapes: Shapes, dtype: torch.dtype) -> ExpertStacks:
        """Return zeros for the experts of this rank and its slots for copies. Collective.

        Raises:
            HeapError: a rank has no memory; on every rank.
        """
        shape, sizes = self.memory.operations.shape, [one.numel() for one in shapes.values()]
        first = _offsets(shape.local_experts, sizes, dtype.itemsize)
        blocks = shared_blocks(self.channel, self.group, self.device, max(first[-1], ALIGN))
        values = {}
        for start, size, (name, of_one) in zip(first, sizes, shapes.items(), strict=False):
            bytes_ = blocks.own[start : start + len(self.local_experts) * size * dtype.itemsize]
            values[name] = bytes_.view(dtype).view(-1, *of_one)
        addresses = torch.tensor(blocks.addresses, dtype=torch.int64, device="cpu").to(self.device)
        return ExpertStacks(values, sizes, addresses, blocks)

    def lend(self, x_TD: Tensor, ids_TK: Tensor, homes: LentHomes, label: str, counted: bool) -> tuple[Tensor, Tensor]:
        """Plan a call. Collective.

        Args:
            x_TD: the tokens of the call, of which only width and dtype are used.
            ids_TK: ids of experts; -1 drops a slot.
            counted: whether to add the counts of the call to ``homes.tally``.

        Returns:
            [T, K] ids of slots for the dispatch, and the words of the plan.

        Raises:
            RankMismatch: ranks have other settings. RoutingError: invalid ids. On a GPU as errors of ``check``.
        """
        operation = self._new_operation(LEND, x_TD.shape[1], x_TD.dtype, ids_TK.shape[1], label=label)
        operation.num_experts, operation.placement = homes.experts, homes.digest
        ids_TK = ids_TK.to(torch.int64).contiguous()
        with operation, KernelOperation(self, operation, ids_TK):
            slots_TK, plan = self.queue_lend(RecordedHeader(self.packed(operation)), ids_TK, homes, counted)
            if self.memory.emulated:
                self.memory.check(ids_TK)
            self._stream.use_by_caller(slots_TK, plan)
        return slots_TK, plan

    def check_room(self, slots: int, homes: LentHomes, label: str) -> None:
        """Check that there is room for the rows of a call that lends. The first call is collective.

        slots: (token, slot) pairs of this rank. The first call computes ``capacity_rows`` from them, if that is
        "memory". -1: this rank reports an error in place of the plan, and the next call is the first one.

        Raises:
            HeapError: more slots than in the first call.
        """
        if self.peer_options.capacity_rows != "memory":
            return
        if self._most_slots is None:
            assert self.channel is not None
            what = "the room for rows of a layer that lends experts"
            of_ranks = [number for number, _ in self.channel.gather_values((slots, 0), what)]
            self.capacity_rows = max(homes.balance.most_rows(max(*of_ranks, 0)), 1)
            self._most_slots = max(of_ranks) if min(of_ranks) >= 0 else None
        if self._most_slots is None or slots <= self._most_slots:
            return
        fault = HeapError(
            f'rank {self.rank} has {slots} (token, slot) pairs; capacity_rows="memory" has room for those of the '
            f"layer's first call, at most {self._most_slots} on a rank. Make the first call with the most tokens, or "
            "set PeerToPeerOptions.capacity_rows to a number"
        )
        self.refuse(fault, label=label)

    def queue_lend(
        self, header: RecordedHeader, ids_TK: Tensor, homes: LentHomes, counted: bool
    ) -> tuple[Tensor, Tensor]:
        """Queue the kernels of ``lend``, whose results are returned."""
        operations, (tokens, top_k) = self.memory.operations, ids_TK.shape
        slots_TK, plan = torch.empty_like(ids_TK), torch.empty(homes.plan_words, dtype=torch.int64, device=self.device)
        chunk = chunk_of(tokens, top_k)
        at = operations.begin_turn(-(-tokens * top_k // chunk))
        settings = *homes.settings, words_address(homes.work), words_address(homes.tally) if counted else 0
        operations.plan.lend(
            header.packed, at, tokens, top_k, words_address(ids_TK), words_address(slots_TK), chunk,
            homes.lending(plan), settings,
        )  # fmt: skip

        def add(to: _C.GpuRecord, _: Sequence[int], args: Sequence[Any]) -> bool:
            operations.plan.record_lend(
                to, header.template, self._numbers(args), (tokens, top_k, chunk), args[2:], homes.lending(None),
                settings,
            )  # fmt: skip
            return True

        record(Step(add, (), (*header.numbers, ids_TK, slots_TK, plan)))
        return slots_TK, plan

    def pull_weights(self, homes: LentHomes, stacks: ExpertStacks, plan: Tensor) -> None:
        """Copy the weights of the experts that this rank is lent into its slots for copies. Does not wait.

        The homes must not change their weights before this rank takes part in another operation.
        """
        with KernelOperation(self, self.memory.current, plan, *stacks.values.values()):
            self.queue_pull(homes, stacks, plan)

    def queue_pull(self, homes: LentHomes, stacks: ExpertStacks, plan: Tensor) -> None:
        """Queue the kernel of ``pull_weights``."""
        element, sizes = next(iter(stacks.values.values())).element_size(), _padded(stacks.sizes)
        how, operations = (words_address(stacks.addresses), element, self._blocks), self.memory.operations
        operations.plan.pull(homes.lending(plan), sizes, *how)

        def add(to: _C.GpuRecord, _: Sequence[int], args: Sequence[Any]) -> bool:
            operations.plan.record_pull(to, args[0], homes.lending(None), sizes, how)
            return True

        record(Step(add, (), (plan,)))

    def gradient_stacks(self, shapes: Shapes) -> dict[str, Tensor]:
        """Return memory for fp32 gradients of all slots of this rank, [slots, ...] by name, which peers can read.

        Raises:
            HeapError: no room, on this rank only.
        """
        sizes = [one.numel() for one in shapes.values()]
        first, slots = _offsets(self.memory.operations.shape.local_experts, sizes, 4), len(self.local_experts)
        block = self.memory.operations.heap.block(first[-1])
        return {
            name: block.matrix(start, slots, size, torch.float32).view(slots, *of_one)
            for start, size, (name, of_one) in zip(first, sizes, shapes.items(), strict=False)
        }

    def collect_gradients(
        self, homes: LentHomes, plan: Tensor, grads: Tensor, sums: Sequence[Tensor], label: str
    ) -> None:
        """Add the gradients of lent experts, those of all ranks in order, and round them once. Collective.

        Args:
            grads: the first of ``gradient_stacks``, which have the gradients of this rank's slots.
            sums: outputs [experts of this rank, ...], dense and of one dtype, in the order of the stacks.
        """
        operation = self._new_operation(RETURN, 0, sums[0].dtype, 1, label=label)
        with operation, KernelOperation(self, operation, plan, *sums):
            self.queue_collect(RecordedHeader(self.packed(operation)), homes, plan, grads, sums)
            self._check_if_blocking()
            self._stream.use_by_caller(*sums)

    def queue_collect(
        self, header: RecordedHeader, homes: LentHomes, plan: Tensor, grads: Tensor, sums: Sequence[Tensor]
    ) -> None:
        """Queue the kernels of ``collect_gradients``."""
        operations, sizes = self.memory.operations, _padded([one.shape[1:].numel() for one in sums])
        how, none = (DTYPE_CODES[sums[0].dtype], self._blocks), [None] * (TENSORS - len(sums))
        operations.plan.collect(
            header.packed, operations.begin_turn(0), Offer(offset_of(operations.heap, grads)), homes.lending(plan),
            sizes, _padded([one.data_ptr() for one in sums]), *how,
        )  # fmt: skip

        def add(to: _C.GpuRecord, _: Sequence[int], args: Sequence[Any]) -> bool:
            at = or_none(args[2:])
            operations.plan.record_collect(
                to, header.template, self._numbers(args), at, homes.lending(None), sizes, how
            )
            return True

        record(Step(add, (), (*header.numbers, grads, plan, *sums, *none)))
