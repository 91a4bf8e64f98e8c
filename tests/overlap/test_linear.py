"""gather_matmul, matmul_scatter, matmul_swap and swap_matmul have the bits of serial execution for all chunks and
transports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel, PendingTensor
from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.errors import ConfigError, InputError, PeerDied, RankMismatch
from moe_comm.kernels import row_invariant
from moe_comm.overlap import ulysses
from moe_comm.overlap.chunked import PER_RANK_ROWS, Ring, chunk_bounds
from moe_comm.overlap.linear import gather_matmul, matmul_scatter
from moe_comm.overlap.options import TILE, Overlap
from moe_comm.overlap.ulysses import matmul_swap, swap_matmul
from tests.layers.reference import draw
from tests.overlap.common import (
    OVERLAPS,
    TRANSPORTS,
    gather_reference,
    matmul_swap_reference,
    scatter_reference,
    swap_matmul_reference,
)
from tests.pool import RankPool, on_ranks

OPERATORS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "gather_matmul": (gather_matmul, gather_reference),
    "matmul_scatter": (matmul_scatter, scatter_reference),
    "matmul_swap": (matmul_swap, matmul_swap_reference),
    "swap_matmul": (swap_matmul, swap_matmul_reference),
}
Shape = tuple[int, int, int]
"""(rows of a rank, columns that are not sent, sent columns of one rank), for the first two operators inner and outputs
"""
SHAPES: list[Shape] = [(64, 32, 48), (37, 24, 7), (5, 3, 2), (1, 16, 16), (0, 4, 3), (PER_RANK_ROWS, 8, 4)]
F32, BF16 = torch.float32, torch.bfloat16
Results = tuple[Tensor, Tensor, Tensor]
"""Output, gradient of x, gradient of the weight."""


def inputs_of(name: str, rank: int, world: int, shape: Shape, dtype: torch.dtype = F32) -> list[Tensor]:
    """Return x, the weight (different on every rank), and the output's gradient. The first two require gradients."""
    rows, a, b = shape
    x, weight, y = {
        "gather_matmul": ((rows, a), (b, a), (world * rows, b)),
        "matmul_scatter": ((world * rows, a), (b, a), (rows, b)),
        "matmul_swap": ((rows, a), (world * b, a), (world * rows, b)),
        "swap_matmul": ((world * rows, b), (a, world * b), (rows, a)),
    }[name]
    sizes = ((x, 0), (weight, 50), (y, 100))
    return [draw(*size, seed=seed + rank, dtype=dtype).requires_grad_(seed < 100) for size, seed in sizes]


def expected_of(name: str, world: int, shape: Shape) -> list[Results]:
    """Return output and both gradients of each rank in float64, computed by one process."""
    by_rank = [[t.detach() for t in inputs_of(name, r, world, shape, torch.float64)] for r in range(world)]
    xs, ws, grads = (list(tensors) for tensors in zip(*by_rank, strict=True))

    def summed(parts: list[Tensor]) -> list[Tensor]:
        return list(torch.stack(parts).sum(0).unflatten(0, (world, shape[0])))

    def swapped(parts: list[Tensor]) -> list[Tensor]:
        """Exchange [W * rows, sent] of each rank for [rows, W * sent], or back."""
        if parts[0].shape[1] == shape[2]:
            blocks = [part.unflatten(0, (world, shape[0])) for part in parts]
            return [torch.cat([block[r] for block in blocks], 1) for r in range(world)]
        return [torch.cat([part.unflatten(1, (world, shape[2]))[:, r] for part in parts]) for r in range(world)]

    def products(lefts: list[Tensor], rights: list[Tensor]) -> list[Tensor]:
        return [left @ right for left, right in zip(lefts, rights, strict=True)]

    transposed = [w.T for w in ws]
    if name == "gather_matmul":
        xs = [torch.cat(xs)] * world
        ys, grad_xs = products(xs, transposed), summed(products(grads, ws))
    elif name == "matmul_scatter":
        ys, grads = summed(products(xs, transposed)), [torch.cat(grads)] * world
        grad_xs = products(grads, ws)
    elif name == "matmul_swap":
        ys, grads = swapped(products(xs, transposed)), swapped(grads)
        grad_xs = products(grads, ws)
    else:
        xs = swapped(xs)
        ys, grad_xs = products(xs, transposed), swapped(products(grads, ws))
    return list(zip(ys, grad_xs, products([g.T for g in grads], xs), strict=True))


@contextmanager
def over(options: CollectiveOptions) -> Iterator[None]:
    configure_collectives(options)
    try:
        yield
    finally:
        configure_collectives(CollectiveOptions())


def compute(name: str, inputs: list[Tensor], group: ProcessGroup | None, overlap: Overlap | None = None) -> Results:
    x, w, grad = inputs
    y = OPERATORS[name][0](x, w, group, overlap)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), grad)
    return y.detach(), grad_x, grad_w


