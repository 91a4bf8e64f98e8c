"""All-gather + GEMM: a column-parallel linear layer with its input rows spread over the ranks (Flux, arXiv 2406.06858).

y = all_gather(x) @ weight.T          rank r computes its N columns of every rank's rows

forward    gather x by chunks         products of the own rows, then of each chunk as it arrives
backward   grad @ weight by chunks,   while they are summed over the ranks, grad.T @ x of rows that are gathered
           reduce-scattered           again meanwhile (kept from forward they would cost W times the memory)

Between CPU ranks that share memory rows are not sent, but read where they stand (``shared.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_comm.dispatch.channels import channel_of, group_size
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.kernels.wanted import wanted_gradients
from moe_comm.overlap.chunked import Lines, Overlap, WeightGradient, check_linear, gathered_mm
from moe_comm.overlap.cost import Work
from moe_comm.overlap.linear import Way, carried, product, product_gradients
from moe_comm.overlap.shared import Traffic


def gather_matmul(
    x_SD: Tensor, weight_ND: Tensor, group: ProcessGroup | None, overlap: Overlap | None = None
) -> Tensor:
    """[W * S, N] = the ranks' rows in order of rank, times ``weight.T``. Collective; differentiable once.

    Args:
        x_SD: [S, D] this rank's rows; S, D and the dtype are the same on every rank.
        weight_ND: [N, D] of the same dtype; the ranks' weights differ, and the gradient of x is summed over them.
        group: None is one rank.
        overlap: chunks and determinism, the same on every rank; the result has the same bits for every choice, and so
            has the gradient of x. So has the weight's if deterministic.

    Raises:
        InputError: shapes, dtypes or devices do not fit each other.
        RankMismatch: ranks differ (through shared memory always, else where collectives are checked).
        PeerDied, PeerTimeout: a rank is gone or does not come.
    """
    check_linear(x_SD, weight_ND, "gather_matmul")
    return _GatherMatmul.apply(x_SD, weight_ND, group, overlap or Overlap())  # type: ignore[no-any-return]


def reference(x_SD: Tensor, weight_ND: Tensor, group: ProcessGroup | None) -> Tensor:
    """The forward pass in plain torch, one step after the other: the bits that ``gather_matmul`` must give."""
    if group_size(group) == 1:
        return row_invariant_mm(x_SD, weight_ND.t())
    assert group is not None
    whole_WSD = channel_of(group).all_gather(x_SD, "a gather")
    return row_invariant_mm(whole_WSD.flatten(0, 1), weight_ND.t())


def _work(direction: str, x_SD: Tensor, w_ND: Tensor, group: ProcessGroup) -> Work:
    world = group_size(group)
    rows, sent, other = x_SD.shape[0] * world, x_SD.shape[1], w_ND.shape[0]
    return Work("gather_matmul", direction, rows, sent, other, x_SD.dtype, world)


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, w_ND: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
        ctx.save_for_backward(x_SD, w_ND)
        ctx.group, ctx.overlap = group, overlap
        if group_size(group) == 1:
            return product(x_SD, w_ND)
        assert group is not None
        lines = Lines.of(group, _work("forward", x_SD, w_ND, group), x_SD, overlap)
        rows = x_SD.shape[0]

        def compute(way: Way) -> Tensor:
            return gathered_mm(lines, way.start_gather(x_SD), rows, w_ND.t()).flatten(0, 1)

        return carried(lines, Traffic(rows, x_SD, gathered_SD=x_SD), compute)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        if group_size(ctx.group) == 1:
            return *product_gradients(ctx, grad_TN), None, None
        x_SD, w_ND = ctx.saved_tensors
        needs_x, needs_w = wanted_gradients(ctx)[:2]
        lines = Lines.of(ctx.group, _work("backward", x_SD, w_ND, ctx.group), x_SD, ctx.overlap)
        grad_WSN = grad_TN.contiguous().unflatten(0, (lines.ring.world, -1))
        columns = x_SD.shape[1]

        def compute(way: Way) -> tuple[Tensor | None, Tensor | None]:
            arrivals = way.start_gather(x_SD) if needs_w else None
            finish = way.scattered_mm(grad_WSN, w_ND) if needs_x else None
            grad_w = None
            if arrivals is not None:
                weight = WeightGradient(lines.ring.arrivals, grad_WSN, columns, True, ctx.overlap.deterministic)
                for arrival in arrivals:
                    weight.add(arrival)
                grad_w = weight.result()
            return finish() if finish is not None else None, grad_w

        traffic = Traffic(x_SD.shape[0], x_SD, x_SD if needs_w else None, columns if needs_x else None)
        return *carried(lines, traffic, compute), None, None
