"""matmul_swap and swap_matmul have the bits of serial execution for all chunks and transports."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.comm.channel import Channel, PendingTensor
from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.errors import InputError, PeerDied, RankMismatch
from moe_comm.kernels import row_invariant
from moe_comm.overlap import ulysses
from moe_comm.overlap.options import Overlap
from moe_comm.overlap.ulysses import matmul_swap, matmul_swap_reference, swap_matmul, swap_matmul_reference
from tests.layers.reference import draw
from tests.overlap.common import TRANSPORTS, assert_near, with_every_setting
from tests.pool import RankPool

OPERATORS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "matmul_swap": (matmul_swap, matmul_swap_reference),
    "swap_matmul": (swap_matmul, swap_matmul_reference),
}
SHAPES = [(64, 32, 48), (37, 24, 7), (5, 3, 2), (1, 16, 16), (0, 4, 3)]
"""(rows of a rank, columns that are not sent, sent columns of one rank)"""
Shape = tuple[int, int, int]


def _sizes(name: str, world: int, shape: Shape) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return the shapes of x, the weight and the output on one rank."""
    rows, unsent, sent = shape
    if name == "matmul_swap":
        return (rows, unsent), (world * sent, unsent), (world * rows, sent)
    return (world * rows, sent), (unsent, world * sent), (rows, unsent)