@on_ranks(2, 4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_have_the_bits_of_serial_execution(
    rank: int, world: int, group: ProcessGroup, shape: Shape
) -> None:
    """The values are those of one process in float64. World sizes and shapes alternate between the dtypes."""
    dtype = (F32, BF16)[(SHAPES.index(shape) + world // 2) % 2]
    tolerance = {F32: 1e-5, BF16: 5e-2}[dtype]
    for name, (_, reference) in OPERATORS.items():
        results: list[Results] = []
        for options in TRANSPORTS:
            with over(options):
                for overlap in OVERLAPS:
                    inputs = inputs_of(name, rank, world, shape, dtype)
                    results.append(compute(name, inputs, group, overlap))
                    y, grad_x, grad_w = results[-1]
                    where = name, options, overlap
                    assert torch.equal(y, reference(*(t.detach() for t in inputs[:2]), group)), where
                    assert torch.equal(grad_x, results[0][1]), where
                    assert torch.equal(grad_w, results[0][2]) or not overlap.deterministic, where
        exact = expected_of(name, world, shape)[rank]
        for result in (results[0], results[-1]):
            for actual, value in zip(result, exact, strict=True):
                scale = float(value.abs().max()) if value.numel() else 0.0
                torch.testing.assert_close(actual.double(), value, rtol=0, atol=tolerance * max(scale, 1.0))


@pytest.mark.parametrize("name", OPERATORS)
def test_one_rank_needs_no_group(name: str) -> None:
    inputs = inputs_of(name, 0, 1, (9, 4, 6))
    results = compute(name, inputs, None)
    assert torch.equal(results[0], OPERATORS[name][1](inputs[0].detach(), inputs[1].detach(), None))
    for actual, value in zip(results, expected_of(name, 1, (9, 4, 6))[0], strict=True):
        torch.testing.assert_close(actual, value.float())


@on_ranks(2)
@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_strides_and_unneeded_gradients_change_no_result(
    rank: int, world: int, group: ProcessGroup, name: str
) -> None:
    operator, reference = OPERATORS[name]
    x, w, grad = inputs_of(name, rank, world, (40, 16, 16))
    expected = compute(name, [x, w, grad], group, Overlap(2, 1))
    assert torch.equal(expected[0], reference(x.detach(), w.detach(), group))
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, compute(name, [x, w, grad], group, Overlap(2, 1)), expected))
    strided = [t.detach().t().contiguous().t().requires_grad_() for t in (x, w, grad)]
    torch.testing.assert_close(compute(name, strided, group, Overlap(2, 1)), expected)
    for required in (0, 1):
        leaves = [t.detach().requires_grad_(i == required) for i, t in enumerate((x, w))]
        operator(*leaves, group, Overlap(2, 1)).backward(grad)
        assert torch.equal(leaves[required].grad, expected[1 + required])  # type: ignore[arg-type]
        assert leaves[1 - required].grad is None
    with over(CollectiveOptions(shared_memory=False)):
        y = compute(name, [x, w, grad], group, Overlap("auto"))[0]
        assert torch.equal(y, reference(x.detach(), w.detach(), group))


@on_ranks(2)
def test_bad_input_is_a_typed_error_on_every_rank_and_the_next_call_works(rank: int, group: ProcessGroup) -> None:
    x, w, wide = torch.ones(4, 3), torch.ones(6, 3), torch.ones(5, 6)
    for operator, weight, fault in (
        (gather_matmul, w[:, :2], "weight"),
        (gather_matmul, w.double(), "dtype"),
        (matmul_scatter, w.double(), "dtype"),
        (matmul_swap, w[:, :2], "weight"),
        (swap_matmul, w, "weight"),
        (matmul_swap, w.double(), "dtype"),
        (swap_matmul, wide.double(), "dtype"),
        (matmul_swap, w[:5], "5 outputs"),
    ):
        with pytest.raises(InputError, match=fault):
            operator(x, weight, group)
    for operator, weight in ((matmul_scatter, w), (swap_matmul, wide)):
        with pytest.raises(InputError, match="3 rows"):
            operator(x[:3], weight, group)
    for options in TRANSPORTS:
        with over(options):
            for operator, rows, weight in (
                (gather_matmul, 4 + rank, w),
                (matmul_swap, 4 + rank, w),
                (swap_matmul, 4 + 2 * rank, wide),
            ):
                with pytest.raises(RankMismatch):
                    operator(torch.ones(rows, 3), weight, group)
            for operator in (gather_matmul, matmul_swap):
                with pytest.raises(RankMismatch):
                    operator(torch.ones(64, 3), w, group, Overlap(2 + rank, 1))
                operator(x, w, group)


def _exit_on_rank_1(rank: int, world: int, options: CollectiveOptions) -> None:
    configure_collectives(options)
    x, w = torch.ones(64, 16), torch.ones(32, 16)
    for operator in (gather_matmul, matmul_swap):
        operator(x, w, dist.group.WORLD)
    if rank == 1:
        os._exit(3)
    with pytest.raises(PeerDied, match=r"matmul_swap.*rank 1"):
        matmul_swap(x, w, dist.group.WORLD)
    with pytest.raises(PeerDied, match="rank 1"):
        gather_matmul(x, w, dist.group.WORLD)


@pytest.mark.parametrize("options", TRANSPORTS, ids=["memory", "backend"])
def test_an_exited_rank_is_named_in_the_error(options: CollectiveOptions) -> None:
    with RankPool(2) as pool:
        pool.run(_exit_on_rank_1, options, expect_dead={1})


def _record_order(rank: int, world: int, name: str) -> tuple[list[str], list[str]]:
    """Return the order of starts, completions and GEMMs, forward and backward, with 3 chunks."""
    events: list[str] = []
    start_all_to_all, product = Channel.start_all_to_all, row_invariant.row_invariant_mm

    def started(channel: Any, rows: Tensor, *args: Any) -> PendingTensor:
        number = sum(event.startswith("send") for event in events)
        events.append(f"send {number}")
        pending = start_all_to_all(channel, rows, *args)

        def record_arrival(tensor: Tensor) -> Tensor:
            events.append(f"take {number}")
            return tensor

        return pending.then(record_arrival)

    def computed(*args: Any, **kwargs: Any) -> Tensor:
        events.append("product")
        return product(*args, **kwargs)

    def weight_gradient_mm(a: Tensor, b: Tensor) -> Tensor:
        events.append("weights")
        return a @ b

    add = ulysses._WeightGradient._add

    def added(self: Any, *args: Any) -> None:
        events.append("weights")
        add(self, *args)

    x, w, grad = inputs_of(name, rank, world, (48, 16, 16))
    with over(CollectiveOptions(shared_memory=False)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "start_all_to_all", started)
        patch.setattr(ulysses, "row_invariant_mm", computed)
        patch.setattr(ulysses, "exact_mm", weight_gradient_mm)
        patch.setattr(ulysses._WeightGradient, "_add", added)
        y = OPERATORS[name][0](x, w, dist.group.WORLD, Overlap(3, 1))
        forward = list(events)
        events.clear()
        y.backward(grad)
        return forward, list(events)


def test_transfers_start_before_the_gemms_that_hide_them(pool2: RankPool) -> None:
    columns = ["product", "send 0", "product", "send 1", "product", "send 2", "product"]
    rows = ["take 0", "product", "take 1", "product", "take 2", "product"]
    sends, takes = ["send 0", "send 1", "send 2"], ["take 0", "take 1", "take 2"]
    for forward, backward in pool2.run(_record_order, "matmul_swap"):
        assert forward == [*columns, *takes]
        assert backward == [*sends, "weights", *rows, "weights", "weights"]
    for forward, backward in pool2.run(_record_order, "swap_matmul"):
        assert forward == [*sends, *rows]
        assert backward == [*columns, "weights", *takes]


# --- chunks ---


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_at_every_step_the_peers_of_all_ranks_are_a_permutation(world: int) -> None:
    rings = [Ring(rank, world) for rank in range(world)]
    for orders in ([ring.arrivals for ring in rings], [ring.scatters for ring in rings]):
        for peers in (*orders, *zip(*orders, strict=True)):
            assert sorted(peers) == list(range(world))
    assert all(ring.arrivals[0] == ring.scatters[-1] == ring.rank for ring in rings), "own rows first, own results last"


def test_small_rows_are_sent_in_fewer_chunks() -> None:
    overlap = Overlap(chunks=8, chunk_bytes=1000)
    assert [overlap.chunks_of(n) for n in (0, 999, 1999, 2000, 7999, 8000, 10**9)] == [1, 1, 1, 2, 7, 8, 8]
    assert [Overlap(8).chunks_of(rows * 512 * 4) for rows in (64, 2048)] == [1, 8]


@pytest.mark.parametrize("rows", [0, 1, TILE, 5 * TILE - 1, 99, 1000])
def test_chunks_differ_by_at_most_one_tile_and_cover_all_rows(rows: int) -> None:
    for chunks in (1, 2, 5, 9):
        bounds = chunk_bounds(rows, chunks)
        tiles = [-(-(end - first) // TILE) for first, end in bounds]
        assert [row for bound in bounds for row in range(*bound)] == list(range(rows))
        assert all(first % TILE == 0 for first, _ in bounds)
        assert len(tiles) == min(chunks, sum(tiles)) and max(tiles, default=0) - min(tiles, default=0) <= 1


@pytest.mark.parametrize("chunks", [0, -1, 1.5, True, "automatic", None])
def test_chunks_are_a_whole_number_of_at_least_one_or_auto(chunks: Any) -> None:
    assert Overlap("auto").chunks == "auto"
    with pytest.raises(ConfigError, match="chunks"):
        Overlap(chunks)
