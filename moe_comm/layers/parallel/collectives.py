"""Differentiable collectives over one process group: what tensor, sequence and context parallelism are made of.

    call                     forward                           backward
    gather_dim               all-gather along dim              reduce-scatter (sum) along dim
    gather_dim_replicated    all-gather along dim              own slice: every rank goes on with the same work
    scatter_sum              reduce-scatter (sum) along dim    all-gather along dim
    copy_to                  nothing                           all-reduce (sum)
    sum_over                 all-reduce (sum)                  nothing: every rank goes on with the same work
    swap_dims                all-to-all                        all-to-all back

All of them are linear, so nothing is kept for backward, and activation checkpointing and split backward passes run
them as often as they need. Over no group, or one of a single rank, each returns ``x`` itself.

Every rank of the group makes the same calls in the same order with the same shape and dtype (``swap_dims`` and the
gathers too: parts are equal). A rank that is gone or does not come is ``PeerDied`` or ``PeerTimeout``, and the group
is unusable afterwards. ``CollectiveOptions.checked`` compares the calls first.

Sums: on the CPU, and of 16-bit floats everywhere, ranks exchange the addends as they are and each adds its share in
order of rank, in fp32 (float64 for float64), and rounds once; so the bits do not depend on a backend's algorithm, and
a bf16 sum costs bf16's bytes. fp32 and float64 on NCCL are summed by NCCL. CPU ranks of one host exchange through
shared memory (``dispatch.exchange``), others over the group's backend, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.meeting import channel_of, configure_collectives, group_rank, group_size
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.errors import InputError
from moe_comm.kernels.wide import added_in_order

__all__ = [
    "CollectiveOptions",
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
"""Up to this size a sum is one all-gather, whose latency is half that of a reduce-scatter and an all-gather."""


# --- differentiable ---


def gather_dim(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """[.., n, ..] to [.., W * n, ..], the ranks' parts in order; their different uses are summed in backward."""
    if group_size(group) == 1:
        return x
    call = _call(group, x, dim)
    return _apply(x, partial(_gather, call), partial(_reduce_scatter, call))


