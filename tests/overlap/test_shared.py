"""Linear-layer operators on ranks that share memory.

Rows are read in place, results are bit-identical to those of other transports, and an error on one rank raises on all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

pytest.importorskip("moe_comm._C", reason="the native core is not built")

from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import channel_of, communicator_of, configure_collectives, heap_of
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.errors import PeerDied, PeerError, PeerTimeout, RankMismatch
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.overlap import shared
from moe_comm.overlap.linear import gather_matmul, matmul_scatter
from moe_comm.overlap.options import Overlap
from moe_comm.runtime.memory import block
from tests.dispatch.workers import heap_constants
from tests.layers.reference import draw
from tests.overlap.common import gather_reference, scatter_reference
from tests.pool import RankPool, on_ranks, with_longer_deadline

OPERATORS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "gather_matmul": (gather_matmul, gather_reference),
    "matmul_scatter": (matmul_scatter, scatter_reference),
}
TWO_CHUNKS = Overlap(2, 1)
"""Two chunks, without a minimum chunk size."""
Grads = tuple[Tensor, Tensor, Tensor]


def _new_group() -> ProcessGroup:
    group: ProcessGroup = dist.new_group(backend="gloo")
    return group


def _inputs(name: str, rank: int, world: int, rows: int = 40, dtype: torch.dtype = torch.float32) -> Grads:
    """Return x, weight and the gradient of the output, different on every rank."""
    all_rows, own_rows = rows * world, rows
    in_rows, out_rows = (own_rows, all_rows) if name == "gather_matmul" else (all_rows, own_rows)
    x, w = draw(in_rows, 24, seed=rank, dtype=dtype), draw(9, 24, seed=50 + rank, dtype=dtype)
    return x, w, draw(out_rows, 9, seed=100 + rank, dtype=dtype)


def _pass(name: str, inputs: Grads, group: ProcessGroup, overlap: Overlap = TWO_CHUNKS) -> Grads:
    """Run forward and backward. Return the output and the gradients of x and weight."""
    x, w, grad = inputs
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = OPERATORS[name][0](x, w, group, overlap)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), grad)
    return y.detach(), grad_x, grad_w


@contextmanager
def _passes_in_place(passes: int) -> Iterator[None]:
    """Check that this many forward or backward passes run in place within the context."""
    original, count = SharedChannel.rendezvous, 0

    def rendezvous(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    with mock.patch.object(SharedChannel, "rendezvous", rendezvous):
        yield
    assert count == passes


@contextmanager
def _call_before_gemm(before: Callable[[int], None]) -> Iterator[None]:
    """Within the context, call ``before(n)`` before the n-th GEMM whose results are summed over the ranks."""
    original, calls = row_invariant_mm, 0

    def gemm(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        before(calls)
        return original(*args, **kwargs)

    with mock.patch.object(shared, "row_invariant_mm", gemm):
        yield


@on_ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_in_place_and_over_the_backend_give_the_same_bits(rank: int, world: int, dtype: torch.dtype) -> None:
    """Compare in-place, chunked and reference results. float64 is not read in place."""
    group = _new_group()
    in_place = dtype != torch.float64
    try:
        for name, (_, reference) in OPERATORS.items():
            inputs = _inputs(name, rank, world, dtype=dtype)
            with _passes_in_place(2 if in_place else 0):
                result = _pass(name, inputs, group)
                _pass(name, inputs, group, Overlap(1))
            configure_collectives(CollectiveOptions(shared_memory=False))
            with _passes_in_place(0):
                chunked = _pass(name, inputs, group)
            assert all(torch.equal(a, b) for a, b in zip(result, chunked, strict=True))
            assert torch.equal(result[0], reference(*inputs[:2], group))
            configure_collectives(CollectiveOptions())
    finally:
        configure_collectives(CollectiveOptions())
    assert heap_of(communicator_of(group), 60.0).heap.used == 0


@on_ranks(2)
def test_strided_rows_are_supported(rank: int) -> None:
    x = draw(24, 64, seed=rank).t()[:, 3:19]  # neither dense nor aligned
    w = draw(16, 16, seed=9)
    assert torch.equal(gather_matmul(x, w, dist.group.WORLD, TWO_CHUNKS), gather_reference(x, w, dist.group.WORLD))


def _delay_rank_1(rank: int, world: int, path: Path) -> list[int]:
    """Delay rank 1 until rank 0 has received all other rows. Return the source ranks in the order of receipt."""
    store = dist.FileStore(str(path), world)
    group = _new_group()
    channel_of(group)
    if rank == 1:
        store.wait(["others received"])
    order: list[int] = []
    original = shared.SharedTransport.start_gather

    def recorded(transport: shared.SharedTransport, x_SD: Tensor) -> Any:
        for arrival in original(transport, x_SD):
            order.append(arrival.ranks.start)
            yield arrival
            if rank == 0 and len(order) == world - 1:
                store.set("others received", "")

    x, w, _ = _inputs("gather_matmul", rank, world)
    with mock.patch.object(shared.SharedTransport, "start_gather", recorded):
        y = gather_matmul(x, w, group, TWO_CHUNKS)
    assert torch.equal(y, gather_reference(x, w, group))
    return order


def test_rows_are_computed_in_order_of_completion(pool4: RankPool, tmp_path: Path) -> None:
    orders = pool4.run(_delay_rank_1, tmp_path / "store")
    assert [order[0] for order in orders] == [0, 1, 2, 3]
    assert orders[0][-1] == 1
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)


@on_ranks(2, 4)
def test_a_mismatch_raises_on_all_ranks_and_the_next_call_works(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    odd_rank = world - 1
    for name, (operator, _) in OPERATORS.items():
        x, w, _ = _inputs(name, rank, world)
        mismatches: list[tuple[Tensor, Tensor, Overlap]] = [
            (x[:, 1:], w[:, 1:], TWO_CHUNKS) if name == "gather_matmul" else (x, w[1:], TWO_CHUNKS),
            (x[: x.shape[0] // 2], w, TWO_CHUNKS),
            (x[:0], w, TWO_CHUNKS),
            (x.bfloat16(), w.bfloat16(), TWO_CHUNKS),
            (x.double(), w.double(), TWO_CHUNKS),
            (x, w, Overlap(3, 1)),
            (x, w, Overlap(1)),
        ]
        for other in mismatches:
            with pytest.raises(
                RankMismatch, match=rf"rank {rank} is in call.*rank {0 if rank == odd_rank else odd_rank} in call"
            ):
                operator(
                    *(other if rank == odd_rank else (x, w, TWO_CHUNKS))[:2],
                    group,
                    other[2] if rank == odd_rank else TWO_CHUNKS,
                )
    for name in OPERATORS:  # the next calls work
        _pass(name, _inputs(name, rank, world), group)
    with pytest.raises(RankMismatch):
        OPERATORS["gather_matmul" if rank == odd_rank else "matmul_scatter"][0](
            torch.ones(16 * world, 16), torch.ones(16, 16), group, TWO_CHUNKS
        )
    other_call = partial(channel_of(group).all_gather, torch.ones(3), "something else")
    scatter_call = partial(matmul_scatter, torch.ones(16 * world, 16), torch.ones(16, 16), group, TWO_CHUNKS)
    with pytest.raises(RankMismatch):
        (other_call if rank == odd_rank else scatter_call)()
    _pass("matmul_scatter", _inputs("matmul_scatter", rank, world), group)


@on_ranks(2)
def test_ranks_that_disagree_on_the_weight_gradient_raise(rank: int, world: int) -> None:
    """Only rank 0 computes the weight gradient."""
    group = dist.group.WORLD
    x, w, grad = _inputs("gather_matmul", rank, world)
    x, w = x.requires_grad_(), w.requires_grad_(rank == 0)
    y = gather_matmul(x, w, group, TWO_CHUNKS)
    with pytest.raises(RankMismatch):
        y.backward(grad)
    gather_matmul(x.detach(), w.detach(), group, TWO_CHUNKS)


@on_ranks(2, 4)
def test_all_ranks_use_chunks_with_the_same_bits_if_one_heap_is_full(rank: int, world: int) -> None:
    """Fill the heap of the last rank and check that all ranks fall back to chunks."""
    group = _new_group()
    with heap_constants(INITIAL_BYTES=0, RESERVE_BYTES=64 << 20):
        shared_heap = heap_of(communicator_of(group), 60.0)
    # The block leaves 1 MiB of the last rank's heap.
    filler = block(shared_heap.heap, 1, 63 << 18, torch.float32) if rank == world - 1 else None
    for name in OPERATORS:
        inputs = _inputs(name, rank, world, rows=30_000)
        with _passes_in_place(2), pytest.warns(RuntimeWarning, match=r"cannot grow shared memory.*uses another method"):
            result = _pass(name, inputs, group, Overlap(32, 1))
        configure_collectives(CollectiveOptions(shared_memory=False))
        chunked = _pass(name, inputs, group)
        configure_collectives(CollectiveOptions())
        assert all(torch.equal(a, b) for a, b in zip(result, chunked, strict=True))
        small = _inputs(name, rank, world)
        with _passes_in_place(2):
            assert torch.equal(_pass(name, small, group)[0], OPERATORS[name][1](*small[:2], group))
    del filler
    assert shared_heap.heap.used == 0


def _exit_before_offer(rank: int, world: int, name: str) -> None:
    """Rank 1 exits before it offers its rows. The other ranks compute their own rows and wait for it."""
    group = _new_group()
    x, w, _ = _inputs(name, rank, world)
    OPERATORS[name][0](x, w, group, TWO_CHUNKS)
    if rank == 1:
        os._exit(3)
    with pytest.raises(PeerDied, match=rf"rank {rank} in {name}.*rank 1(.|\n)*rank 1: dead; its last call was {name}"):
        OPERATORS[name][0](x, w, group, TWO_CHUNKS)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_rank_that_exits_before_it_offers_rows_is_named_on_all(name: str) -> None:
    with RankPool(4) as pool:
        pool.run(_exit_before_offer, name, expect_dead={1})


def _exit_in_gemm(rank: int, world: int, name: str) -> None:
    """Rank 1 offers its rows and exits in its second GEMM. The other ranks wait for its flags."""
    group = dist.group.WORLD
    inputs = _inputs(name, rank, world)

    def exit_in_second(gemm: int) -> None:
        if rank == 1 and gemm == 2:
            os._exit(3)

    x, w, grad = inputs
    operation: Callable[[], object] = partial(matmul_scatter, x, w, group, TWO_CHUNKS)
    if name == "gather_matmul":
        operation = partial(gather_matmul(x.requires_grad_(), w.requires_grad_(), group, TWO_CHUNKS).backward, grad)
    with (
        _call_before_gemm(exit_in_second),
        pytest.raises(PeerDied, match=rf"{name}.*rank 1(.|\n)*rank 1: dead; was in {name}"),
    ):
        operation()


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_exits_while_others_wait_for_its_flag_is_named_on_all(world: int, name: str) -> None:
    with RankPool(world) as pool:
        pool.run(_exit_in_gemm, name, expect_dead={1})


def _hang_in_gemm(rank: int, world: int, arg: tuple[Path, float]) -> None:
    """Rank 1 hangs in its first GEMM until the other ranks have raised."""
    path, timeout_s = arg
    store = dist.FileStore(str(path), world)
    group = _new_group()
    inputs = _inputs("matmul_scatter", rank, world)
    _pass("matmul_scatter", inputs, group)
    configure_collectives(CollectiveOptions(timeout_s=timeout_s if rank != 1 else 60))

    def hang_in_first(gemm: int) -> None:
        if rank == 1 and gemm == 1:
            store.wait([f"rank {other} has raised" for other in range(world) if other != 1])

    try:
        with (
            _call_before_gemm(hang_in_first),
            pytest.raises(PeerTimeout, match=r"rank 1.*did not respond before the deadline(.|\n)*State of each rank"),
        ):
            matmul_scatter(*inputs[:2], group, TWO_CHUNKS)
        store.set(f"rank {rank} has raised", "")
        with pytest.raises(PeerTimeout):
            matmul_scatter(*inputs[:2], group, TWO_CHUNKS)
    finally:
        configure_collectives(CollectiveOptions())


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_hangs_is_named_on_all_at_the_deadline(
    world: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    def check(timeout_s: float) -> None:
        request.getfixturevalue(f"pool{world}").run(_hang_in_gemm, (tmp_path / f"store {timeout_s}", timeout_s))

    with_longer_deadline(check, 2.0, 30.0)


@on_ranks(2, 4)
def test_an_error_in_one_ranks_gemm_ends_the_wait_of_the_others(rank: int, world: int) -> None:
    """Rank 1 raises an exception in its second GEMM."""
    group = _new_group()
    inputs = _inputs("matmul_scatter", rank, world)

    def raise_in_second(gemm: int) -> None:
        if rank == 1 and gemm == 2:
            raise ZeroDivisionError("in a product")

    expected: type[Exception] = ZeroDivisionError if rank == 1 else PeerError
    with (
        _call_before_gemm(raise_in_second),
        pytest.raises(expected, match="in a product" if rank == 1 else "rank 1 aborted the operation"),
    ):
        matmul_scatter(*inputs[:2], group, TWO_CHUNKS)
    with pytest.raises(PeerError):
        matmul_scatter(*inputs[:2], group, TWO_CHUNKS)
