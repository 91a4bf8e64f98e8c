"""gather_matmul and matmul_scatter have the bits of serial execution for all chunks and transports."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.errors import ConfigError, InputError, PeerDied, RankMismatch
from moe_comm.kernels.row_invariant import TILE
from moe_comm.overlap.chunked import PER_RANK_ROWS, chunk_bounds
from moe_comm.overlap.gather_matmul import gather_matmul, reference as gather_reference
from moe_comm.overlap.matmul_scatter import matmul_scatter, reference as scatter_reference
from moe_comm.overlap.options import Overlap
from tests.layers.reference import draw
from tests.overlap.common import TRANSPORTS, OutputAndGrads, assert_near, with_every_setting
from tests.pool import RankPool

OPERATORS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "gather_matmul": (gather_matmul, gather_reference),
    "matmul_scatter": (matmul_scatter, scatter_reference),
}
SHAPES = [(64, 32, 48), (37, 24, 7), (5, 3, 2), (1, 16, 16), (0, 4, 3), (PER_RANK_ROWS, 8, 4)]
"""(rows of a rank, inner width, outputs)"""


def _inputs(name: str, rank: int, world: int, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, inner, outputs = shape
    x = draw(rows * (world if name == "matmul_scatter" else 1), inner, seed=rank, dtype=dtype)
    return x, draw(outputs, inner, seed=50 + rank, dtype=dtype)


def _grad(name: str, rank: int, world: int, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    rows, _, outputs = shape
    return draw(rows * (world if name == "gather_matmul" else 1), outputs, seed=100 + rank, dtype=dtype)


def _expected(name: str, world: int, shape: tuple[int, int, int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return output and both gradients of each rank in float64, computed by one process."""
    inputs = [_inputs(name, r, world, shape, torch.float64) for r in range(world)]
    grads = [_grad(name, r, world, shape, torch.float64) for r in range(world)]
    rows = shape[0]
    if name == "gather_matmul":
        x = torch.cat([x for x, _ in inputs])
        grad_x = torch.stack([g @ w for g, (_, w) in zip(grads, inputs, strict=True)]).sum(0)
        own = [slice(r * rows, (r + 1) * rows) for r in range(world)]
        return [(x @ w.T, grad_x[own[r]], grads[r].T @ x) for r, (_, w) in enumerate(inputs)]
    y = torch.stack([x @ w.T for x, w in inputs]).sum(0)
    grad = torch.cat(grads)
    return [(y[r * rows : (r + 1) * rows], grad @ w, grad.T @ x) for r, (x, w) in enumerate(inputs)]


