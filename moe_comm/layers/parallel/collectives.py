"""Differentiable collectives over one process group, for tensor, sequence and context parallelism.

    call                     forward                           backward
    gather_dim               all-gather along dim              reduce-scatter (sum) along dim
    gather_dim_replicated    all-gather along dim              local slice: all ranks do the same work afterwards
    scatter_sum              reduce-scatter (sum) along dim    all-gather along dim
    copy_to                  identity                          all-reduce (sum)
    sum_over                 all-reduce (sum)                  identity: all ranks do the same work afterwards
    swap_dims                all-to-all                        inverse all-to-all

All calls are linear, so nothing is saved for backward, and activation checkpointing and split backward passes can
repeat them. Without a group, or with one rank, each returns ``x`` itself.

All ranks of the group make the same calls in the same order with the same shape and dtype. A failed or missing rank
raises ``PeerDied`` or ``PeerTimeout``, and the group is unusable afterwards. With ``CollectiveOptions.checked`` the
calls are compared first.

Sums: on the CPU, and for 16-bit floats on all devices, ranks exchange the addends. Each rank adds its part in order of
rank, in fp32 (float64 for float64), and rounds once. So the bits do not depend on a backend's algorithm, and a bf16 sum
sends bf16. NCCL sums fp32 and float64. CPU ranks of one host exchange through shared memory (``comm.shared_channel``),
others over the group's backend, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import abort_on_error, channel_of, configure_collectives, group_rank, group_size
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.errors import InputError
from moe_comm.kernels.autograd import sum_in_rank_order
from moe_comm.runtime.memory import readable

__all__ = [
    "CollectiveOptions",
    "abort_on_error",
    "channel_of",
    "check_cut",
    "configure_collectives",
    "copy_to",
    "gather_dim",
    "gather_dim_replicated",
    "gather_values",
    "group_rank",
    "group_size",
    "scatter_sum",
    "sum_over",
    "sum_values",
    "swap_dims",
]

SMALL_BYTES = 32_768
"""Sums up to this size use one all-gather, which has half the latency of a reduce-scatter and an all-gather."""


# --- differentiable ---


def gather_dim(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """Concatenate the ranks' [.., n, ..] to [.., W * n, ..], in order of rank. Backward sums the ranks' gradients."""
    return _collective(x, group, dim, _gather, _reduce_scatter)


def gather_dim_replicated(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """Run ``gather_dim`` for the *same* work on all ranks afterwards: the gradient is a local slice, without a sum."""
    return _collective(x, group, dim, _gather, _local_slice)


def scatter_sum(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """Sum the ranks' [.., W * n, ..] and return this rank's part [.., n, ..].

    Raises:
        InputError: the number of ranks does not divide the dimension.
    """
    with abort_on_error("", group):
        check_cut(x, _dim(x, dim), group)
    return _collective(x, group, dim, _reduce_scatter, _gather)


def copy_to(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the replicated ``x`` for different work on each rank; backward sums the ranks' gradients."""
    return _collective(x, group, 0, _identity, _all_reduce)


