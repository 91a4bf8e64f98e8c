"""``dispatch_matmul`` and ``matmul_combine`` as fused Triton kernels: checks, memory, launches, gradients.

The contracts are those of the operators in ``overlap/``. Each direction is one kernel:

    dispatch_matmul    forward   dispatch_matmul_kernel     h = received rows @ w[e].T
                       backward  matmul_combine_kernel      grad_x = sum of K of (grad_h @ w[e]), without weights
    matmul_combine     forward   matmul_combine_kernel      y = weighted sum of K of (rows @ w[e].T)
                       backward  dispatch_matmul_kernel     grad_rows = (received grad_y * weight) @ w[e]

Weight gradients of 16-bit experts are one kernel (``kernels/triton/grouped_mm.py``), those of fp32 experts one GEMM
each. Gradients of the routing weights are dot products on the expert's rank, returned as one number per row. The bits
do not depend on the number of programs or on relaying.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.dispatch import plain
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher, Routes
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.dispatch_spans import KINDS
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.kernels.needed_grads import needed_gradients
from moe_comm.kernels.row_invariant import product_into
from moe_comm.kernels.triton.main_grad import weight_grad
from moe_comm.overlap.checks import combine_fault, weights_fault
from moe_comm.overlap.ring import Ring
from moe_comm.overlap.triton.arrived_mm import rows_fault
from moe_comm.overlap.triton.launch import TritonDispatch, run_combine, run_dispatch
from moe_comm.overlap.triton.routes import RowPositions
from moe_comm.overlap.triton.tiling import ExpertTiling


def dispatch_matmul(
    dispatcher: AllToAllDispatcher,
    x_TD: Tensor,
    ids_TK: Tensor,
    w_EGD: Tensor,
    tiling: ExpertTiling | None = None,
    *,
    label: str = "",
) -> tuple[Tensor, TritonDispatch]:
    """Run ``overlap.dispatch_matmul`` in one kernel, with its arguments and errors. Collective; differentiable once.

    Args:
        tiling: How the kernels split their work; None: the default for the dtype.
    """
    tiling = tiling or ExpertTiling.of(x_TD.dtype)
    label = f"{label} {tiling}".strip()
    fault = kernels_fault(dispatcher, x_TD.dtype, x_TD.device) or weights_fault(
        dispatcher, w_EGD, x_TD, "dispatch_matmul"
    )
    if fault is not None:
        dispatcher.refuse(fault, x_TD, label=label)
    handle = dispatcher.prepare_dispatch(x_TD, ids_TK, dispatcher.dispatch_header(x_TD, ids_TK, label))
    dispatch = _open(dispatcher, handle, ids_TK, tiling)
    return multiply_dispatched(dispatch, x_TD, w_EGD), dispatch


def kernels_fault(dispatcher: Dispatcher, dtype: torch.dtype, device: torch.device) -> MoeCommError | None:
    """Return the error if the kernels do not support rows of ``dtype`` on ``device``, else None."""
    if (fault := rows_fault(dtype, device)) is not None:
        return fault
    wire_dtypes = dispatcher.options.wire_dtypes
    if any(wire_dtypes.of(op).narrows(dtype) for op in KINDS):
        return ConfigError(
            "the Triton kernels send rows in their own dtype; use DispatchOptions without wire_dtypes, or "
            "Overlap(backend='chunked')"
        )
    return None


def open_dispatch(
    dispatcher: AllToAllDispatcher, handle: DispatchHandle, ids_TK: Tensor, programs: int | None
) -> TritonDispatch:
    """Prepare a dispatch after the handshake. programs: number of programs that communicate; None: the default."""
    return _open(dispatcher, handle, ids_TK, replace(ExpertTiling.of(handle.dtype), communicators=programs))


def multiply_dispatched(dispatch: TritonDispatch, x_TD: Tensor, w_EGD: Tensor) -> Tensor:
    """Run ``dispatch_matmul`` after the handshake; returns h [R, G]."""
    return _DispatchMatmul.apply(x_TD, w_EGD, dispatch)  # type: ignore[no-any-return]


def _open(
    dispatcher: AllToAllDispatcher, handle: DispatchHandle, ids_TK: Tensor, tiling: ExpertTiling
) -> TritonDispatch:
    positions = RowPositions.of(ids_TK, handle.state, dispatcher.placement, Ring(dispatcher.rank, dispatcher.world))
    relayed_WW = None
    if tiling.relay:
        counts_WW = dispatcher.channel.all_gather(positions.relayed_rows(), f"{handle.label}: rows to relay")
        relayed_WW = counts_WW.cpu().numpy().astype(np.int64)
    return TritonDispatch(dispatcher, handle, positions, tiling, relayed_WW)


def matmul_combine(rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor, dispatch: TritonDispatch) -> Tensor:
    """Run ``overlap.matmul_combine`` in one kernel, with its arguments and errors. Collective; differentiable once.

    Returns:
        y_TD: [T, D], with the bits of ``plain.weighted_sum`` of the kernel's products.
    """
    fault = combine_fault(dispatch.dispatcher, dispatch.handle, rows_RF, w_EDF, weights_TK)
    dispatch.handshake("combine", fault)
    return _MatmulCombine.apply(rows_RF, w_EDF, weights_TK, dispatch)  # type: ignore[no-any-return]


class _DispatchMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_EGD: Tensor, dispatch: TritonDispatch) -> Tensor:
        result = run_dispatch(dispatch, x_TD, None, w_EGD)
        ctx.dispatch = dispatch
        # Later calls overwrite the rows, which are in symmetric memory.
        ctx.save_for_backward(w_EGD, result.rows_RD.clone() if ctx.needs_input_grad[1] else None)
        return result.h_RG

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RG: Tensor) -> tuple[Tensor | None, ...]:
        w_EGD, rows_RD = ctx.saved_tensors
        dispatch: TritonDispatch = ctx.dispatch
        needs_x, needs_w = needed_gradients(ctx)[:2]
        grad_RG, grad_x = grad_RG.contiguous(), None
        if needs_x:
            dispatch.handshake("dispatch backward")
            grad_x, _ = run_combine(dispatch, grad_RG, w_EGD.transpose(1, 2), None)
        return grad_x, _weight_gradient(dispatch, grad_RG, rows_RD, w_EGD) if needs_w else None, None


class _MatmulCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor, dispatch: TritonDispatch) -> Tensor:
        rows_RF = rows_RF.contiguous()
        wide_TK = weights_TK.float().contiguous()
        y_TD, results_RD = run_combine(dispatch, rows_RF, w_EDF, wide_TK)
        ctx.save_for_backward(rows_RF, w_EDF, wide_TK, results_RD.clone() if ctx.needs_input_grad[2] else None)
        ctx.dispatch, ctx.weights_dtype = dispatch, weights_TK.dtype
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RF, w_EDF, wide_TK, results_RD = ctx.saved_tensors
        dispatch: TritonDispatch = ctx.dispatch
        needs_rows, needs_w, needs_weights = needed_gradients(ctx)[:3]
        dispatch.handshake("combine backward")
        result = run_dispatch(dispatch, grad_TD, wide_TK, w_EDF.transpose(1, 2))
        grad_w = grad_TK = None
        if needs_w:
            scaled_RD = plain.scale(result.rows_RD, result.scale_R)
            grad_w = _weight_gradient(dispatch, scaled_RD, rows_RF, w_EDF)
        if needs_weights:
            grad_TK = _to_slots(dispatch, plain.lane_dot(result.rows_RD, results_RD)).to(ctx.weights_dtype)
        return result.h_RG if needs_rows else None, grad_w, grad_TK, None


def _weight_gradient(dispatch: TritonDispatch, grad_RG: Tensor, rows_RD: Tensor, w_EGD: Tensor) -> Tensor | None:
    """Return the gradient of the weights, grad.T @ rows by expert; zeros for an expert without rows.

    In 16 bits it is one kernel, which adds to ``main_grad`` of the weights if they have one (``weight_grad``).
    """
    counts = dispatch.handle.rows_per_expert
    if grad_RG.dtype != torch.float32:
        counts_E = torch.tensor(counts, dtype=torch.int64).to(grad_RG.device, non_blocking=True)
        return weight_grad(w_EGD, grad_RG, rows_RD, counts_E)
    grad_EGD = torch.zeros_like(w_EGD, memory_format=torch.contiguous_format)
    with torch.autocast(grad_RG.device.type, enabled=False):
        for grad, rows, out in zip(grad_RG.split(counts), rows_RD.split(counts), grad_EGD, strict=True):
            if grad.shape[0]:
                product_into(grad.t(), rows, out)
    return grad_EGD


def _to_slots(dispatch: TritonDispatch, values_R: Tensor) -> Tensor:
    """Return one number per row to its slot, as [T, K]; 0 for dropped slots."""
    routes: Routes = dispatch.handle.state
    sent_R = values_R if routes.by_source_R is None else values_R[routes.by_source_R]
    description = f"{dispatch.handle.label}: gradients of routing weights"
    values_S = dispatch.dispatcher.channel.all_to_all(sent_R, routes.receive, routes.send, description)
    flat = values_S.new_zeros(dispatch.positions.place_TK.numel())
    flat[routes.slot_S] = values_S
    return flat.view(dispatch.positions.place_TK.shape)
