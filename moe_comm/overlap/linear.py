"""Tensor-parallel linear layers whose rows are sharded over the ranks, overlapped with their collective (Flux,
2406.06858).

gather_matmul    y = all_gather(x) @ weight.T          column-parallel: rank r computes its N columns of all ranks' rows
matmul_scatter   y = reduce_scatter(x @ weight.T)      row-parallel: rank r receives the sums of its own rows

                 forward                                     backward
gather_matmul    GEMM of the own rows, then of each chunk    grad @ weight is summed over the ranks chunk by chunk;
                 as it is received                           meanwhile x is gathered again for grad.T @ x (saving the
                                                             gathered x would take W times the memory)
matmul_scatter   GEMM in chunks, the rows of the farthest    grad is gathered in chunks: grad @ weight of the own rows,
                 rank first; each chunk is summed over the   then of each chunk as it is received; grad.T @ x with each
                 ranks during the next GEMM                  chunk, or after the last one

CPU ranks that share memory read each other's rows, and sum each other's results, in place (``shared.py``). On GPUs each
pass can be one Triton kernel (``triton/linear.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from moe_comm.comm.group_setup import abort_on_error, group_size
from moe_comm.errors import InputError
from moe_comm.kernels.autograd import needed_gradients, needs_autograd, once_differentiable
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.overlap.chunked import (
    OperatorPlan,
    WeightGradient,
    check_linear,
    exact_mm,
    gathered_mm,
    readable_operands,
)
from moe_comm.overlap.options import DEFAULT, TRITON, Overlap
from moe_comm.overlap.shared import SharedTransfers, SharedTransport, reads_in_place, run_in_place
from moe_comm.overlap.tuning.cost import OperatorWork

if TYPE_CHECKING:
    from moe_comm.overlap.triton.linear import LinearKernels

T = TypeVar("T")
Operator = Literal["gather_matmul", "matmul_scatter"]
Gradients = tuple[Tensor | None, Tensor | None]
"""Gradients of x and the weight; None for a gradient that is not needed."""


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
    return _run("gather_matmul", x_SD, weight_ND, group, overlap or DEFAULT)


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
        InputError: as ``gather_matmul``, or T is not a multiple of the number of ranks.
        ConfigError, MissingDependency, RankMismatch, PeerDied, PeerTimeout: as ``gather_matmul``.
    """
    return _run("matmul_scatter", x_TK, weight_NK, group, overlap or DEFAULT)