def sum_over(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum the ranks' ``x``; the result has the same bits on each rank, and all ranks do the same work with it."""
    return _collective(x, group, 0, _all_reduce, _identity)


def swap_dims(x: Tensor, group: ProcessGroup | None, split_dim: int, join_dim: int) -> Tensor:
    """Split ``split_dim`` over the ranks and concatenate their parts along ``join_dim`` (Ulysses, arXiv 2309.14509).

        [B, S/W, H, d]  ──swap_dims(split_dim=2, join_dim=1)──▶  [B, S, H/W, d]

    Raises:
        InputError: the number of ranks does not divide ``split_dim``, or both dimensions are the same.
    """
    if group is None or group_size(group) == 1:
        return x
    with abort_on_error("", group):
        split, join = _dim(x, split_dim), _dim(x, join_dim)
        if join == split:
            raise InputError(f"split_dim and join_dim must differ; got {split_dim} and {join_dim} of {tuple(x.shape)}")
        check_cut(x, split, group)
    return _apply(x, partial(_swap, group, split, join), partial(_swap, group, join, split))


# --- without autograd ---


def gather_values(x: Tensor, group: ProcessGroup | None, description: str = "an exchange of values") -> Tensor:
    """Return the tensors of all ranks, of any dtype, as [W, *shape]. Not differentiable."""
    if group_size(group) == 1:
        return x.detach().unsqueeze(0)
    assert group is not None
    with abort_on_error("", group):
        return channel_of(group).all_gather(_checked(x).detach(), description)


def sum_values(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum the ranks' tensors; the result has the same bits on each rank. Not differentiable."""
    return sum_over(x.detach(), group)


# --- implementation ---


class _LinearCollective(torch.autograd.Function):
    """A linear map between ranks, and its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_fn: partial[Tensor], backward_fn: partial[Tensor]) -> Tensor:
        ctx.forward_fn, ctx.backward_fn = forward_fn, backward_fn
        with abort_on_error("", forward_fn.args[0]):  # if this fails, peers would wait for this rank
            return forward_fn(_checked(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(grad, ctx.backward_fn, ctx.forward_fn), None, None


def _apply(x: Tensor, forward_fn: partial[Tensor], backward_fn: partial[Tensor]) -> Tensor:
    """forward_fn, backward_fn: functions of x, with the group as their first argument."""
    return _LinearCollective.apply(x, forward_fn, backward_fn)  # type: ignore[no-any-return]


def _collective(
    x: Tensor,
    group: ProcessGroup | None,
    dim: int,
    forward_fn: Callable[[ProcessGroup, int, Tensor], Tensor],
    backward_fn: Callable[[ProcessGroup, int, Tensor], Tensor],
) -> Tensor:
    if group is None or group_size(group) == 1:
        return x
    with abort_on_error("", group):
        dim = _dim(x, dim)
    return _apply(x, partial(forward_fn, group, dim), partial(backward_fn, group, dim))


def _checked(x: Tensor) -> Tensor:
    """Return ``x`` with its values in memory, or raise InputError."""
    if not isinstance(x, Tensor):
        raise InputError(f"a collective takes a tensor; got {type(x).__name__}")
    return readable(x)


def _dim(x: Tensor, dim: int) -> int:
    x = _checked(x)
    if not -x.dim() <= dim < max(x.dim(), 1):
        raise InputError(f"dimension {dim} does not exist in a tensor of shape {tuple(x.shape)}")
    return dim % max(x.dim(), 1)


def check_cut(x: Tensor, dim: int, group: ProcessGroup | None) -> None:
    """Raise InputError unless the number of ranks of ``group`` divides dimension ``dim`` of x."""
    if x.shape[dim] % group_size(group):
        raise InputError(
            f"dimension {dim} of a tensor of shape {tuple(x.shape)} must be a multiple of {group_size(group)}, the "
            "number of ranks of the group; pad it"
        )


def _start_call(group: ProcessGroup, dim: int, name: str, x: Tensor) -> tuple[SharedChannel, str]:
    """Return the channel and the description of a call, after comparing it with the peers' if that is enabled."""
    channel = channel_of(group)
    description = f"{name} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} along {dim}"
    channel.compare(description, x)
    return channel, description


def _identity(group: ProcessGroup, dim: int, x: Tensor) -> Tensor:
    return x.view_as(x)


def _local_slice(group: ProcessGroup, dim: int, x: Tensor) -> Tensor:
    rank, world = group_rank(group), group_size(group)
    length = x.shape[dim] // world
    return x.narrow(dim, rank * length, length).contiguous()


def _join_parts(parts_W: Tensor, dim: int) -> Tensor:
    """Map [W, .., n, ..] to [.., W * n, ..]; a view if all dimensions before ``dim`` have length 1."""
    return parts_W.movedim(0, dim).flatten(dim, dim + 1)


def _split_parts(x: Tensor, dim: int, world: int) -> Tensor:
    """Map [.., W * n, ..] to contiguous [W, .., n, ..]."""
    shape = (*x.shape[:dim], world, x.shape[dim] // world, *x.shape[dim + 1 :])
    return x.reshape(shape).movedim(dim, 0).contiguous()


def _gather(group: ProcessGroup, dim: int, x: Tensor) -> Tensor:
    channel, description = _start_call(group, dim, "all-gather", x)
    if not x.numel():
        return x.new_empty([n * channel.world if d == dim else n for d, n in enumerate(x.shape)])
    return _join_parts(channel.all_gather(x, description), dim)


def _reduce_scatter(group: ProcessGroup, dim: int, x: Tensor) -> Tensor:
    channel, description = _start_call(group, dim, "reduce-scatter", x)
    parts_W = _split_parts(x, dim, channel.world)
    if not x.numel():
        return parts_W[0]
    if channel.can_sum(x):
        return channel.reduce_scatter(parts_W, description)
    return sum_in_rank_order(channel.swap(parts_W, description))


def _all_reduce(group: ProcessGroup, dim: int, x: Tensor) -> Tensor:
    channel, description = _start_call(group, dim, "all-reduce", x)
    if not x.numel():
        return x.clone()
    if channel.can_sum(x):
        return channel.all_reduce(x, description)
    if channel.world == 2 or x.numel() * x.element_size() <= SMALL_BYTES:
        return sum_in_rank_order(channel.all_gather(x, description))
    # Each rank sums one slice in rank order; an all-gather then returns the slices to all ranks.
    flat = F.pad(x.reshape(-1), (0, -x.numel() % channel.world)).view(channel.world, -1)
    local_sum = sum_in_rank_order(channel.swap(flat, description))
    return channel.all_gather(local_sum, description).view(-1)[: x.numel()].view(x.shape)


def _swap(group: ProcessGroup, split: int, join: int, x: Tensor) -> Tensor:
    channel, description = _start_call(group, split, f"all-to-all ({split} to {join})", x)
    parts_W = _split_parts(x, split, channel.world)
    if x.numel():
        parts_W = channel.swap(parts_W, description)
    return _join_parts(parts_W, join)
