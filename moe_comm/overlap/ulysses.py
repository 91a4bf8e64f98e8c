"""Ulysses operators: a linear layer and the all-to-all between tokens and heads, overlapped.

    matmul_swap     q, k, v of own tokens, all heads   ──all-to-all──▶   own heads of all tokens
    swap_matmul     own heads of all tokens            ──all-to-all──▶   all heads of own tokens, then the o projection

forward of matmul_swap, and backward of swap_matmul: the GEMMs of the peers' columns come first

    GEMM      [peers', rows 0][peers', rows 1][own columns, all rows][weight gradient, in backward]
    network                   [rows 0        ][rows 1       ]

forward of swap_matmul, and backward of matmul_swap: all columns of a chunk of rows are received, then multiplied

    network   [rows 0       ][rows 1       ]
    GEMM      [gradient of   ][rows 0      ][rows 1][weight gradient of the peers' columns]
               own columns, in backward

Chunks are row ranges on both sides. With chunks of heads, swap_matmul would sum partial products in an order that
depends on the number of chunks. The pairs are those of Flux (arXiv 2406.06858: GEMM + all-to-all + transpose) and
MegaScale-MoE (2505.11432).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.group_setup import abort_on_error, group_size
from moe_comm.errors import InputError
from moe_comm.kernels.autograd import needed_gradients, once_differentiable, without_autocast
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.overlap.chunked import OperatorPlan, check_linear, exact_mm, readable_operands
from moe_comm.overlap.linear import gather_matmul
from moe_comm.overlap.options import Overlap
from moe_comm.overlap.tuning.cost import OperatorWork


def matmul_swap(x_SD: Tensor, weight_ND: Tensor, group: ProcessGroup | None, overlap: Overlap | None = None) -> Tensor:
    """Multiply this rank's rows by ``weight.T`` and exchange the columns (all-to-all). Collective; differentiable once.

    Args:
        x_SD: [S, D] this rank's rows. S, D and the dtype are the same on every rank.
        weight_ND: [N, D] of the same dtype. Its outputs are ordered by the rank that receives them, N / W for each.
        group: Process group; None for one rank.
        overlap: Chunks of rows and determinism; the same on every rank. The result and the gradient of x have the same
            bits for every setting; so has the weight's gradient if deterministic. The weight's gradient covers this
            rank's rows only: ranks that share the weight must sum it.

    Returns:
        [W * S, N / W] this rank's columns of ``x @ weight.T`` for all ranks' rows, in rank order.

    Raises:
        InputError: shapes, dtypes or devices do not match, or N is not a multiple of the number of ranks.
        RankMismatch: the ranks' arguments differ (always checked over shared memory, else if collectives are checked).
        PeerDied, PeerTimeout: a rank failed or did not call in time.
    """
    with abort_on_error("", group):
        x_SD, weight_ND = readable_operands(x_SD, weight_ND)
        check_linear(x_SD, weight_ND, "matmul_swap")
        _check_divides(weight_ND.shape[0], group, "matmul_swap: the weight's {} outputs")
    if group is None or group_size(group) == 1:
        return gather_matmul(x_SD, weight_ND, None)  # nothing is exchanged
    return _MatmulSwap.apply(x_SD, weight_ND, group, overlap or Overlap())  # type: ignore[no-any-return]


def swap_matmul(x_TK: Tensor, weight_NK: Tensor, group: ProcessGroup | None, overlap: Overlap | None = None) -> Tensor:
    """Exchange columns for rows (all-to-all) and multiply by ``weight.T``. Collective; differentiable once.

    Args:
        x_TK: [W * S, K / W] this rank's columns of all ranks' rows, in rank order.
        weight_NK: [N, K] the full weight, of the same dtype.
        group: Process group; None for one rank.
        overlap: As in ``matmul_swap``.

    Returns:
        [S, N] this rank's rows with all columns of x, times ``weight.T``.

    Raises:
        InputError: shapes, dtypes or devices do not match, or the rows are not a multiple of the number of ranks.
        RankMismatch: the ranks' arguments differ (always checked over shared memory, else if collectives are checked).
        PeerDied, PeerTimeout: a rank failed or did not call in time.
    """
    world = group_size(group)
    with abort_on_error("", group):
        x_TK, weight_NK = readable_operands(x_TK, weight_NK)
        if x_TK.dim() == 2 and weight_NK.dim() == 2 and x_TK.shape[1] * world != weight_NK.shape[1]:
            raise InputError(
                f"swap_matmul takes x [rows, K / {world}] and weight [N, K]; got {tuple(x_TK.shape)} and "
                f"{tuple(weight_NK.shape)}"
            )
        part_NK = weight_NK[:, : x_TK.shape[-1]] if x_TK.dim() == weight_NK.dim() == 2 else weight_NK
        check_linear(x_TK, part_NK, "swap_matmul")
        _check_divides(x_TK.shape[0], group, "swap_matmul: {} rows")
    if group is None or world == 1:
        return gather_matmul(x_TK, weight_NK, None)
    return _SwapMatmul.apply(x_TK, weight_NK, group, overlap or Overlap())  # type: ignore[no-any-return]


class _MatmulSwap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, w_ND: Tensor, group: ProcessGroup, overlap: Overlap) -> Tensor:
        ctx.save_for_backward(x_SD, w_ND)
        ctx.group, ctx.overlap = group, overlap
        plan = _plan(False, "forward", x_SD.shape[0], w_ND, x_SD, group, overlap)
        return _send_columns(plan, x_SD, w_ND.t())().flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Tn: Tensor) -> tuple[Tensor | None, ...]:
        x_SD, w_ND = ctx.saved_tensors
        needs_x, needs_w = needed_gradients(ctx)[:2]
        plan = _plan(False, "backward", x_SD.shape[0], w_ND, grad_Tn, ctx.group, ctx.overlap)
        grad_SN = grad_Tn.new_empty(x_SD.shape[0], w_ND.shape[0])
        received = _exchange_rows(plan, grad_Tn.unflatten(0, (plan.ring.world, x_SD.shape[0])), grad_SN)
        weight = _WeightGradient(plan, grad_Tn, x_SD, grad_SN) if needs_w else None
        grad_x = x_SD.new_empty(x_SD.shape) if needs_x else None
        for rows in received:
            if grad_x is not None:
                row_invariant_mm(grad_SN[rows], w_ND, out=grad_x[rows])
            if weight is not None and not ctx.overlap.deterministic:
                weight.add(rows)
        if weight is not None and ctx.overlap.deterministic:
            weight.add(slice(None))
        return grad_x, weight.sum_ND if weight is not None else None, None, None


class _SwapMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w_NK: Tensor, group: ProcessGroup, overlap: Overlap) -> Tensor:
        ctx.group, ctx.overlap = group, overlap
        num_rows = x_TK.shape[0] // group_size(group)
        plan = _plan(True, "forward", num_rows, w_NK, x_TK, group, overlap)
        full_SK = x_TK.new_empty(num_rows, w_NK.shape[1])
        y_SN = x_TK.new_empty(num_rows, w_NK.shape[0])
        for rows in _exchange_rows(plan, x_TK.unflatten(0, (plan.ring.world, num_rows)), full_SK):
            row_invariant_mm(full_SK[rows], w_NK.t(), out=y_SN[rows])
        # Save full_SK instead of x: it is as large, and backward needs nothing else of x.
        ctx.save_for_backward(full_SK, w_NK)
        return y_SN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SN: Tensor) -> tuple[Tensor | None, ...]:
        full_SK, w_NK = ctx.saved_tensors
        needs_x, needs_w = needed_gradients(ctx)[:2]
        finish = None
        if needs_x:
            plan = _plan(True, "backward", grad_SN.shape[0], w_NK, grad_SN, ctx.group, ctx.overlap)
            finish = _send_columns(plan, grad_SN.contiguous(), w_NK)
        grad_w = exact_mm(grad_SN.t(), full_SK) if needs_w else None
        return finish().flatten(0, 1) if finish is not None else None, grad_w, None, None


def _plan(
    swap_first: bool, direction: str, rows: int, weight: Tensor, like: Tensor, group: ProcessGroup, overlap: Overlap
) -> OperatorPlan:
    """Plan one pass. Each rank cuts all rows of its work into chunks, because all of them are its own."""
    outputs, inputs = weight.shape
    operator, sent, other = ("swap_matmul", inputs, outputs) if swap_first else ("matmul_swap", outputs, inputs)
    work = OperatorWork(operator, direction, rows, sent, other, weight.dtype, group_size(group))
    return OperatorPlan.of(group, work, like, overlap, rows)


def _send_columns(plan: OperatorPlan, x_SD: Tensor, b_DN: Tensor) -> Callable[[], Tensor]:
    """Start to send each rank its columns of x @ b. The returned call waits for [W, S, N / W], this rank's columns."""
    world, rank = plan.ring.world, plan.ring.rank
    columns_W = b_DN.unflatten(1, (world, b_DN.shape[1] // world)).unbind(1)
    width = columns_W[rank].shape[1]
    # With several chunks, this rank's own columns are not sent. They are computed during the last transfer.
    peers = plan.ring.scatters[:-1] if len(plan.bounds) > 1 else plan.ring.scatters
    started = []
    for first, end in plan.bounds:
        parts_Wsn = x_SD.new_empty(world, end - first, width)
        for peer in peers:
            row_invariant_mm(x_SD[first:end], columns_W[peer], out=parts_Wsn[peer])
        pending = plan.channel.start_swap(parts_Wsn, plan.description)
        started.append((first, end, pending))
    if len(started) == 1:
        return started[0][2]
    y_WSn = x_SD.new_empty(world, x_SD.shape[0], width)
    row_invariant_mm(x_SD, columns_W[rank], out=y_WSn[rank])

    def finish() -> Tensor:
        for first, end, pending in started:
            parts_Wsn = pending()
            for others in (slice(0, rank), slice(rank + 1, world)):
                y_WSn[others, first:end] = parts_Wsn[others]
        return y_WSn

    return finish


def _exchange_rows(plan: OperatorPlan, x_WSk: Tensor, out_SK: Tensor) -> Iterator[slice]:
    """Start to send each rank its rows of this rank's columns. Yields the row ranges that are complete in ``out_SK``,
    which has the columns of all ranks."""
    started = [
        (slice(first, end), plan.channel.start_swap(x_WSk[:, first:end], plan.description))
        for first, end in plan.bounds
    ]
    out_SWk = out_SK.unflatten(1, (plan.ring.world, x_WSk.shape[2]))

    def received() -> Iterator[slice]:
        for rows, pending in started:
            out_SWk[rows] = pending().movedim(0, 1)
            yield rows

    return received()


class _WeightGradient:
    """Accumulates grad.T @ x: the outputs of the own columns at once, the peers' outputs as rows are received.

    If all rows are added in one call, the gradient of each column range is one GEMM for every number of chunks.
    """

    def __init__(self, plan: OperatorPlan, grad_Tn: Tensor, x_SD: Tensor, grad_SN: Tensor) -> None:
        world, rank, width = plan.ring.world, plan.ring.rank, grad_Tn.shape[1]
        self._x_SD, self._grad_SN = x_SD, grad_SN
        self._peers = [slice(0, rank * width), slice((rank + 1) * width, world * width)]
        self.sum_ND = grad_Tn.new_zeros(world * width, x_SD.shape[1])
        own_Sn = grad_Tn.unflatten(0, (world, x_SD.shape[0]))[rank]
        self._add(slice(rank * width, (rank + 1) * width), own_Sn, x_SD)

    def add(self, rows: slice) -> None:
        """Add rows whose columns have all been received."""
        for columns in self._peers:
            self._add(columns, self._grad_SN[rows, columns], self._x_SD[rows])

    def _add(self, columns: slice, grad_sn: Tensor, x_sD: Tensor) -> None:
        with without_autocast(x_sD):
            self.sum_ND[columns].addmm_(grad_sn.t(), x_sD)


def _check_divides(length: int, group: ProcessGroup | None, subject: str) -> None:
    if length % group_size(group):
        raise InputError(f"{subject.format(length)} do not divide evenly over {group_size(group)} ranks")