def _run(operator: Operator, x: Tensor, w: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
    with abort_on_error("", group):
        x, w = readable_operands(x, w)
        check_linear(x, w, operator)
        if operator == "matmul_scatter" and x.shape[0] % (world := group_size(group)):
            raise InputError(f"matmul_scatter: {x.shape[0]} rows do not divide evenly over {world} ranks")
    if needs_autograd(x, w):
        return _Linear.apply(operator, x, w, group, overlap)  # type: ignore[no-any-return]
    return _forward(operator, x, w, group, overlap)


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, operator: Operator, x: Tensor, w: Tensor, group: ProcessGroup | None, overlap: Overlap
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.operator, ctx.group, ctx.overlap = operator, group, overlap
        return _forward(operator, x, w, group, overlap)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        needs_x, needs_w = needed_gradients(ctx)[1:3]
        if group_size(ctx.group) == 1:
            gradients: Gradients = (
                row_invariant_mm(grad, w) if needs_x else None,
                exact_mm(grad.t(), x) if needs_w else None,
            )
        else:
            like = x if ctx.operator == "gather_matmul" else grad
            plan = _plan(ctx.operator, "backward", x, w, ctx.group, ctx.overlap, like)
            if (kernels := _fused_kernels(plan, ctx.group, x)) is not None:
                gradients = kernels.gradients(ctx.operator, x, w, grad, needs_x, needs_w)
            else:
                run = _gather_gradients if ctx.operator == "gather_matmul" else _scatter_gradients
                gradients = run(plan, x, w, grad.contiguous(), needs_x, needs_w, ctx.overlap.deterministic)
        return None, *gradients, None, None


def _forward(operator: Operator, x: Tensor, w: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
    if group is None or (world := group_size(group)) == 1:
        return row_invariant_mm(x, w.t())
    plan = _plan(operator, "forward", x, w, group, overlap, x)
    if (kernels := _fused_kernels(plan, group, x)) is not None:
        return kernels.forward(operator, x, w)
    if operator == "gather_matmul":
        rows = x.shape[0]

        def gather(transport: OperatorPlan | SharedTransport) -> Tensor:
            return gathered_mm(plan, transport.start_gather(x), rows, w.t()).flatten(0, 1)

        return _run_on_transport(plan, SharedTransfers(rows, x, gathered_SD=x), gather)
    rows = x.shape[0] // world
    x_WSK = x.unflatten(0, (world, rows))
    transfers = SharedTransfers(rows, x, sum_columns=w.shape[0])
    return _run_on_transport(plan, transfers, lambda transport: transport.scattered_mm(x_WSK, w.t())())


def _gather_gradients(
    plan: OperatorPlan, x_SD: Tensor, w_ND: Tensor, grad_TN: Tensor, needs_x: bool, needs_w: bool, deterministic: bool
) -> Gradients:
    grad_WSN, columns = grad_TN.view(plan.ring.world, x_SD.shape[0], w_ND.shape[0]), x_SD.shape[1]

    def compute(transport: OperatorPlan | SharedTransport) -> Gradients:
        # The gather and the sum are both in flight during the GEMMs of the other one.
        gathered = transport.start_gather(x_SD) if needs_w else None
        finish = transport.scattered_mm(grad_WSN, w_ND) if needs_x else None
        grad_w = None
        if gathered is not None:
            weight = WeightGradient(plan.ring.arrivals, grad_WSN, columns, True, deterministic)
            for rows in gathered:
                weight.add(rows)
            grad_w = weight.result()
        return finish() if finish is not None else None, grad_w

    transfers = SharedTransfers(x_SD.shape[0], x_SD, x_SD if needs_w else None, columns if needs_x else None)
    return _run_on_transport(plan, transfers, compute)


def _scatter_gradients(
    plan: OperatorPlan, x_TK: Tensor, w_NK: Tensor, grad_SN: Tensor, needs_x: bool, needs_w: bool, deterministic: bool
) -> Gradients:
    rows, order = grad_SN.shape[0], plan.ring.arrivals
    x_WSK = x_TK.view(plan.ring.world, rows, x_TK.shape[1])

    def compute(transport: OperatorPlan | SharedTransport) -> Gradients:
        weight = WeightGradient(order, x_WSK, w_NK.shape[0], False, deterministic) if needs_w else None
        gathered, grad_x = transport.start_gather(grad_SN), None
        if needs_x:
            grad_x = gathered_mm(plan, gathered, rows, w_NK, weight.add if weight else None).flatten(0, 1)
        else:
            for chunk in gathered:
                if weight is not None:
                    weight.add(chunk)
        return grad_x, weight.result() if weight is not None else None

    return _run_on_transport(plan, SharedTransfers(rows, grad_SN, gathered_SD=grad_SN), compute)


_work = lru_cache(maxsize=1024)(OperatorWork)
"""Cached: constructing and hashing an OperatorWork takes as long as a GEMM of few rows."""


def _plan(
    operator: Operator, direction: str, x: Tensor, w: Tensor, group: ProcessGroup, overlap: Overlap, like: Tensor
) -> OperatorPlan:
    world, (rows, inner), outputs = group_size(group), x.shape, w.shape[0]
    sizes = (rows * world, inner, outputs) if operator == "gather_matmul" else (rows, outputs, inner)
    return OperatorPlan.of(group, _work(operator, direction, *sizes, x.dtype, world), like, overlap)


def _run_on_transport(
    plan: OperatorPlan, transfers: SharedTransfers, body: Callable[[OperatorPlan | SharedTransport], T]
) -> T:
    """Return ``body(transport)``, with shared memory as the transport where it can be used, else chunked collectives.

    Args:
        body: Starts the operations that ``transfers`` describes. It runs again if a rank's shared memory is full.
    """
    communicates = transfers.gathered_SD is not None or transfers.sum_columns is not None
    if communicates and reads_in_place(plan, transfers.like):
        result = run_in_place(plan, transfers, body)
        if result is not None:
            return result
    return body(plan)


def _fused_kernels(plan: OperatorPlan, group: ProcessGroup, like: Tensor) -> LinearKernels | None:
    """Return the Triton kernels if the plan uses them."""
    if plan.choice.backend != TRITON:
        return None
    from moe_comm.overlap.triton.linear import LinearKernels  # needs Triton

    return LinearKernels.of(group, like, plan.choice.programs or None)
