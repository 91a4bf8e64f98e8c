"""Rows of stacks over experts that move between ranks, and within them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_comm.comm import sparse_rows
from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.errors import HeapError, PeerError
from moe_comm.layers.moe.relocation import MovedStack, RowMoves
from moe_comm.topology import Box, Placement
from tests.pool import RankPool

WIDTH = 5
"""An odd number of elements of each row, so that rows are not aligned."""
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


def boxes_of(ids: Sequence[int], width: int = WIDTH) -> list[Box]:
    """Return the boxes of a rank that holds the rows ``ids`` in this order."""
    columns = slice(0, width)
    return [Box((slice(at, at + 1), columns), (slice(one, one + 1), columns)) for at, one in enumerate(ids)]


def full(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(250, (rows, WIDTH), generator=torch.Generator().manual_seed(7)).to(dtype)


def shuffled(counts: Sequence[int], rng: random.Random) -> list[list[int]]:
    """Return the ids of each rank's rows, in any order."""
    ids = list(range(sum(counts)))
    rng.shuffle(ids)
    return [[ids.pop() for _ in range(count)] for count in counts]


def move_and_compare(rank: int, world: int, arg: tuple[bool, tuple[int, ...]]) -> None:
    shared, counts = arg
    rng, before = random.Random(3), shuffled(counts, random.Random(2))
    configure_collectives(CollectiveOptions(shared_memory=shared))
    group = dist.group.WORLD if world > 1 else None
    try:
        tensors = {dtype: full(sum(counts), dtype)[before[rank]] for dtype in DTYPES}
        for _ in range(4):
            after = shuffled(counts, rng)
            old, new = ([boxes_of(ids) for ids in of_ranks] for of_ranks in (before, after))
            stacks = [MovedStack([tensor, tensor.clone()], old, new) for tensor in tensors.values()]
            moves = RowMoves(stacks, rank)
            moves.run(group, "a test")
            leaving = len(set(before[rank]) - set(after[rank]))
            assert moves.sent_bytes == leaving * WIDTH * sum(2 * dtype.itemsize for dtype in DTYPES)
            for stack in stacks:
                for tensor in stack.tensors:
                    assert torch.equal(tensor, full(sum(counts), tensor.dtype)[after[rank]])
            before = after
    finally:
        configure_collectives(CollectiveOptions())


@pytest.mark.parametrize("shared", [False, True])
def test_any_permutation_of_the_rows_of_all_ranks(pool4: RankPool, shared: bool) -> None:
    pool4.run(move_and_compare, (shared, (5, 0, 7, 4)), timeout=60)


class Writes(TorchDispatchMode):
    """Counts the bytes that operators write, and those of new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.written = self.allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.written += result.nbytes
        elif isinstance(result, Tensor) and not func.is_view and not func._schema.is_mutable:
            self.allocated += result.nbytes
        return result


def count_writes(rank: int, world: int, _: None) -> None:
    """Exchange some experts of ranks; those that stay keep their place."""
    old = Placement.contiguous(12, world)
    new = old.with_owners([(one,) for one in (1, 0, 0, 3, 1, 1, 2, 2, 2, 0, 3, 3)])
    tensors = [torch.rand(3, 1000, generator=torch.Generator().manual_seed(9)) for _ in range(3)]
    boxes = [[boxes_of(one.homes_of(r), 1000) for r in range(world)] for one in (old, new)]
    with Writes() as writes:
        moves = RowMoves([MovedStack(tensors, *boxes)], rank)
        moves.run(dist.group.WORLD, "a test")
    received = len(set(new.homes_of(rank)) - set(old.homes_of(rank))) * 3 * 4000
    # Each byte is copied to the block of its source, and from there to its destination. Nothing else is.
    assert (writes.written, writes.allocated) == (moves.sent_bytes + received, 0)


def test_a_moved_byte_is_copied_twice_and_others_not_at_all(pool4: RankPool) -> None:
    pytest.importorskip("moe_comm._C", reason="the native core is not built")
    pool4.run(count_writes, None, timeout=60)


def move_without_room(rank: int, world: int, counts: tuple[int, ...]) -> None:
    full_memory = mock.Mock(side_effect=HeapError("/dev/shm is full"))
    with contextlib.ExitStack() as stack:
        if rank == 1:
            stack.enter_context(mock.patch.object(sparse_rows, "block", full_memory))
        stack.enter_context(pytest.warns(RuntimeWarning, match="/dev/shm is full.*a test uses another method"))
        move_and_compare(rank, world, (True, counts))
    assert full_memory.called == (rank == 1)


def test_a_rank_without_room_in_shared_memory_makes_all_use_the_backend(pool2: RankPool) -> None:
    pytest.importorskip("moe_comm._C", reason="the native core is not built")
    pool2.run(move_without_room, (3, 5), timeout=60)


def test_cycles_within_one_rank() -> None:
    move_and_compare(0, 1, (True, (9,)))


def fail_to_write(rank: int, world: int, copies: int) -> tuple[str, bool]:
    """Move rows between ranks and within them, in a cycle on rank 0; rank 1 fails after ``copies`` writes."""
    ReadOnly.copies = copies
    before = ([0, 1, 2, 3], [4, 5, 6, 7])
    after = ([1, 2, 0, 4], [7, 3, 5, 6])
    tensors = [full(8, torch.float32)[before[rank]] for _ in range(2)]
    if rank:
        tensors[1] = tensors[1].as_subclass(ReadOnly)
    stack = MovedStack(tensors, *([boxes_of(ids) for ids in of_ranks] for of_ranks in (before, after)))
    try:
        RowMoves([stack], rank).run(dist.new_group([0, 1]), "a test")  # the group is unusable afterwards
    except (PeerError, PermissionError) as error:
        return type(error).__name__, all(
            torch.equal(tensor, full(8, torch.float32)[before[rank]]) for tensor in tensors
        )
    return "nothing raised", False


class ReadOnly(Tensor):
    """A tensor for which one write fails."""

    copies = 0

    def copy_(self, *args: object, **options: object) -> Tensor:
        ReadOnly.copies -= 1
        if ReadOnly.copies == -1:
            raise PermissionError
        return super().copy_(*args, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_rows_are_restored_if_a_rank_fails_while_it_writes(pool2: RankPool, copies: int) -> None:
    pytest.importorskip("moe_comm._C", reason="the native core is not built")
    assert pool2.run(fail_to_write, copies, timeout=60) == [("PeerError", True), ("PermissionError", True)]