def _inputs(name: str, rank: int, world: int, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, the weight (different on every rank), and the output's gradient."""
    x, weight, y = _sizes(name, world, shape)
    return tuple(draw(*size, seed=seed + rank, dtype=dtype) for size, seed in ((x, 0), (weight, 50), (y, 100)))  # type: ignore[return-value]


def _expected(name: str, world: int, shape: Shape) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return output and both gradients of each rank in float64, computed by one process."""
    xs, weights, grads = zip(*(_inputs(name, r, world, shape, torch.float64) for r in range(world)), strict=True)
    rows, sent = shape[0], shape[2]

    def swapped(parts: list[Tensor]) -> list[Tensor]:
        """Exchange [W * rows, moving] of each rank for [rows, W * moving], or back."""
        if parts[0].shape[1] == sent:
            return [torch.cat([p[r * rows : (r + 1) * rows] for p in parts], 1) for r in range(world)]
        return [torch.cat([p[:, r * sent : (r + 1) * sent] for p in parts]) for r in range(world)]

    if name == "matmul_swap":
        ys = swapped([x @ w.T for x, w in zip(xs, weights, strict=True)])
        swapped_back = swapped(list(grads))
        return [(y, g @ w, g.T @ x) for y, g, w, x in zip(ys, swapped_back, weights, xs, strict=True)]
    full_xs = swapped(list(xs))
    swapped_back = swapped([g @ w for g, w in zip(grads, weights, strict=True)])
    return [(x @ w.T, dx, g.T @ x) for x, w, dx, g in zip(full_xs, weights, swapped_back, grads, strict=True)]


def _run(rank: int, world: int, arg: tuple[str, Shape, torch.dtype]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return output and gradients for every transport, chunks and determinism. Checks equality of bits."""
    name, shape, dtype = arg
    return with_every_setting(*OPERATORS[name], partial(_inputs, name, rank, world, shape, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("world", [2, 4])
def test_output_and_gradients_have_the_bits_of_serial_execution(
    world: int, name: str, shape: Shape, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    expected = _expected(name, world, shape)
    assert_near(pool.run(_run, (name, shape, dtype)), expected, dtype)


@pytest.mark.parametrize("name", OPERATORS)
def test_one_rank_needs_no_group(name: str) -> None:
    operator, reference = OPERATORS[name]
    x, w, grad = _inputs(name, 0, 1, (9, 4, 6), torch.float32)
    y = operator(x.requires_grad_(), w.requires_grad_(), None)
    assert torch.equal(y, reference(x, w, None))
    y.backward(grad)
    (_, grad_x, grad_w) = _expected(name, 1, (9, 4, 6))[0]
    torch.testing.assert_close(x.grad, grad_x.float())
    torch.testing.assert_close(w.grad, grad_w.float())


def _run_with_auto_chunks(rank: int, world: int, name: str) -> None:
    operator, reference = OPERATORS[name]
    configure_collectives(CollectiveOptions(shared_memory=False))
    try:
        x, w, grad = _inputs(name, rank, world, (40, 16, 16), torch.float32)
        y = operator(x.requires_grad_(), w.requires_grad_(), dist.group.WORLD, Overlap("auto"))
        y.backward(grad)
        assert torch.equal(y, reference(x.detach(), w.detach(), dist.group.WORLD))
    finally:
        configure_collectives(CollectiveOptions())


@pytest.mark.parametrize("name", OPERATORS)
def test_chunks_can_be_chosen_from_measurements(name: str, pool2: RankPool) -> None:
    pool2.run(_run_with_auto_chunks, name)


def _run_strided(rank: int, world: int, name: str) -> None:
    operator, _ = OPERATORS[name]
    x, w, grad = _inputs(name, rank, world, (20, 8, 4), torch.float32)
    expected = torch.autograd.grad(operator(x.requires_grad_(), w.requires_grad_(), dist.group.WORLD), (x, w), grad)
    transposed = [t.detach().t().contiguous().t() for t in (x, w, grad)]
    y = operator(transposed[0].requires_grad_(), transposed[1].requires_grad_(), dist.group.WORLD, Overlap(2, 1))
    for actual, contiguous in zip(torch.autograd.grad(y, transposed[:2], transposed[2]), expected, strict=True):
        torch.testing.assert_close(actual, contiguous)


@pytest.mark.parametrize("name", OPERATORS)
def test_strided_tensors_are_supported(name: str, pool2: RankPool) -> None:
    pool2.run(_run_strided, name)


def _run_with_one_gradient(rank: int, world: int, name: str) -> None:
    operator, _ = OPERATORS[name]
    for required in (0, 1):
        x, w, grad = _inputs(name, rank, world, (20, 8, 4), torch.float32)
        x.requires_grad_(required == 0)
        w.requires_grad_(required == 1)
        operator(x, w, dist.group.WORLD, Overlap(2, 1)).backward(grad)
        assert (x.grad is None) == (required == 1)
        assert (w.grad is None) == (required == 0)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_gradient_that_is_not_needed_is_not_computed(name: str, pool2: RankPool) -> None:
    pool2.run(_run_with_one_gradient, name)


def _autocast(rank: int, world: int, name: str) -> None:
    operator, reference = OPERATORS[name]
    x, w, grad = _inputs(name, rank, world, (40, 16, 16), torch.float32)
    x.requires_grad_()
    w.requires_grad_()
    expected = torch.autograd.grad(operator(x, w, dist.group.WORLD, Overlap(2, 1)), (x, w), grad)
    with torch.autocast("cpu", torch.bfloat16):
        y = operator(x, w, dist.group.WORLD, Overlap(2, 1))
        with_autocast = torch.autograd.grad(y, (x, w), grad)
    assert torch.equal(y, reference(x.detach(), w.detach(), dist.group.WORLD))
    assert all(torch.equal(a, b) for a, b in zip(expected, with_autocast, strict=True))


@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_does_not_change_outputs_and_gradients(name: str, pool2: RankPool) -> None:
    pool2.run(_autocast, name)


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

    configure_collectives(CollectiveOptions(shared_memory=False))
    x, w, grad = _inputs(name, rank, world, (48, 16, 16), torch.float32)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Channel, "start_all_to_all", started)
            patch.setattr(ulysses, "row_invariant_mm", computed)
            patch.setattr(ulysses, "exact_mm", weight_gradient_mm)
            patch.setattr(ulysses._WeightGradient, "_add", added)
            y = OPERATORS[name][0](x.requires_grad_(), w.requires_grad_(), dist.group.WORLD, Overlap(3, 1))
            forward = list(events)
            events.clear()
            y.backward(grad)
            return forward, list(events)
    finally:
        configure_collectives(CollectiveOptions())


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


def _call_with_bad_input(rank: int, world: int, arg: Any) -> None:
    x, w, group = torch.ones(4, 3), torch.ones(6, 3), dist.group.WORLD
    with pytest.raises(InputError, match=r"takes x \[rows, D\] and weight \[N, D\]; got \(4, 3\) and \(6, 2\)"):
        matmul_swap(x, w[:, :2], group)
    with pytest.raises(InputError, match=r"takes x \[rows, K / 2\] and weight \[N, K\]; got \(4, 3\) and \(6, 3\)"):
        swap_matmul(x, w, group)
    with pytest.raises(InputError, match="of one dtype on one device"):
        matmul_swap(x, w.double(), group)
    with pytest.raises(InputError, match="of one dtype on one device"):
        swap_matmul(x, torch.ones(5, 6).double(), group)
    with pytest.raises(InputError, match="the weight's 5 outputs do not divide evenly over 2 ranks"):
        matmul_swap(x, w[:5], group)
    with pytest.raises(InputError, match="3 rows do not divide evenly over 2 ranks"):
        swap_matmul(x[:3], torch.ones(5, 6), group)
    many = torch.ones(64, 3)
    try:
        for options in TRANSPORTS:
            configure_collectives(options)
            with pytest.raises(RankMismatch):
                matmul_swap(torch.ones(4 + rank, 3), w, group)
            with pytest.raises(RankMismatch):
                swap_matmul(torch.ones(4 + 2 * rank, 3), torch.ones(5, 6), group)
            with pytest.raises(RankMismatch):
                matmul_swap(many, w, group, Overlap(2 + rank, 1))
            matmul_swap(x, w, group)
    finally:
        configure_collectives(CollectiveOptions())


def test_bad_input_is_a_typed_error_on_every_rank_and_the_next_call_works(pool2: RankPool) -> None:
    pool2.run(_call_with_bad_input)


def _exit_on_rank_1(rank: int, world: int, options: CollectiveOptions) -> None:
    configure_collectives(options)
    x, w = torch.ones(64, 16), torch.ones(32, 16)
    matmul_swap(x, w, dist.group.WORLD)
    if rank == 1:
        os._exit(3)
    with pytest.raises(PeerDied, match=r"matmul_swap.*rank 1"):
        matmul_swap(x, w, dist.group.WORLD)


@pytest.mark.parametrize("options", TRANSPORTS, ids=["memory", "backend"])
def test_an_exited_rank_is_named_in_the_error(options: CollectiveOptions) -> None:
    with RankPool(2) as pool:
        pool.run(_exit_on_rank_1, options, expect_dead={1})
