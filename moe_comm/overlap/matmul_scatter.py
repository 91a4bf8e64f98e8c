"""GEMM + reduce-scatter: a row-parallel linear layer whose output rows are sharded over the ranks (Flux, 2406.06858).

y = reduce_scatter(x @ weight.T)      rank r computes its partial sums, and receives the sums of its own rows

forward    GEMM in chunks, the rows of the farthest rank first; each chunk is summed over the ranks during the next GEMM
backward   the gradient is gathered in chunks: grad @ weight of the own rows, then of each chunk as it is received;
           grad.T @ x with each chunk, or after the last one

CPU ranks that share memory sum each other's results in place (``shared.py``). On GPUs each pass can be one Triton
kernel (``triton/linear.py``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import abort_on_error, channel_of, group_size
from moe_comm.errors import InputError
from moe_comm.kernels.autograd import needed_gradients, needs_autograd, once_differentiable
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.overlap.chunked import (
    OperatorPlan,
    WeightGradient,
    check_linear,
    gathered_mm,
    readable_operands,
    start_sum,
    weight_gradient,
)
from moe_comm.overlap.linear import (
    LinearTransport,
    fused_kernels,
    local_linear,
    local_linear_gradients,
    operator_work,
    run_on_transport,
)
from moe_comm.overlap.options import DEFAULT, Overlap
from moe_comm.overlap.shared import SharedTransfers
from moe_comm.overlap.tuning.cost import OperatorWork


def matmul_scatter(
    x_TK: Tensor, weight_NK: Tensor, group: ProcessGroup | None, overlap: Overlap | None = None
) -> Tensor:
    """Multiply x by ``weight.T`` and reduce-scatter the result. Collective; differentiable once.

    Args:
        x_TK: [T, K] this rank's columns of all ranks' rows, in rank order. T is a multiple of the number of ranks.
        weight_NK: [N, K] this rank's columns of the full weight, of the same dtype.
        group: Process group; None for one rank.
        overlap: As in ``gather_matmul``.

    Returns:
        [T / W, N] this rank's rows of the sum over ranks of ``x @ weight.T``.

    Raises:
        InputError: shapes, dtypes or devices do not match, T is not a multiple of the number of ranks, or the Triton
            kernels do not support the dtype.
        ConfigError, MissingDependency: Triton is requested and cannot run here; the message says what to do.
        RankMismatch: the ranks' arguments differ (always checked over shared memory, else if collectives are checked).
        PeerDied, PeerTimeout: a rank failed or did not call in time.
    """
    overlap = overlap or DEFAULT
    with abort_on_error("", group):
        x_TK, weight_NK = readable_operands(x_TK, weight_NK)
        check_linear(x_TK, weight_NK, "matmul_scatter")
        if x_TK.shape[0] % (world := group_size(group)):
            raise InputError(f"matmul_scatter: {x_TK.shape[0]} rows do not divide evenly over {world} ranks")
    if needs_autograd(x_TK, weight_NK):
        return _MatmulScatter.apply(x_TK, weight_NK, group, overlap)  # type: ignore[no-any-return]
    return _forward(x_TK, weight_NK, group, overlap)


def reference(x_TK: Tensor, weight_NK: Tensor, group: ProcessGroup | None) -> Tensor:
    """Compute the forward pass serially in plain torch. ``matmul_scatter`` has the same bits."""
    if group_size(group) == 1:
        return local_linear(x_TK, weight_NK)
    assert group is not None
    return _serial(channel_of(group), x_TK, weight_NK, "a sum")


def _serial(channel: Channel, x_TK: Tensor, w_NK: Tensor, description: str) -> Tensor:
    world, y_TN = channel.world, row_invariant_mm(x_TK, w_NK.t())
    return start_sum(channel, y_TN.view(world, y_TN.shape[0] // world, y_TN.shape[1]), description)()


def _work(direction: str, x_TK: Tensor, w_NK: Tensor, world: int) -> OperatorWork:
    outputs, inner = w_NK.shape
    return operator_work("matmul_scatter", direction, x_TK.shape[0], outputs, inner, x_TK.dtype, world)


def _forward(x_TK: Tensor, w_NK: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
    if group is None or (world := group_size(group)) == 1:
        return local_linear(x_TK, w_NK)
    plan = OperatorPlan.of(group, _work("forward", x_TK, w_NK, world), x_TK, overlap)
    if (kernels := fused_kernels(plan, group, x_TK)) is not None:
        return kernels.matmul_scatter(x_TK, w_NK)
    if plan.is_serial:
        return _serial(plan.channel, x_TK, w_NK, plan.description)
    x_WSK = x_TK.unflatten(0, (world, -1))
    transfers = SharedTransfers(x_WSK.shape[1], x_TK, sum_columns=w_NK.shape[0])
    return run_on_transport(plan, transfers, lambda transport: transport.scattered_mm(x_WSK, w_NK.t())())


class _MatmulScatter(Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w_NK: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
        ctx.save_for_backward(x_TK, w_NK)
        ctx.group, ctx.overlap = group, overlap
        return _forward(x_TK, w_NK, group, overlap)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SN: Tensor) -> tuple[Tensor | None, ...]:
        if (world := group_size(ctx.group)) == 1:
            return *local_linear_gradients(ctx, grad_SN), None, None
        x_TK, w_NK = ctx.saved_tensors
        needs_x, needs_w = needed_gradients(ctx)[:2]
        grad_SN = grad_SN.contiguous()
        rows, deterministic = grad_SN.shape[0], ctx.overlap.deterministic
        plan = OperatorPlan.of(ctx.group, _work("backward", x_TK, w_NK, world), grad_SN, ctx.overlap)
        if (kernels := fused_kernels(plan, ctx.group, x_TK)) is not None:
            return *kernels.matmul_scatter_gradients(x_TK, w_NK, grad_SN, needs_x, needs_w), None, None
        x_WSK, order = x_TK.view(world, rows, x_TK.shape[1]), plan.ring.arrivals
        if plan.is_serial:
            grad_WSN = plan.channel.all_gather(grad_SN, plan.description)
            grad_x = row_invariant_mm(grad_WSN.flatten(0, 1), w_NK) if needs_x else None
            grad_w = weight_gradient(order, x_WSK, grad_WSN, False, deterministic) if needs_w else None
            return grad_x, grad_w, None, None

        def compute(transport: LinearTransport) -> tuple[Tensor | None, Tensor | None]:
            weight = WeightGradient(order, x_WSK, w_NK.shape[0], False, deterministic) if needs_w else None
            gathered = transport.start_gather(grad_SN)
            grad_x = None
            if needs_x:
                grad_x = gathered_mm(plan, gathered, rows, w_NK, weight.add if weight else None).flatten(0, 1)
            else:
                for chunk in gathered:
                    if weight is not None:
                        weight.add(chunk)
            return grad_x, weight.result() if weight is not None else None

        return *run_on_transport(plan, SharedTransfers(rows, grad_SN, gathered_SD=grad_SN), compute), None, None
