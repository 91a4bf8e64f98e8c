"""All-gather + GEMM: a column-parallel linear layer whose input rows are sharded over the ranks (Flux, 2406.06858).

y = all_gather(x) @ weight.T          rank r computes its N columns of all ranks' rows

forward    all-gather x in chunks     GEMM of the own rows, then of each chunk as it is received
backward   reduce-scatter of          grad @ weight is summed over the ranks chunk by chunk; meanwhile x is gathered
           grad @ weight in chunks    again for grad.T @ x (saving the gathered x would take W times the memory)

CPU ranks that share memory read each other's rows in place (``shared.py``). On GPUs each pass can be one Triton kernel
(``triton/linear.py``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import abort_on_error, channel_of, group_size
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


def gather_matmul(
    x_SD: Tensor, weight_ND: Tensor, group: ProcessGroup | None, overlap: Overlap | None = None
) -> Tensor:
    """Gather the ranks' rows and multiply them by ``weight.T``. Collective; differentiable once.

    Args:
        x_SD: [S, D] this rank's rows. S, D and the dtype are the same on every rank.
        weight_ND: [N, D] this rank's weight, of the same dtype. The gradient of x is summed over the ranks.
        group: Process group; None for one rank.
        overlap: Backend, chunks and determinism; the same on every rank. The result and the gradient of x have the same
            bits for every setting except ``backend="triton"``; so has the weight's gradient if deterministic.

    Returns:
        [W * S, N] all ranks' rows in rank order, times this rank's ``weight.T``.

    Raises:
        InputError: shapes, dtypes or devices do not match, or the Triton kernels do not support the dtype.
        ConfigError, MissingDependency: Triton is requested and cannot run here; the message says what to do.
        RankMismatch: the ranks' arguments differ (always checked over shared memory, else if collectives are checked).
        PeerDied, PeerTimeout: a rank failed or did not call in time.
    """
    overlap = overlap or DEFAULT
    with abort_on_error("", group):
        x_SD, weight_ND = readable_operands(x_SD, weight_ND)
        check_linear(x_SD, weight_ND, "gather_matmul")
    if needs_autograd(x_SD, weight_ND):
        return _GatherMatmul.apply(x_SD, weight_ND, group, overlap)  # type: ignore[no-any-return]
    return _forward(x_SD, weight_ND, group, overlap)


def reference(x_SD: Tensor, weight_ND: Tensor, group: ProcessGroup | None) -> Tensor:
    """Compute the forward pass serially in plain torch. ``gather_matmul`` has the same bits."""
    if group_size(group) == 1:
        return local_linear(x_SD, weight_ND)
    assert group is not None
    return _serial(channel_of(group), x_SD, weight_ND, "a gather")


def _serial(channel: Channel, x_SD: Tensor, w_ND: Tensor, description: str) -> Tensor:
    return row_invariant_mm(channel.all_gather(x_SD, description).flatten(0, 1), w_ND.t())


def _work(direction: str, x_SD: Tensor, w_ND: Tensor, world: int) -> OperatorWork:
    rows, sent = x_SD.shape
    return operator_work("gather_matmul", direction, rows * world, sent, w_ND.shape[0], x_SD.dtype, world)


def _forward(x_SD: Tensor, w_ND: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
    if group is None or (world := group_size(group)) == 1:
        return local_linear(x_SD, w_ND)
    plan = OperatorPlan.of(group, _work("forward", x_SD, w_ND, world), x_SD, overlap)
    if (kernels := fused_kernels(plan, group, x_SD)) is not None:
        return kernels.gather_matmul(x_SD, w_ND)
    if plan.is_serial:
        return _serial(plan.channel, x_SD, w_ND, plan.description)
    rows = x_SD.shape[0]

    def compute(transport: LinearTransport) -> Tensor:
        return gathered_mm(plan, transport.start_gather(x_SD), rows, w_ND.t()).flatten(0, 1)

    return run_on_transport(plan, SharedTransfers(rows, x_SD, gathered_SD=x_SD), compute)


class _GatherMatmul(Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, w_ND: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
        ctx.save_for_backward(x_SD, w_ND)
        ctx.group, ctx.overlap = group, overlap
        return _forward(x_SD, w_ND, group, overlap)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        if (world := group_size(ctx.group)) == 1:
            return *local_linear_gradients(ctx, grad_TN), None, None
        x_SD, w_ND = ctx.saved_tensors
        needs_x, needs_w = needed_gradients(ctx)[:2]
        plan = OperatorPlan.of(ctx.group, _work("backward", x_SD, w_ND, world), x_SD, ctx.overlap)
        if (kernels := fused_kernels(plan, ctx.group, x_SD)) is not None:
            return *kernels.gather_matmul_gradients(x_SD, w_ND, grad_TN, needs_x, needs_w), None, None
        grad_TN = grad_TN.contiguous()
        grad_WSN = grad_TN.view(world, x_SD.shape[0], w_ND.shape[0])
        deterministic, columns = ctx.overlap.deterministic, x_SD.shape[1]
        order, description = plan.ring.arrivals, plan.description
        if plan.is_serial:
            gathered = plan.channel.start_all_gather(x_SD, description) if needs_w else None
            pending_sum = grad_w = None
            if needs_x:
                parts_WSD = row_invariant_mm(grad_TN, w_ND).view(world, *x_SD.shape)
                pending_sum = start_sum(plan.channel, parts_WSD, description)
            if gathered is not None:
                grad_w = weight_gradient(order, grad_WSN, gathered(), True, deterministic)
            return None if pending_sum is None else pending_sum(), grad_w, None, None

        def compute(transport: LinearTransport) -> tuple[Tensor | None, Tensor | None]:
            gathered = transport.start_gather(x_SD) if needs_w else None
            finish = transport.scattered_mm(grad_WSN, w_ND) if needs_x else None
            grad_w = None
            if gathered is not None:
                weight = WeightGradient(order, grad_WSN, columns, True, deterministic)
                for rows in gathered:
                    weight.add(rows)
                grad_w = weight.result()
            return finish() if finish is not None else None, grad_w

        transfers = SharedTransfers(x_SD.shape[0], x_SD, x_SD if needs_w else None, columns if needs_x else None)
        return *run_on_transport(plan, transfers, compute), None, None
