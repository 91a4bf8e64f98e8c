"""``dispatch_matmul`` and ``matmul_combine`` as fused Triton kernels: checks, memory, launches, gradients.

As the operators of the same names in ``overlap/``, with one kernel for each direction:

    dispatch_matmul    forward   dispatch_matmul_kernel     h = arriving rows @ w[e].T
                       backward  matmul_combine_kernel      grad_x = sum of K of (grad_h @ w[e]), without weights
    matmul_combine     forward   matmul_combine_kernel      y = weighted sum of K of (rows @ w[e].T)
                       backward  dispatch_matmul_kernel     grad_rows = (arriving grad_y * weight) @ w[e]

Gradients of weights are plain products, one an expert; those of the routing weights are dot products where the results
are, sent home as one number a row. Nothing depends on the number of programs, nor on relaying: the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.comm.header import COLLECTIVE, OPS
from moe_comm.dispatch import plain
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher, Routes
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import ConfigError, InputError, MoeCommError
from moe_comm.kernels.needed_grads import wanted_gradients
from moe_comm.kernels.row_invariant import product_into
from moe_comm.kernels.triton.interpreter import INTERPRETING
from moe_comm.overlap.checks import combine_fault, weights_fault
from moe_comm.overlap.ring import Ring
from moe_comm.overlap.triton.launch import TritonPassage, run_combine, run_dispatch
from moe_comm.overlap.triton.memory import NOT_INTERPRETED
from moe_comm.overlap.triton.programs import DTYPES
from moe_comm.overlap.triton.routes import Places
from moe_comm.overlap.triton.tiling import ExpertTiling


def dispatch_matmul(
    dispatcher: AllToAllDispatcher,
    x_TD: Tensor,
    ids_TK: Tensor,
    w_EGD: Tensor,
    tiling: ExpertTiling | None = None,
    *,
    label: str = "",
) -> tuple[Tensor, TritonPassage]:
    """As ``overlap.dispatch_matmul``, in one kernel. Collective; differentiable once.

    Args:
        x_TD: [T, D] fp32, bf16 or fp16. ids_TK: [T, K] global expert ids; -1 drops the slot.
        w_EGD: [E, G, D] of this rank's experts, of the same dtype; any strides.

    Returns:
        h_RG: [R, G] for the rows of this rank's experts, by (expert, source rank, token, slot).
        passage: what ``matmul_combine`` needs.

    Raises:
        InputError, RoutingError, RankMismatch: on every rank, before rows move.
        PeerDied, PeerTimeout: a rank is gone, or a flag of it did not rise in time.
    """
    tiling = tiling or ExpertTiling.of(x_TD.dtype)
    label = f"{label} {tiling}".strip()
    fault = kernels_fault(dispatcher, x_TD.dtype, x_TD.device) or weights_fault(
        dispatcher, w_EGD, x_TD, "dispatch_matmul"
    )
    if fault is not None:
        dispatcher.refuse(fault, x_TD, label=label)
    handle = dispatcher.agree(x_TD, ids_TK, dispatcher.dispatch_header(x_TD, ids_TK, label))
    passage = _opened(dispatcher, handle, ids_TK, tiling)
    return dispatched(passage, x_TD, w_EGD), passage


def kernels_fault(dispatcher: Dispatcher, dtype: torch.dtype, device: torch.device) -> MoeCommError | None:
    """Why the kernels cannot take rows of ``dtype`` on ``device``."""
    if device.type == "cpu" and not INTERPRETING:
        return ConfigError(NOT_INTERPRETED)
    if dtype not in DTYPES:
        return InputError(f"the Triton kernels take float32, bfloat16 and float16; got {dtype}")
    wire_dtypes = dispatcher.options.wire_dtypes
    if any(wire_dtypes.of(op).narrows(dtype) for op in OPS if op != COLLECTIVE):
        return ConfigError(
            "the Triton kernels move rows as they are; use DispatchOptions without payloads, or the chunked operators"
        )
    return None


def opened(
    dispatcher: AllToAllDispatcher, handle: DispatchHandle, ids_TK: Tensor, programs: int | None
) -> TritonPassage:
    """Where the rows of a dispatch go that ranks have agreed on. programs: that communicate; None: a share of all."""
    return _opened(dispatcher, handle, ids_TK, replace(ExpertTiling.of(handle.dtype), communicators=programs))


def dispatched(passage: TritonPassage, x_TD: Tensor, w_EGD: Tensor) -> Tensor:
    """``dispatch_matmul`` of what was agreed on: h [R, G]."""
    return _DispatchMatmul.apply(x_TD, w_EGD, passage)  # type: ignore[no-any-return]


def _opened(
    dispatcher: AllToAllDispatcher, handle: DispatchHandle, ids_TK: Tensor, tiling: ExpertTiling
) -> TritonPassage:
    places = Places.of(ids_TK, handle.state, dispatcher.placement, Ring(dispatcher.rank, dispatcher.world))
    relayed_WW = None
    if tiling.relay:
        told = dispatcher.channel.all_gather(places.relayed(), f"{handle.label}: rows to relay")
        relayed_WW = told.cpu().numpy().astype(np.int64)
    return TritonPassage(dispatcher, handle, places, tiling, relayed_WW)


def matmul_combine(rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor, passage: TritonPassage) -> Tensor:
    """As ``overlap.matmul_combine``, in one kernel. Collective; differentiable once.

    Args:
        rows_RF: [R, F] of this rank's experts, as ``dispatch_matmul`` gave them.
        w_EDF: [E, D, F] of the same dtype; D is the width of the rows that were dispatched.
        weights_TK: [T, K] routing weights.

    Returns:
        y_TD: [T, D]; the bits of ``plain.weighted_sum`` of the kernel's products.

    Raises:
        InputError: something does not fit; on every rank if the dispatcher is checked.
        PeerDied, PeerTimeout: a rank is gone, or a flag of it did not rise in time.
    """
    fault = combine_fault(passage.dispatcher, passage.handle, rows_RF, w_EDF, weights_TK)
    passage.begin("combine", fault)
    return _MatmulCombine.apply(rows_RF, w_EDF, weights_TK, passage)  # type: ignore[no-any-return]


class _DispatchMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_EGD: Tensor, passage: TritonPassage) -> Tensor:
        arrived = run_dispatch(passage, x_TD, None, w_EGD)
        ctx.passage = passage
        # The rows lie in symmetric memory, which the next turns overwrite.
        ctx.save_for_backward(w_EGD, arrived.rows_RD.clone() if ctx.needs_input_grad[1] else None)
        return arrived.h_RG

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RG: Tensor) -> tuple[Tensor | None, ...]:
        w_EGD, rows_RD = ctx.saved_tensors
        passage: TritonPassage = ctx.passage
        needs_x, needs_w = wanted_gradients(ctx)[:2]
        grad_RG, grad_x = grad_RG.contiguous(), None
        if needs_x:
            passage.begin("dispatch backward")
            grad_x, _ = run_combine(passage, grad_RG, w_EGD.transpose(1, 2), None)
        return grad_x, _weight_gradient(passage, grad_RG, rows_RD, w_EGD) if needs_w else None, None


class _MatmulCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor, passage: TritonPassage) -> Tensor:
        rows_RF = rows_RF.contiguous()
        wide_TK = weights_TK.float().contiguous()
        y_TD, results_RD = run_combine(passage, rows_RF, w_EDF, wide_TK)
        ctx.save_for_backward(rows_RF, w_EDF, wide_TK, results_RD.clone() if ctx.needs_input_grad[2] else None)
        ctx.passage, ctx.weights_dtype = passage, weights_TK.dtype
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RF, w_EDF, wide_TK, results_RD = ctx.saved_tensors
        passage: TritonPassage = ctx.passage
        needs_rows, needs_w, needs_weights = wanted_gradients(ctx)[:3]
        passage.begin("combine backward")
        arrived = run_dispatch(passage, grad_TD, wide_TK, w_EDF.transpose(1, 2))
        grad_w = grad_TK = None
        if needs_w:
            scaled_RD = plain.scale(arrived.rows_RD, arrived.scale_R)
            grad_w = _weight_gradient(passage, scaled_RD, rows_RF, w_EDF)
        if needs_weights:
            grad_TK = _to_slots(passage, plain.lane_dot(arrived.rows_RD, results_RD)).to(ctx.weights_dtype)
        return arrived.h_RG if needs_rows else None, grad_w, grad_TK, None


def _weight_gradient(passage: TritonPassage, grad_RG: Tensor, rows_RD: Tensor, like_EGD: Tensor) -> Tensor:
    """[E, G, D] = grad.T @ rows, expert by expert; zeros for an expert without rows."""
    found = torch.zeros_like(like_EGD, memory_format=torch.contiguous_format)
    counts = passage.handle.rows_per_expert
    with torch.autocast(grad_RG.device.type, enabled=False):
        for grad, rows, into in zip(grad_RG.split(counts), rows_RD.split(counts), found, strict=True):
            if grad.shape[0]:
                product_into(grad.t(), rows, into)
    return found


def _to_slots(passage: TritonPassage, values_R: Tensor) -> Tensor:
    """One number a row back to its slot, [T, K] there; 0 where a slot was dropped."""
    routes: Routes = passage.handle.state
    leaving = values_R if routes.by_source_R is None else values_R[routes.by_source_R]
    description = f"{passage.handle.label}: gradients of routing weights"
    values_S = passage.dispatcher.channel.all_to_all(leaving, routes.receive, routes.send, description)
    flat = values_S.new_zeros(passage.places.place_TK.numel())
    flat[routes.slot_S] = values_S
    return flat.view(passage.places.place_TK.shape)
