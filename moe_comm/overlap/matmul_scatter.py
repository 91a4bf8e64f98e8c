"""GEMM + reduce-scatter: a row-parallel linear layer whose output rows are spread over the ranks (Flux, 2406.06858).

y = reduce_scatter(x @ weight.T)      rank r computes its share of every sum, and keeps the sums of its own rows

forward    products by chunks, farthest rank's first; each chunk is summed over the ranks while the next is computed
backward   the gradient is gathered by chunks: grad @ weight of the own rows, then of each chunk as it arrives;
           grad.T @ x with them, or after the last of them

Between CPU ranks that share memory results are not sent, but added where they stand (``shared.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_comm.dispatch.channels import channel_of, group_size
from moe_comm.dispatch.plain import added_in_order
from moe_comm.errors import InputError
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.kernels.wanted import wanted_gradients
from moe_comm.overlap.chunked import Lines, Overlap, WeightGradient, check_linear, gathered_mm
from moe_comm.overlap.cost import Work
from moe_comm.overlap.linear import Way, carried, product, product_gradients
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
        InputError: shapes, dtypes or devices do not fit each other, or T does not divide by the ranks.
        RankMismatch: ranks differ (through shared memory always, else where collectives are checked).
        PeerDied, PeerTimeout: a rank is gone or does not come.
    """
    check_linear(x_TK, weight_NK, "matmul_scatter")
    if x_TK.shape[0] % group_size(group):
        raise InputError(f"matmul_scatter: {x_TK.shape[0]} rows do not divide evenly over {group_size(group)} ranks")
    return _MatmulScatter.apply(x_TK, weight_NK, group, overlap or Overlap())  # type: ignore[no-any-return]


def reference(x_TK: Tensor, weight_NK: Tensor, group: ProcessGroup | None) -> Tensor:
    """The forward pass in plain torch, one step after the other: the bits that ``matmul_scatter`` must give."""
    y_TN = row_invariant_mm(x_TK, weight_NK.t())
    if group_size(group) == 1:
        return y_TN
    assert group is not None
    channel = channel_of(group)
    ones = [1] * channel.world
    return added_in_order(channel.all_to_all(y_TN.unflatten(0, (channel.world, -1)), ones, ones, "a sum"))


def _work(direction: str, x_TK: Tensor, w_NK: Tensor, group: ProcessGroup) -> Work:
    (outputs, inner), world = w_NK.shape, group_size(group)
    return Work("matmul_scatter", direction, x_TK.shape[0], outputs, inner, x_TK.dtype, world)


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w_NK: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
        ctx.save_for_backward(x_TK, w_NK)
        ctx.group, ctx.overlap = group, overlap
        if group_size(group) == 1:
            return product(x_TK, w_NK)
        assert group is not None
        x_WSK = x_TK.unflatten(0, (group_size(group), -1))
        lines = Lines.of(group, _work("forward", x_TK, w_NK, group), x_TK, overlap)
        traffic = Traffic(x_WSK.shape[1], x_TK, sum_columns=w_NK.shape[0])
        return carried(lines, traffic, lambda way: way.scattered_mm(x_WSK, w_NK.t())())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SN: Tensor) -> tuple[Tensor | None, ...]:
        if group_size(ctx.group) == 1:
            return *product_gradients(ctx, grad_SN), None, None
        x_TK, w_NK = ctx.saved_tensors
        needs_x, needs_w = wanted_gradients(ctx)[:2]
        grad_SN = grad_SN.contiguous()
        rows = grad_SN.shape[0]
        lines = Lines.of(ctx.group, _work("backward", x_TK, w_NK, ctx.group), grad_SN, ctx.overlap)
        x_WSK = x_TK.unflatten(0, (lines.ring.world, -1))

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
