"""Differentiable collectives compared with the same computation on full tensors in one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.checkpoint import checkpoint

from moe_comm.errors import InputError, PeerDied, PeerTimeout, RankMismatch
from moe_comm.layers.parallel.collectives import (
    CollectiveOptions,
    configure_collectives,
    copy_to,
    gather_dim,
    gather_dim_replicated,
    gather_values,
    scatter_sum,
    sum_over,
    sum_values,
    swap_dims,
)
from tests.layers.reference import draw
from tests.pool import RankPool, on_ranks

RANKS = pytest.mark.parametrize(
    ("world", "dtype"), [(2, torch.float64), (2, torch.bfloat16), (4, torch.float32)], ids=str
)


def rounded_sum(parts: list[Tensor]) -> Tensor:
    """Sum in order of rank, in fp32 or wider, and round once."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def run(rank: int, world: int, arg: tuple[str, tuple[int, ...], torch.dtype, tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Return output and gradient, after checking equal bits through shared memory and the backend."""
    results = []
    try:
        for shared_memory in (True, False):
            configure_collectives(CollectiveOptions(shared_memory=shared_memory))
            results.append(forward_and_backward(rank, *arg))
    finally:
        configure_collectives(CollectiveOptions())
    for through_memory, over_backend in zip(*results, strict=True):
        assert torch.equal(through_memory, over_backend)
    return results[0]


