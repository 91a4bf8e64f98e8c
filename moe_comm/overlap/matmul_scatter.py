"""GEMM + reduce-scatter: a row-parallel linear layer whose output rows are spread over the ranks (Flux, 2406.06858).

y = reduce_scatter(x @ weight.T)      rank r computes its share of every sum, and keeps the sums of its own rows

forward    products by chunks, farthest rank's first; each chunk is summed over the ranks while the next is computed
backward   the gradient is gathered by chunks: grad @ weight of the own rows, then of each chunk as it arrives;
           grad.T @ x with them, or after the last of them

Between CPU ranks that share memory results are not sent, but added where they stand (``shared.py``). On GPUs either
pass can be one Triton kernel (``triton/linear.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.meeting import channel_of, group_size
from moe_comm.errors import InputError
from moe_comm.kernels.needed_grads import wanted_gradients
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.overlap.chunked import Lines, WeightGradient, check_linear, gathered_mm, start_sum, weight_gradient
from moe_comm.overlap.cost import Work
from moe_comm.overlap.linear import Way, carried, differentiated, fused, product, product_gradients, work_of
from moe_comm.overlap.options import DEFAULT, Overlap
from moe_comm.overlap.shared import Traffic


def matmul_scatter(
    x_TK: Tensor, weight_NK: Tensor, group: ProcessGroup | None, overlap: Overlap | None = None
) -> Tensor:
    """[T / W, N] = this rank's rows of the sum over ranks of ``x @ weight.T``. Collective; differentiable once.

    Args:
        x_TK: [T, K] this rank's columns of all ranks' rows, in order of rank; T is a multiple of the ranks.
        weight_NK: [N, K] of the same dtype, this rank's columns of the whole weight.
        group: None is one rank.
        overlap: as in ``gather_matmul``.

    Raises:
        InputError: shapes, dtypes or devices do not fit each other, T does not divide by the ranks, or the Triton
            kernels do not take the dtype.
        ConfigError, MissingDependency: Triton is asked for and cannot run here; the message says what to do.
        RankMismatch: ranks differ (through shared memory always, else where collectives are checked).
        PeerDied, PeerTimeout: a rank is gone or does not come.
    """
    check_linear(x_TK, weight_NK, "matmul_scatter")
    if x_TK.shape[0] % (world := group_size(group)):
        raise InputError(f"matmul_scatter: {x_TK.shape[0]} rows do not divide evenly over {world} ranks")
    overlap = overlap or DEFAULT
    if differentiated(x_TK, weight_NK):
        return _MatmulScatter.apply(x_TK, weight_NK, group, overlap)  # type: ignore[no-any-return]
    return _scattered_product(x_TK, weight_NK, group, overlap)


def reference(x_TK: Tensor, weight_NK: Tensor, group: ProcessGroup | None) -> Tensor:
    """The forward pass in plain torch, one step after the other: the bits that ``matmul_scatter`` must give."""
    if group_size(group) == 1:
        return product(x_TK, weight_NK)
    assert group is not None
    return _at_once(channel_of(group), x_TK, weight_NK, "a sum")


def _at_once(channel: Channel, x_TK: Tensor, w_NK: Tensor, description: str) -> Tensor:
    world, y_TN = channel.world, row_invariant_mm(x_TK, w_NK.t())
    return start_sum(channel, y_TN.view(world, y_TN.shape[0] // world, y_TN.shape[1]), description)()


def _work(direction: str, x_TK: Tensor, w_NK: Tensor, world: int) -> Work:
    outputs, inner = w_NK.shape
    return work_of("matmul_scatter", direction, x_TK.shape[0], outputs, inner, x_TK.dtype, world)


def _scattered_product(x_TK: Tensor, w_NK: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
    """The forward pass, without autograd."""
    if group is None or (world := group_size(group)) == 1:
        return product(x_TK, w_NK)
    lines = Lines.of(group, _work("forward", x_TK, w_NK, world), x_TK, overlap)
    if (kernels := fused(lines, group, x_TK)) is not None:
        return kernels.matmul_scatter(x_TK, w_NK)
    if lines.at_once:
        return _at_once(lines.channel, x_TK, w_NK, lines.description)
    x_WSK = x_TK.unflatten(0, (world, -1))
    traffic = Traffic(x_WSK.shape[1], x_TK, sum_columns=w_NK.shape[0])
    return carried(lines, traffic, lambda way: way.scattered_mm(x_WSK, w_NK.t())())


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w_NK: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
        ctx.save_for_backward(x_TK, w_NK)
        ctx.group, ctx.overlap = group, overlap
        return _scattered_product(x_TK, w_NK, group, overlap)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SN: Tensor) -> tuple[Tensor | None, ...]:
        if (world := group_size(ctx.group)) == 1:
            return *product_gradients(ctx, grad_SN), None, None
        x_TK, w_NK = ctx.saved_tensors
        needs_x, needs_w = wanted_gradients(ctx)[:2]
        grad_SN = grad_SN.contiguous()
        rows = grad_SN.shape[0]
        lines = Lines.of(ctx.group, _work("backward", x_TK, w_NK, world), grad_SN, ctx.overlap)
        if (kernels := fused(lines, ctx.group, x_TK)) is not None:
            return *kernels.matmul_scatter_gradients(x_TK, w_NK, grad_SN, needs_x, needs_w), None, None
        x_WSK = x_TK.view(world, rows, x_TK.shape[1])
        if lines.at_once:
            grad_WSN = lines.channel.all_gather(grad_SN, lines.description)
            return (
                row_invariant_mm(grad_WSN.flatten(0, 1), w_NK) if needs_x else None,
                weight_gradient(lines.ring.arrivals, x_WSK, grad_WSN, False, ctx.overlap.deterministic)
                if needs_w
                else None,
                None,
                None,
            )

        def compute(way: Way) -> tuple[Tensor | None, Tensor | None]:
            weight = (
                WeightGradient(lines.ring.arrivals, x_WSK, w_NK.shape[0], False, ctx.overlap.deterministic)
                if needs_w
                else None
            )
            arrivals = way.start_gather(grad_SN)
            grad_x = None
            if needs_x:
                grad_x = gathered_mm(lines, arrivals, rows, w_NK, weight.add if weight else None).flatten(0, 1)
            else:
                for arrival in arrivals:
                    if weight is not None:
                        weight.add(arrival)
            return grad_x, weight.result() if weight is not None else None

        return *carried(lines, Traffic(rows, grad_SN, gathered_SD=grad_SN), compute), None, None
