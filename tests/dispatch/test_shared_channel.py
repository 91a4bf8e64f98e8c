"""Collectives through shared memory have the bits of the group's backend and raise typed errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("moe_comm._C", reason="the native core is not built")

from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import communicator_of, heap_of
from moe_comm.comm.shared_channel import LOCAL_SUM_BYTES, SharedChannel
from moe_comm.dispatch.selection.factory import make_dispatcher
from moe_comm.errors import RankMismatch
from moe_comm.runtime.memory import block
from tests.dispatch.workers import heap_constants
from tests.pool import on_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
SHAPES = [(), (1,), (7,), (3, 5), (129, 67), (64, 300)]


def _channels(rank: int, world: int) -> tuple[SharedChannel, Channel]:
    group = dist.group.WORLD
    assert group is not None
    comm = communicator_of(group)
    shared = SharedChannel(comm, 60.0)
    shared.attach_heap(heap_of(comm, 60.0))
    return shared, Channel(comm, 60.0)


def _draw(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 50
    return values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


def _sum_in_rank_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_collective_has_the_bits_of_the_backend(rank: int, world: int, dtype: torch.dtype) -> None:
    shared, backend = _channels(rank, world)
    for shape in SHAPES:
        x = _draw(rank, shape, dtype)
        assert torch.equal(shared.all_gather(x, "a gather"), backend.all_gather(x, "a gather"))
        transposed = x.T if x.dim() == 2 else x
        assert torch.equal(shared.all_gather(transposed, "a gather"), backend.all_gather(transposed, "a gather"))
        parts = _draw(rank, (world, *shape), dtype)
        assert torch.equal(shared.swap(parts, "a swap"), backend.swap(parts, "a swap"))
        assert shared.can_sum(x) == (dtype in (torch.float32, torch.bfloat16, torch.float16))
        if shared.can_sum(x):
            inputs = [_draw(r, shape, dtype) for r in range(world)]
            assert torch.equal(shared.all_reduce(x, "a sum"), _sum_in_rank_order(inputs))
            inputs = [_draw(r, (world, *shape), dtype)[rank] for r in range(world)]
            assert torch.equal(shared.reduce_scatter(parts, "a part of a sum"), _sum_in_rank_order(inputs))
        assert torch.equal(x, _draw(rank, shape, dtype)), "a collective changed its argument"
    # Rank 0 sends and receives one row each; the other ranks do not.
    sizes = [[1 if 0 in (s, r) else 2 for r in range(world)] for s in range(world)]
    rows = _draw(rank, (sum(sizes[rank]), 3), dtype)
    received = [row[rank] for row in sizes]
    whole = shared.all_to_all(rows, sizes[rank], received, "unequal parts")
    assert torch.equal(whole, backend.all_to_all(rows, sizes[rank], received, "unequal parts"))
    group = dist.group.WORLD
    assert group is not None
    assert heap_of(communicator_of(group), 60.0).heap.used == 0


@on_ranks(2, 8)
def test_an_all_reduce_of_any_length_is_added_in_order_of_rank(rank: int, world: int) -> None:
    shared, _ = _channels(rank, world)
    elements = LOCAL_SUM_BYTES // 4
    for count in (elements, elements + 1, elements + 31 * world, 3 * elements + 17, 1_000_003):
        total = shared.all_reduce(_draw(rank, (count,), torch.float32), "a large sum")
        assert torch.equal(total, _sum_in_rank_order([_draw(r, (count,), torch.float32) for r in range(world)]))


@on_ranks(2)
def test_ranks_in_different_calls_raise_once_and_stay_usable(rank: int, world: int) -> None:
    shared, _ = _channels(rank, world)
    x = torch.ones(4, 3)
    shared.all_gather(x, "the same call")
    with pytest.raises(RankMismatch, match=rf"rank {rank} is in call \d+, call of rank {rank}, but rank {1 - rank} in"):
        shared.all_gather(x, f"call of rank {rank}")
    dispatcher = make_dispatcher(2, dist.group.WORLD, backend="shared_memory")
    ids = torch.zeros(4, 1, dtype=torch.int64)
    concurrent: Callable[[], object] = partial(shared.all_gather, x, "a gather during a dispatch")
    with pytest.raises(RankMismatch, match="collective" if rank else "dispatch"):
        (partial(dispatcher.dispatch, x, ids) if rank else concurrent)()
    assert torch.equal(shared.all_gather(x, "the next call"), torch.ones(2, 4, 3))
    assert dispatcher.dispatch(x, ids).handle.call == 2


@on_ranks(4)
def test_all_ranks_use_the_backend_with_the_same_bits_if_one_has_no_room(rank: int, world: int) -> None:
    group = dist.new_group(backend="gloo")
    assert group is not None
    comm = communicator_of(group)
    with heap_constants(INITIAL_BYTES=0, RESERVE_BYTES=64 << 20):
        shared_heap = heap_of(comm, 60.0)
    reserved = block(shared_heap.heap, 1, 13 << 20, torch.float32) if rank == 1 else None  # all but 12 MB of its heap
    shared = SharedChannel(comm, 60.0)
    shared.attach_heap(shared_heap)
    x = _draw(rank, (world, 2 << 20), torch.bfloat16)  # bf16, because gloo rounds bf16 sums after every addition
    inputs = [_draw(r, tuple(x.shape), torch.bfloat16) for r in range(world)]
    with pytest.warns(RuntimeWarning, match=r"uses the group's backend.*shm-size"):
        total = shared.all_reduce(x, "a sum that does not fit")
    assert torch.equal(total, _sum_in_rank_order(inputs))
    with pytest.warns(RuntimeWarning, match=r"uses the group's backend"):
        assert torch.equal(shared.reduce_scatter(x, "its part"), _sum_in_rank_order(inputs)[rank])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(shared.all_reduce(x[:, :99], "one that fits"), total[:, :99])
    del reserved


@on_ranks(2)
def test_ranks_with_different_sizes_raise_on_every_rank(rank: int, world: int) -> None:
    shared, _ = _channels(rank, world)
    sizes = (100, 200) if rank else (200, 100)
    for size in sizes:
        with pytest.raises(RankMismatch, match=rf"rank {1 - rank} in call \d+, values \({4 * (300 - size)} bytes\)"):
            shared.all_gather(torch.ones(size), "values")
    shared.all_gather(torch.ones(7), "values")