def forward_and_backward(
    rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, dims: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    x = draw(*shape, seed=rank, dtype=dtype).requires_grad_()
    group = dist.group.WORLD
    y = {
        "gather": lambda: gather_dim(x, group, *dims),
        "gather_replicated": lambda: gather_dim_replicated(x, group, *dims),
        "scatter_sum": lambda: scatter_sum(x, group, *dims),
        "copy_to": lambda: copy_to(x, group),
        "sum_over": lambda: sum_over(x, group),
        "swap": lambda: swap_dims(x, group, *dims),
    }[name]()
    y.backward(draw(*y.shape, seed=100 + rank, dtype=dtype))
    assert x.grad is not None
    return y.detach(), x.grad


@RANKS
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_concatenates_and_its_gradient_is_the_sum_of_the_slices(
    dim: int, dtype: torch.dtype, world: int, pools: dict[int, RankPool]
) -> None:
    shape = (2, 3, 5)
    results = pools[world].run(run, ("gather", shape, dtype, (dim,)))
    whole = torch.cat([draw(*shape, seed=r, dtype=dtype) for r in range(world)], dim)
    grads = [draw(*whole.shape, seed=100 + r, dtype=dtype).chunk(world, dim) for r in range(world)]
    for rank, (y, grad) in enumerate(results):
        assert torch.equal(y, whole)
        assert torch.equal(grad, rounded_sum([grads[r][rank] for r in range(world)]))


def test_the_gradient_of_a_replicated_gather_is_the_local_slice(pool4: RankPool) -> None:
    shape = (2, 3, 5)
    results = pool4.run(run, ("gather_replicated", shape, torch.float32, (1,)))
    for rank, (y, grad) in enumerate(results):
        assert torch.equal(y, torch.cat([draw(*shape, seed=r) for r in range(4)], 1))
        assert torch.equal(grad, draw(*y.shape, seed=100 + rank).chunk(4, 1)[rank])


@RANKS
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_sum_returns_the_local_part_and_gathers_the_gradient(
    dim: int, dtype: torch.dtype, world: int, pools: dict[int, RankPool]
) -> None:
    shape = (4, 8, 4)
    results = pools[world].run(run, ("scatter_sum", shape, dtype, (dim,)))
    total = rounded_sum([draw(*shape, seed=r, dtype=dtype) for r in range(world)]).chunk(world, dim)
    part = tuple(results[0][0].shape)
    whole = torch.cat([draw(*part, seed=100 + r, dtype=dtype) for r in range(world)], dim)
    for rank, (y, grad) in enumerate(results):
        assert torch.equal(y, total[rank])
        assert torch.equal(grad, whole)


@RANKS
@pytest.mark.parametrize("size", [7, 20_001])  # one message; two messages with a length that the ranks do not divide
def test_copy_to_and_sum_over_are_transposes_with_the_same_bits_on_all_ranks(
    size: int, dtype: torch.dtype, world: int, pools: dict[int, RankPool]
) -> None:
    inputs = [draw(size, seed=r, dtype=dtype) for r in range(world)]
    grads = [draw(size, seed=100 + r, dtype=dtype) for r in range(world)]
    for rank, (y, grad) in enumerate(pools[world].run(run, ("copy_to", (size,), dtype, ()))):
        assert torch.equal(y, inputs[rank])
        assert torch.equal(grad, rounded_sum(grads))
    for rank, (y, grad) in enumerate(pools[world].run(run, ("sum_over", (size,), dtype, ()))):
        assert torch.equal(y, rounded_sum(inputs))
        assert torch.equal(grad, grads[rank])


@pytest.mark.parametrize("dims", [(2, 1), (1, 2), (0, -1)])
def test_swap_dims_splits_one_dimension_and_joins_another_and_its_gradient_is_the_inverse(
    dims: tuple[int, int], pool4: RankPool
) -> None:
    split, join = dims
    shape = (4, 8, 12)
    results = pool4.run(run, ("swap", shape, torch.float32, dims))
    chunks = [draw(*shape, seed=r).chunk(4, split) for r in range(4)]
    for rank, (y, _) in enumerate(results):
        assert torch.equal(y, torch.cat([chunks[r][rank] for r in range(4)], join))
    grads = [draw(*results[0][0].shape, seed=100 + r).chunk(4, join) for r in range(4)]
    for rank, (_, grad) in enumerate(results):
        assert torch.equal(grad, torch.cat([grads[r][rank] for r in range(4)], split))


@on_ranks(2)
def test_strided_empty_and_integer_tensors_are_supported(rank: int, world: int) -> None:
    group = dist.group.WORLD
    x = draw(4, 6, seed=rank)
    assert torch.equal(gather_dim(x.t(), group, 0), gather_dim(x.t().contiguous(), group, 0))
    assert torch.equal(scatter_sum(x.t(), group, 1), scatter_sum(x.t().contiguous(), group, 1))
    leaf = draw(4, 6, seed=rank).requires_grad_()
    gather_dim(leaf, group, 1).sum().backward()  # the gradient of a sum has strides of zero
    assert torch.equal(leaf.grad, torch.full((4, 6), float(world)))
    for y, shape in (
        (gather_dim(x[:0], group, 1), (0, 6 * world)),
        (scatter_sum(x[:0], group, 1), (0, 6 // world)),
        (sum_over(x[:0], group), (0, 6)),
        (swap_dims(x[:0], group, 1, 0), (0, 6 // world)),
    ):
        assert tuple(y.shape) == shape
    ids = torch.arange(3) + rank
    assert gather_values(ids, group).tolist() == [[r, r + 1, r + 2] for r in range(world)]
    assert sum_values(torch.ones(2), group).tolist() == [world, world]
    # fp32 cannot represent the next sum.
    assert sum_values(torch.full((2,), 2**40 + 1), group).tolist() == [world * (2**40 + 1)] * 2


def recomputed(rank: int, world: int, arg: Any) -> list[Tensor]:
    group = dist.group.WORLD
    weight = draw(6, 6, seed=9).requires_grad_()
    x = draw(2, 4, 6, seed=rank).requires_grad_()

    def block(x: Tensor) -> Tensor:
        return scatter_sum(torch.tanh(gather_dim(x, group, 1) @ weight) @ weight, group, 1)

    y = checkpoint(block, x, use_reentrant=arg, preserve_rng_state=False) if arg is not None else block(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(reentrant: bool, pool2: RankPool) -> None:
    for plain, checkpointed in zip(pool2.run(recomputed), pool2.run(recomputed, reentrant), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))


@on_ranks(2)
def test_gradients_of_inputs_and_weights_can_be_computed_separately(rank: int) -> None:
    """Compute gradients of the inputs first and of the weights later, as zero-bubble schedules do."""
    group = dist.group.WORLD
    weight = draw(6, 6, seed=9).requires_grad_()
    x = draw(2, 4, 6, seed=rank).requires_grad_()
    loss = scatter_sum(gather_dim(x, group, 1) @ weight, group, 1).square().sum()
    (for_x,) = torch.autograd.grad(loss, x, retain_graph=True)
    (for_weight,) = torch.autograd.grad(loss, weight)
    again = scatter_sum(gather_dim(x, group, 1) @ weight, group, 1).square().sum()
    again.backward()
    assert torch.equal(for_x, x.grad)
    assert torch.equal(for_weight, weight.grad)


def test_without_a_group_collectives_return_their_argument() -> None:
    x = torch.ones(3, 3)
    for y in (
        gather_dim(x, None, 0),
        gather_dim_replicated(x, None, 0),
        scatter_sum(x, None, 0),
        copy_to(x, None),
        sum_over(x, None),
        swap_dims(x, None, 0, 1),
    ):
        assert y is x


@on_ranks(2)
def test_a_dimension_that_cannot_be_split_raises_before_the_collective() -> None:
    with pytest.raises(InputError, match="multiple of 2"):
        scatter_sum(torch.ones(2, 3), dist.group.WORLD, 1)
    with pytest.raises(InputError, match="dimension 2"):
        gather_dim(torch.ones(2, 3), dist.group.WORLD, 2)


@on_ranks(2)
@pytest.mark.parametrize(
    "options", [CollectiveOptions(), CollectiveOptions(checked=True, shared_memory=False)], ids=["memory", "backend"]
)
def test_checked_collectives_report_the_difference_on_all_ranks_and_continue(
    rank: int, options: CollectiveOptions
) -> None:
    configure_collectives(options)
    try:
        gather_dim(torch.ones(2, 3), dist.group.WORLD, 0)
        own = rf"rank {rank} is in call \d+, all-gather of \(2, {3 + rank}\) float32 along 0"
        with pytest.raises(RankMismatch, match=rf"{own}, but rank.*{1 - rank}"):
            gather_dim(torch.ones(2, 3 + rank), dist.group.WORLD, 0)
        assert gather_dim(torch.ones(2, 3), dist.group.WORLD, 0).shape == (4, 3)
    finally:
        configure_collectives(CollectiveOptions())


def exit_one_rank(rank: int, world: int, arg: Any) -> None:
    sum_over(torch.ones(3), dist.group.WORLD)
    if rank == 1:
        os._exit(3)
    with pytest.raises(PeerDied, match="rank 1"):
        sum_over(torch.ones(3), dist.group.WORLD)


def delay_one_rank(rank: int, world: int, arg: Any) -> None:
    sum_over(torch.ones(3), dist.group.WORLD)
    configure_collectives(CollectiveOptions(timeout_s=0.5))  # set after the start, which may be slow on a busy machine
    if rank == 0:
        with pytest.raises(PeerTimeout, match=r"all-reduce of \(3,\) float32.*rank 1"):
            sum_over(torch.ones(3), dist.group.WORLD)
        with pytest.raises(PeerTimeout):
            sum_over(torch.ones(3), dist.group.WORLD)
        _get_default_store().set("done", "")
    else:
        _get_default_store().wait(["done"])


def test_a_dead_or_late_peer_raises_an_error_that_names_the_rank() -> None:
    with RankPool(2) as pool:
        pool.run(exit_one_rank, expect_dead={1})
        pool.run(delay_one_rank)