def _run(
    rank: int, world: int, arg: tuple[str, tuple[int, int, int], torch.dtype]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return output and gradients for every transport, chunks and determinism. Checks equality of bits."""
    name, shape, dtype = arg

    def inputs() -> OutputAndGrads:
        return *_inputs(name, rank, world, shape, dtype), _grad(name, rank, world, shape, dtype)

    return with_every_setting(*OPERATORS[name], inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("world", [2, 4])
def test_output_and_gradients_have_the_bits_of_serial_execution(
    world: int, name: str, shape: tuple[int, int, int], dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    expected = _expected(name, world, shape)
    assert_near(pool.run(_run, (name, shape, dtype)), expected, dtype)


@pytest.mark.parametrize("name", OPERATORS)
def test_one_rank_needs_no_group(name: str) -> None:
    operator, reference = OPERATORS[name]
    x, w = (t.requires_grad_() for t in _inputs(name, 0, 1, (9, 4, 6), torch.float32))
    y = operator(x, w, None)
    assert torch.equal(y, reference(x, w, None))
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.ones(9, 6) @ w.detach())


def _run_with_one_gradient(rank: int, world: int, name: str) -> None:
    operator, _ = OPERATORS[name]
    shape = (20, 8, 4)
    inputs = _inputs(name, rank, world, shape, torch.float32)
    for required in (0, 1):
        x, w = (t.clone().requires_grad_(i == required) for i, t in enumerate(inputs))
        operator(x, w, dist.group.WORLD).backward(_grad(name, rank, world, shape, torch.float32))
        assert (x.grad is None) == (required == 1)
        assert (w.grad is None) == (required == 0)


def _autocast(rank: int, world: int, name: str) -> None:
    operator, reference = OPERATORS[name]
    x, w = (t.requires_grad_() for t in _inputs(name, rank, world, (40, 16, 16), torch.float32))
    grad = _grad(name, rank, world, (40, 16, 16), torch.float32)
    expected = torch.autograd.grad(operator(x, w, dist.group.WORLD, Overlap(2, 1)), (x, w), grad)
    with torch.autocast("cpu", torch.bfloat16):
        y = operator(x, w, dist.group.WORLD, Overlap(2, 1))
        with_autocast = torch.autograd.grad(y, (x, w), grad)
    assert torch.equal(y, reference(x.detach(), w.detach(), dist.group.WORLD))
    assert all(torch.equal(a, b) for a, b in zip(expected, with_autocast, strict=True))


@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_does_not_change_outputs_and_gradients(name: str, pool2: RankPool) -> None:
    pool2.run(_autocast, name)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_gradient_that_is_not_needed_is_not_computed(name: str, pool2: RankPool) -> None:
    pool2.run(_run_with_one_gradient, name)


def _call_with_bad_input(rank: int, world: int, arg: Any) -> None:
    x, w = torch.ones(4, 3), torch.ones(5, 3)
    for operator, _ in OPERATORS.values():
        with pytest.raises(InputError, match=r"takes x \[rows, D\] and weight \[N, D\]; got \(4, 3\) and \(5, 2\)"):
            operator(x, w[:, :2], dist.group.WORLD)
        with pytest.raises(InputError, match="of one dtype on one device"):
            operator(x, w.double(), dist.group.WORLD)
    with pytest.raises(InputError, match="3 rows do not divide evenly over 2 ranks"):
        matmul_scatter(x[:3], w, dist.group.WORLD)
    with pytest.raises(RankMismatch):
        gather_matmul(torch.ones(4 + rank, 3), w, dist.group.WORLD)
    many = torch.ones(64, 3)
    with pytest.raises(RankMismatch):
        gather_matmul(many, w, dist.group.WORLD, Overlap(2 + rank, 1))
    gather_matmul(x, w, dist.group.WORLD)


def test_bad_input_is_a_typed_error_on_every_rank_and_the_next_call_works(pool2: RankPool) -> None:
    pool2.run(_call_with_bad_input)


def test_small_rows_are_sent_in_fewer_chunks() -> None:
    overlap = Overlap(chunks=8, chunk_bytes=1000)
    assert [overlap.chunks_of(n) for n in (0, 999, 1999, 2000, 7999, 8000, 10**9)] == [1, 1, 1, 2, 7, 8, 8]


@pytest.mark.parametrize("rows", [0, 1, TILE, 5 * TILE - 1, 99, 1000])
@pytest.mark.parametrize("chunks", [1, 2, 5, 9])
def test_chunks_differ_by_at_most_one_tile_and_cover_all_rows(rows: int, chunks: int) -> None:
    bounds = chunk_bounds(rows, chunks)
    tiles = [-(-(end - first) // TILE) for first, end in bounds]
    assert [row for bound in bounds for row in range(*bound)] == list(range(rows))
    assert all(first % TILE == 0 for first, _ in bounds)
    assert len(tiles) == min(chunks, sum(tiles)) and max(tiles, default=0) - min(tiles, default=0) <= 1


@pytest.mark.parametrize("chunks", [0, -1, 1.5, True])
def test_chunks_are_a_whole_number_of_at_least_one(chunks: Any) -> None:
    with pytest.raises(ConfigError, match="chunks must be a whole number of at least 1"):
        Overlap(chunks)


def _exit_on_rank_1(rank: int, world: int, options: CollectiveOptions) -> None:
    configure_collectives(options)
    x, w = torch.ones(64, 16), torch.ones(16, 16)
    gather_matmul(x, w, dist.group.WORLD)
    if rank == 1:
        os._exit(3)
    with pytest.raises(PeerDied, match=r"gather_matmul.*rank 1"):
        gather_matmul(x, w, dist.group.WORLD)


@pytest.mark.parametrize("options", TRANSPORTS, ids=["memory", "backend"])
def test_an_exited_rank_is_named_in_the_error(options: CollectiveOptions) -> None:
    with RankPool(2) as pool:
        pool.run(_exit_on_rank_1, options, expect_dead={1})
