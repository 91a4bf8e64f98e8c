"""Dispatch + grouped GEMM: tokens to the experts' first product (COMET, arXiv 2502.19811, layer 0).

h = dispatch(x) @ w[e].T              expert by expert, on the rank that holds it

forward    rows cross in chunks       products of the own rows, then of each chunk as it arrives
backward   grad @ w[e] of what        while the gradients of a chunk travel, the next are computed; then own rows,
           leaves first               and grad.T @ rows of every expert, whole: one product each

Between CPU ranks that share memory rows are not sent, but written and read in place (``shared_experts.py``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.dispatch.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.shared_memory import SharedMemoryDispatcher
from moe_comm.kernels.expert_mm import align, expert_mm
from moe_comm.kernels.wanted import wanted_gradients
from moe_comm.overlap.chunked import Overlap
from moe_comm.overlap.crossing import Piece
from moe_comm.overlap.expert_products import ExpertGradients, grouped_linear, grouped_mm, weights_fault
from moe_comm.overlap.fused_experts import fused_choice, fused_dispatch, fused_fault
from moe_comm.overlap.passage import Homeward, Outward, Passage, follow, lead
from moe_comm.overlap.shared_experts import shared_dispatch
from moe_comm.overlap.shared_passage import SharedPassage
from moe_comm.runtime.memory import warm_rows


def dispatch_matmul(
    dispatcher: AllToAllDispatcher | SharedMemoryDispatcher,
    x_TD: Tensor,
    ids_TK: Tensor,
    w_EGD: Tensor,
    overlap: Overlap | None = None,
    *,
    label: str = "",
) -> tuple[Tensor, Passage | SharedPassage]:
    """Send each token to its K experts and multiply it there with the expert's weights. Collective.

    Args:
        dispatcher: ``all_to_all``, whose rows cross in chunks, or ``shared_memory``, whose rows are written and read in
            place; chunks are groups of peers then.
        x_TD: [T, D] as ``Dispatcher.dispatch`` takes it. ids_TK: [T, K] global expert ids; -1 drops the slot.
        w_EGD: [E, G, D] of this rank's experts, of the same dtype.
        overlap: backend and chunks; the result has the same bits for every number of them, and so have the gradients;
            Triton's kernels have their own. One chunk is one step after the other.
        label: name of the layer, for error messages.

    Returns:
        h_RG: [R, G] for the rows of this rank's experts, by (expert, source rank, token, slot).
        passage: what ``matmul_combine`` needs to bring them back; ``passage.layout`` is the layout.

    Raises:
        ConfigError: a dispatcher that does not overlap. With MissingDependency: Triton is asked for and cannot run
            here; the message says what to do.
        InputError, RoutingError, RankMismatch: on every rank, before rows move.
        PeerDied, PeerTimeout: a rank is gone, or did not call in time.
    """
    overlap, width = overlap or Overlap(), w_EGD.shape[1]
    if isinstance(dispatcher, SharedMemoryDispatcher):
        return shared_dispatch(dispatcher, x_TD, ids_TK, w_EGD, overlap, label)
    fault = weights_fault(dispatcher, w_EGD, x_TD, "dispatch_matmul") or fused_fault(dispatcher, x_TD, overlap)
    if fault is not None:
        dispatcher.refuse(fault, x_TD, label=label)
    passage = Passage.open(dispatcher, x_TD, ids_TK, overlap, width=width, label=label)
    if (choice := fused_choice(passage, "dispatch_matmul", width)) is not None:
        return fused_dispatch(passage, x_TD, ids_TK, w_EGD, choice)
    forward, backward = passage.each_way("dispatch_matmul", width)
    if forward.chunks == backward.chunks == 1:
        rows_RD = passage.dispatch_at_once(x_TD).rows_RD
        return grouped_linear(rows_RD, passage.layout.rows_per_expert, w_EGD), passage
    return _DispatchMatmul.apply(x_TD, w_EGD, forward, backward), passage


def reference(dispatcher: Dispatcher, x_TD: Tensor, ids_TK: Tensor, w_EGD: Tensor, *, label: str = "") -> Tensor:
    """The forward pass one step after the other: the bits that ``dispatch_matmul`` must give."""
    dispatched = dispatcher.dispatch(x_TD, ids_TK, label=label)
    return grouped_mm(dispatched.rows_RD, dispatched.layout.rows_per_expert, w_EGD)


class _DispatchMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_EGD: Tensor, passage: Passage, backward: Passage) -> Tensor:
        ctx.passage = backward
        if passage.chunks == 1:
            rows_RD = passage.dispatch_at_once(x_TD).rows_RD
            ctx.save_for_backward(rows_RD, w_EGD)
            return grouped_mm(rows_RD, passage.layout.rows_per_expert, w_EGD)
        rows = partial(warm_rows, dtype=x_TD.dtype, device=x_TD.device)
        outward = Outward(passage, x_TD, passage.opening, lambda num: rows(num, x_TD.shape[1]))
        h_RG = rows(passage.layout.num_rows, w_EGD.shape[1])
        aligned, aligned_w = align(outward.rows_RD), align(w_EGD)

        def compute(piece: Piece) -> None:
            w = aligned_w(w_EGD[piece.expert])
            expert_mm(aligned(outward.rows_RD[piece.rows]), w.t(), h_RG[piece.rows])

        follow(outward, passage.crossing, compute, lambda chunk: None)
        passage.check(outward.rows_RD)
        ctx.save_for_backward(outward.rows_RD, w_EGD)
        return h_RG

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RG: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, w_EGD = ctx.saved_tensors
        passage: Passage = ctx.passage
        needs_x, needs_w = wanted_gradients(ctx)[:2]
        grad_RG = grad_RG.contiguous()
        homeward = grad_x = None
        if needs_x and passage.chunks == 1:
            grad_rows_RD = grouped_mm(grad_RG, passage.layout.rows_per_expert, w_EGD.transpose(1, 2))
            grad_x = passage.sum_at_once(grad_rows_RD, None, passage.header("dispatch backward"))
        elif needs_x:
            grad_rows_RD = warm_rows(rows_RD.shape[0], rows_RD.shape[1], rows_RD.dtype, rows_RD.device)
            homeward = Homeward(passage, grad_rows_RD, passage.begin("dispatch backward"))
            aligned, aligned_w = align(grad_RG), align(w_EGD)

            def compute(piece: Piece) -> None:
                expert_mm(aligned(grad_RG[piece.rows]), aligned_w(w_EGD[piece.expert]), grad_rows_RD[piece.rows])

            lead(passage.crossing, compute, homeward.start)
        grad_w = None
        if needs_w:
            grad_w = ExpertGradients(passage.layout.rows_per_expert, grad_RG, rows_RD, w_EGD).at_once()
        return grad_x if homeward is None else homeward.summed(None), grad_w, None, None
