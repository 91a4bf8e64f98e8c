"""``dispatch_matmul`` and ``matmul_combine`` between CPU ranks that share memory: forward and backward, read in place.

As their forms over a network, but for how rows move (``shared_passage.py``), and for the gradient of the routing
weights, which the tokens' ranks compute from the results that they read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.dispatch.shared_memory import SharedMemoryDispatcher
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.kernels.expert_mm import align, expert_mm
from moe_comm.kernels.wanted import wanted_gradients
from moe_comm.overlap.chunked import Overlap
from moe_comm.overlap.crossing import Piece
from moe_comm.overlap.expert_products import ExpertGradients, grouped_linear, weights_fault
from moe_comm.overlap.shared_passage import SharedHomeward, SharedOutward, SharedPassage
from moe_comm.overlap.store import TRITON
from moe_comm.runtime.memory import warm_rows


def shared_dispatch(
    dispatcher: SharedMemoryDispatcher, x_TD: Tensor, ids_TK: Tensor, w_EGD: Tensor, overlap: Overlap, label: str
) -> tuple[Tensor, SharedPassage]:
    """``dispatch_matmul``; what it raises, too."""
    fault: MoeCommError | None = weights_fault(dispatcher, w_EGD, x_TD, "dispatch_matmul")
    if overlap.backend == TRITON:
        fault = fault or ConfigError("Triton's kernels move rows between GPUs; shared_memory is for ranks on the CPU")
    if fault is not None:
        dispatcher.refuse(fault, x_TD, label=label)
    passage, arriving = SharedPassage.open(dispatcher, x_TD, ids_TK, overlap, label=label)
    if passage.chunks == 1:
        return grouped_linear(arriving.whole(x_TD).rows_RD, passage.layout.rows_per_expert, w_EGD), passage
    return _SharedDispatch.apply(x_TD, w_EGD, passage, arriving), passage


def shared_combine(rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor, passage: SharedPassage) -> Tensor:
    """``matmul_combine``, whose input has been checked."""
    if passage.chunks == 1:
        results_RD = grouped_linear(rows_RF, passage.layout.rows_per_expert, w_EDF)
        return passage.dispatcher.combine(results_RD, weights_TK, passage.layout)
    # As ``Dispatcher.combine`` says it, which another rank may be in.
    grad = torch.is_grad_enabled() and (rows_RF.requires_grad or w_EDF.requires_grad or weights_TK.requires_grad)
    return _SharedCombine.apply(rows_RF, w_EDF, weights_TK, passage, grad)  # type: ignore[no-any-return]


class _SharedDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_EGD: Tensor, passage: SharedPassage, arriving: SharedOutward) -> Tensor:
        rows_RD = arriving.rows_RD
        with arriving:
            h_RG = warm_rows(rows_RD.shape[0], w_EGD.shape[1], rows_RD.dtype, rows_RD.device)
            aligned, aligned_w = align(rows_RD), align(w_EGD)

            def compute(piece: Piece) -> None:
                w = aligned_w(w_EGD[piece.expert])
                expert_mm(aligned(rows_RD[piece.rows]), w.t(), h_RG[piece.rows])

            arriving.follow(compute)
        ctx.save_for_backward(rows_RD, w_EGD)
        ctx.passage = passage
        return h_RG

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RG: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, w_EGD = ctx.saved_tensors
        needs_x, needs_w = wanted_gradients(ctx)[:2]
        grad_RG = grad_RG.contiguous()
        weight = None
        if needs_w:
            weight = ExpertGradients(ctx.passage.layout.rows_per_expert, grad_RG, rows_RD, w_EGD)
            weight.all_there()
        grad_TD = _rows_gradient(ctx.passage, grad_RG, w_EGD, weight) if needs_x else None
        return grad_TD, None if weight is None else weight.result(), None, None


def _rows_gradient(passage: SharedPassage, grad_RG: Tensor, w_EGD: Tensor, weight: ExpertGradients | None) -> Tensor:
    """[T, D]; ``weight`` fills the waits."""
    with SharedHomeward(passage, "dispatch backward", False) as home:
        aligned, aligned_w = align(grad_RG), align(w_EGD)

        def compute(piece: Piece) -> None:
            expert_mm(aligned(grad_RG[piece.rows]), aligned_w(w_EGD[piece.expert]), home.rows_RD[piece.rows])

        home.lead(compute)
        while weight is not None and not home.ready() and weight.one():
            pass
        grad_TD = home.summed(None)
        if weight is not None:
            weight.result()  # peers may still be reading this rank's rows
        return grad_TD


class _SharedCombine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor, passage: SharedPassage, grad: bool
    ) -> Tensor:
        wants_weights = ctx.needs_input_grad[2]
        wide_TK, rows_RF = weights_TK.to(passage.wide), rows_RF.contiguous()
        with SharedHomeward(passage, "combine", grad) as home:
            results_RD = home.rows_RD
            aligned, aligned_w = align(rows_RF), align(w_EDF)

            def compute(piece: Piece) -> None:
                w = aligned_w(w_EDF[piece.expert])
                expert_mm(aligned(rows_RF[piece.rows]), w.t(), results_RD[piece.rows])

            home.lead(compute)
            y_TD = home.summed(wide_TK)
        # Peers read the results again in backward, in place.
        ctx.save_for_backward(rows_RF, w_EDF, wide_TK, results_RD if wants_weights else None)
        ctx.passage, ctx.weights_dtype = passage, weights_TK.dtype
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RF, w_EDF, wide_TK, results_RD = ctx.saved_tensors
        passage: SharedPassage = ctx.passage
        needs_rows, needs_w = wanted_gradients(ctx)[:2]
        arriving, grad_TK = SharedOutward.gradients(passage, grad_TD, wide_TK, results_RD)
        with arriving:
            grad_RD = arriving.rows_RD
            grad_rows_RF = torch.empty_like(rows_RF)
            weight = ExpertGradients(passage.layout.rows_per_expert, grad_RD, rows_RF, w_EDF) if needs_w else None
            aligned, aligned_w = align(grad_RD), align(w_EDF)

            def compute(piece: Piece) -> None:
                if needs_rows:
                    expert_mm(aligned(grad_RD[piece.rows]), aligned_w(w_EDF[piece.expert]), grad_rows_RF[piece.rows])
                if weight is not None:
                    weight.computed(piece)

            arriving.follow(compute, (lambda: False) if weight is None else weight.one)
            grad_w = None if weight is None else weight.result()
        grad_weights = None if grad_TK is None else grad_TK.to(ctx.weights_dtype)
        return grad_rows_RF if needs_rows else None, grad_w, grad_weights, None, None