def gather_dim_replicated(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """As ``gather_dim`` where every rank goes on to do the *same* work: the gradient is one's own slice, unsummed."""
    if group_size(group) == 1:
        return x
    call = _call(group, x, dim)
    return _apply(x, partial(_gather, call), partial(_own, call))


def scatter_sum(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """Sum of the ranks' [.., W * n, ..], of which this rank keeps its part [.., n, ..].

    Raises:
        InputError: the dimension cannot be cut evenly over the ranks.
    """
    if group_size(group) == 1:
        return x
    call = _call(group, x, dim)
    check_cut(x, call.dim, group)
    return _apply(x, partial(_reduce_scatter, call), partial(_gather, call))


def copy_to(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """``x``, alike on every rank, going into different work on each: their gradients are summed."""
    if group_size(group) == 1:
        return x
    return _apply(x, _same, partial(_all_reduce, _call(group, x, 0)))


def sum_over(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum of the ranks' ``x``, the same bits on each, which all go on to do the same work with."""
    if group_size(group) == 1:
        return x
    return _apply(x, partial(_all_reduce, _call(group, x, 0)), _same)


def swap_dims(x: Tensor, group: ProcessGroup | None, split_dim: int, join_dim: int) -> Tensor:
    """Cut ``split_dim`` over the ranks and join their parts along ``join_dim`` (Ulysses, arXiv 2309.14509).

        [B, S/W, H, d]  ──swap_dims(split_dim=2, join_dim=1)──▶  [B, S, H/W, d]

    Raises:
        InputError: ``split_dim`` cannot be cut evenly over the ranks.
    """
    if group_size(group) == 1:
        return x
    call = _call(group, x, split_dim)
    join = _dim(x, join_dim)
    if join == call.dim:
        raise InputError(f"swap_dims needs two dimensions; got {split_dim} and {join_dim} of {tuple(x.shape)}")
    check_cut(x, call.dim, group)
    return _apply(x, partial(_swap, call, call.dim, join), partial(_swap, call, join, call.dim))


# --- the same without autograd ---


def gather_values(x: Tensor, group: ProcessGroup | None, description: str = "an exchange of values") -> Tensor:
    """[W, *shape] of the ranks' tensors, any dtype. Not differentiable."""
    if group_size(group) == 1:
        return x.detach().unsqueeze(0)
    assert group is not None
    return channel_of(group).all_gather(x.detach(), description)


def sum_values(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The ranks' tensors added up, the same bits on each. Not differentiable."""
    return sum_over(x.detach(), group)


# --- how ---


@dataclass(frozen=True)
class _Call:
    group: ProcessGroup
    dim: int


class _Linear(torch.autograd.Function):
    """A linear map between ranks and its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(grad, ctx.back, ctx.there), None, None


def _apply(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    return _Linear.apply(x, there, back)  # type: ignore[no-any-return]


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < max(x.dim(), 1):
        raise InputError(f"there is no dimension {dim} in a tensor of shape {tuple(x.shape)}")
    return dim % max(x.dim(), 1)


def _call(group: ProcessGroup | None, x: Tensor, dim: int) -> _Call:
    assert group is not None
    return _Call(group, _dim(x, dim))


def check_cut(x: Tensor, dim: int, group: ProcessGroup | None) -> None:
    """Raise InputError unless ``dim`` of x divides evenly over the ranks of ``group``."""
    if x.shape[dim] % group_size(group):
        raise InputError(
            f"dimension {dim} of a tensor of shape {tuple(x.shape)} is {x.shape[dim]} long, which does not divide "
            f"evenly over the {group_size(group)} ranks of the group; pad it to a multiple"
        )


def _begin(call: _Call, name: str, x: Tensor) -> tuple[SharedChannel, str]:
    """The channel, and what to say about this call, compared with the peers' where that is wanted."""
    channel = channel_of(call.group)
    description = f"{name} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} along {call.dim}"
    channel.compare(description, x)
    return channel, description


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _own(call: _Call, x: Tensor) -> Tensor:
    rank, world = group_rank(call.group), group_size(call.group)
    length = x.shape[call.dim] // world
    return x.narrow(call.dim, rank * length, length).contiguous()


def _joined(parts_W: Tensor, dim: int) -> Tensor:
    """[W, .., n, ..] to [.., W * n, ..]; a view where everything before ``dim`` is of length 1."""
    return parts_W.movedim(0, dim).flatten(dim, dim + 1)


def _cut(x: Tensor, dim: int, world: int) -> Tensor:
    """[.., W * n, ..] to contiguous [W, .., n, ..]."""
    shape = (*x.shape[:dim], world, x.shape[dim] // world, *x.shape[dim + 1 :])
    return x.reshape(shape).movedim(dim, 0).contiguous()


def _gather(call: _Call, x: Tensor) -> Tensor:
    channel, description = _begin(call, "all-gather", x)
    if not x.numel():
        return x.new_empty([n * channel.world if d == call.dim else n for d, n in enumerate(x.shape)])
    return _joined(channel.all_gather(x, description), call.dim)


def _reduce_scatter(call: _Call, x: Tensor) -> Tensor:
    channel, description = _begin(call, "reduce-scatter", x)
    parts_W = _cut(x, call.dim, channel.world)
    if not x.numel():
        return parts_W[0]
    if channel.sums(x):
        return channel.reduce_scatter(parts_W, description)
    ones = [1] * channel.world
    return added_in_order(channel.all_to_all(parts_W, ones, ones, description))


def _all_reduce(call: _Call, x: Tensor) -> Tensor:
    channel, description = _begin(call, "all-reduce", x)
    if not x.numel():
        return x.clone()
    if channel.sums(x):
        return channel.all_reduce(x, description)
    if channel.world == 2 or x.numel() * x.element_size() <= SMALL_BYTES:
        return added_in_order(channel.all_gather(x, description))
    flat = F.pad(x.reshape(-1), (0, -x.numel() % channel.world)).view(channel.world, -1)
    ones = [1] * channel.world
    own = added_in_order(channel.all_to_all(flat, ones, ones, description))
    return channel.all_gather(own, description).view(-1)[: x.numel()].view(x.shape)


def _swap(call: _Call, split: int, join: int, x: Tensor) -> Tensor:
    channel, description = _begin(call, f"all-to-all ({split} to {join})", x)
    parts_W = _cut(x, split, channel.world)
    if x.numel():
        ones = [1] * channel.world
        parts_W = channel.all_to_all(parts_W, ones, ones, description)
    return _joined(parts_W, join)
