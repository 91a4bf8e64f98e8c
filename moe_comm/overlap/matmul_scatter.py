"""GEMM + reduce-scatter: a row-parallel linear layer whose output rows are spread over the ranks (Flux, 2406.06858).

y = reduce_scatter(x @ weight.T)      rank r computes its share of every sum, and keeps the sums of its own rows

forward    products by chunks, farthest rank's first; each chunk is summed over the ranks while the next is computed
backward   the gradient is gathered by chunks: grad @ weight of the own rows, then of each chunk as it arrives;
           grad.T @ x with them, or after the last of them
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
from moe_comm.overlap.chunked import Lines, Overlap, WeightGradient, check_linear, exact_mm, gathered_mm, scattered_mm


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


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w_NK: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
        ctx.save_for_backward(x_TK, w_NK)
        ctx.group, ctx.overlap = group, overlap
        if group_size(group) == 1:
            return row_invariant_mm(x_TK, w_NK.t())
        assert group is not None
        x_WSK = x_TK.unflatten(0, (group_size(group), -1))
        doing = f"matmul_scatter of {tuple(x_TK.shape)}"
        lines = Lines.of(group, x_WSK.shape[1], x_TK, w_NK.shape[0], overlap, doing)
        return scattered_mm(lines, x_WSK, w_NK.t())()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, w_NK = ctx.saved_tensors
        needs_x, needs_w = wanted_gradients(ctx)[:2]
        if group_size(ctx.group) == 1:
            grad_x = row_invariant_mm(grad_SN, w_NK) if needs_x else None
            return grad_x, exact_mm(grad_SN.t(), x_TK) if needs_w else None, None, None
        grad_SN = grad_SN.contiguous()
        rows, doing = grad_SN.shape[0], f"matmul_scatter backward of {tuple(x_TK.shape)}"
        lines = Lines.of(ctx.group, rows, grad_SN, grad_SN.shape[1], ctx.overlap, doing)
        x_WSK = x_TK.unflatten(0, (lines.ring.world, -1))
        weight = None
        if needs_w:
            weight = WeightGradient(x_WSK, w_NK.shape[0], False, ctx.overlap.deterministic)
        arrivals = lines.start_gather(grad_SN)
        grad_x = None
        if needs_x:
            grad_x = gathered_mm(lines, arrivals, rows, w_NK, weight.add if weight else None).flatten(0, 1)
        else:
            for arrival in arrivals:
                if weight is not None:
                    weight.add(arrival)
        return grad_x, weight.result() if weight is not None else None, None, None
