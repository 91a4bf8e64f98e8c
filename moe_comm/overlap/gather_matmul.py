"""All-gather + GEMM: a column-parallel linear layer with its input rows spread over the ranks (Flux, arXiv 2406.06858).

y = all_gather(x) @ weight.T          rank r computes its N columns of every rank's rows

forward    gather x by chunks         products of the own rows, then of each chunk as it arrives
backward   grad @ weight by chunks,   while they are summed over the ranks, grad.T @ x of rows that are gathered
           reduce-scattered           again meanwhile (kept from forward they would cost W times the memory)

Between CPU ranks that share memory rows are not sent, but read where they stand (``shared.py``). On GPUs either pass
can be one Triton kernel (``triton/linear.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.meeting import channel_of, group_size
from moe_comm.kernels.needed_grads import wanted_gradients
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.overlap.chunked import Lines, WeightGradient, check_linear, gathered_mm, start_sum, weight_gradient
from moe_comm.overlap.cost import Work
from moe_comm.overlap.linear import Way, carried, differentiated, fused, product, product_gradients, work_of
from moe_comm.overlap.options import DEFAULT, Overlap
from moe_comm.overlap.shared import Traffic


def gather_matmul(
    x_SD: Tensor, weight_ND: Tensor, group: ProcessGroup | None, overlap: Overlap | None = None
) -> Tensor:
    """[W * S, N] = the ranks' rows in order of rank, times ``weight.T``. Collective; differentiable once.

    Args:
        x_SD: [S, D] this rank's rows; S, D and the dtype are the same on every rank.
        weight_ND: [N, D] of the same dtype; the ranks' weights differ, and the gradient of x is summed over them.
        group: None is one rank.
        overlap: backend, chunks and determinism, the same on every rank; the result has the same bits for every choice
            but Triton's, and so has the gradient of x. So has the weight's if deterministic.

    Raises:
        InputError: shapes, dtypes or devices do not fit each other, or the Triton kernels do not take the dtype.
        ConfigError, MissingDependency: Triton is asked for and cannot run here; the message says what to do.
        RankMismatch: ranks differ (through shared memory always, else where collectives are checked).
        PeerDied, PeerTimeout: a rank is gone or does not come.
    """
    check_linear(x_SD, weight_ND, "gather_matmul")
    overlap = overlap or DEFAULT
    if differentiated(x_SD, weight_ND):
        return _GatherMatmul.apply(x_SD, weight_ND, group, overlap)  # type: ignore[no-any-return]
    return _gathered_product(x_SD, weight_ND, group, overlap)


def reference(x_SD: Tensor, weight_ND: Tensor, group: ProcessGroup | None) -> Tensor:
    """The forward pass in plain torch, one step after the other: the bits that ``gather_matmul`` must give."""
    if group_size(group) == 1:
        return row_invariant_mm(x_SD, weight_ND.t())
    assert group is not None
    return _at_once(channel_of(group), x_SD, weight_ND, "a gather")


def _at_once(channel: Channel, x_SD: Tensor, w_ND: Tensor, description: str) -> Tensor:
    return row_invariant_mm(channel.all_gather(x_SD, description).flatten(0, 1), w_ND.t())


def _work(direction: str, x_SD: Tensor, w_ND: Tensor, world: int) -> Work:
    rows, sent = x_SD.shape
    return work_of("gather_matmul", direction, rows * world, sent, w_ND.shape[0], x_SD.dtype, world)


def _gathered_product(x_SD: Tensor, w_ND: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
    """The forward pass, without autograd."""
    if group is None or (world := group_size(group)) == 1:
        return product(x_SD, w_ND)
    lines = Lines.of(group, _work("forward", x_SD, w_ND, world), x_SD, overlap)
    if (kernels := fused(lines, group, x_SD)) is not None:
        return kernels.gather_matmul(x_SD, w_ND)
    if lines.at_once:
        return _at_once(lines.channel, x_SD, w_ND, lines.description)
    rows = x_SD.shape[0]

    def compute(way: Way) -> Tensor:
        return gathered_mm(lines, way.start_gather(x_SD), rows, w_ND.t()).flatten(0, 1)

    return carried(lines, Traffic(rows, x_SD, gathered_SD=x_SD), compute)


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, w_ND: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
        ctx.save_for_backward(x_SD, w_ND)
        ctx.group, ctx.overlap = group, overlap
        return _gathered_product(x_SD, w_ND, group, overlap)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        if (world := group_size(ctx.group)) == 1:
            return *product_gradients(ctx, grad_TN), None, None
        x_SD, w_ND = ctx.saved_tensors
        needs_x, needs_w = wanted_gradients(ctx)[:2]
        lines = Lines.of(ctx.group, _work("backward", x_SD, w_ND, world), x_SD, ctx.overlap)
        if (kernels := fused(lines, ctx.group, x_SD)) is not None:
            return *kernels.gather_matmul_gradients(x_SD, w_ND, grad_TN, needs_x, needs_w), None, None
        grad_TN = grad_TN.contiguous()
        grad_WSN = grad_TN.view(world, x_SD.shape[0], w_ND.shape[0])
        deterministic, columns = ctx.overlap.deterministic, x_SD.shape[1]
        if lines.at_once:
            arriving = lines.channel.start_all_gather(x_SD, lines.description) if needs_w else None
            summed = grad_w = None
            if needs_x:
                summed = start_sum(
                    lines.channel, row_invariant_mm(grad_TN, w_ND).view(world, *x_SD.shape), lines.description
                )
            if arriving is not None:
                grad_w = weight_gradient(lines.ring.arrivals, grad_WSN, arriving(), True, deterministic)
            return None if summed is None else summed(), grad_w, None, None

        def compute(way: Way) -> tuple[Tensor | None, Tensor | None]:
            arrivals = way.start_gather(x_SD) if needs_w else None
            finish = way.scattered_mm(grad_WSN, w_ND) if needs_x else None
            grad_w = None
            if arrivals is not None:
                weight = WeightGradient(lines.ring.arrivals, grad_WSN, columns, True, deterministic)
                for arrival in arrivals:
                    weight.add(arrival)
                grad_w = weight.result()
            return finish() if finish is not None else None, grad_w

        traffic = Traffic(x_SD.shape[0], x_SD, x_SD if needs_w else None, columns if needs_x else None)
        return *carried(lines, traffic, compute), None, None
