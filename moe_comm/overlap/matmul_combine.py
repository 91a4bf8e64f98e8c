"""Grouped GEMM + combine: the experts' last product, and its results back to their tokens (COMET, layer 1).

y = sum over k of weights[t, k] * (rows @ w[e].T)        at the rank of token t

forward    rows that leave first       while the results of a chunk travel, the next are computed; own rows last
backward   gradients cross in chunks   own rows, then each chunk as it arrives: its products with w[e], and with the
                                       results, which are the gradient of the weights; grad.T @ rows fills the waits

COMET cuts the columns, so that the first sums of a token can be taken, and sent, after one slice of all its experts.
Here the rows themselves go back, which keeps the bits at every number of ranks, and they can go as soon as they are
computed, expert after expert, with whole products. Between CPU ranks that share memory they are read where they stand
(``shared_experts.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.comm.channel import Coming
from moe_comm.comm.header import describe
from moe_comm.dispatch.sums import scale_
from moe_comm.dispatch.types import Layout
from moe_comm.kernels.expert_mm import align, expert_mm
from moe_comm.kernels.wanted import wanted_gradients
from moe_comm.overlap.crossing import Piece
from moe_comm.overlap.expert_products import ExpertGradients, combine_fault, grouped_linear, grouped_mm
from moe_comm.overlap.fused_experts import fused_combine
from moe_comm.overlap.passage import Homeward, Outward, Passage, follow, lead
from moe_comm.overlap.shared_experts import shared_combine
from moe_comm.overlap.shared_passage import SharedPassage
from moe_comm.runtime.memory import warm_rows


def matmul_combine(rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor, passage: Passage | SharedPassage) -> Tensor:
    """[T, D] the weighted sum of each token's experts. Collective; differentiable once.

    Args:
        rows_RF: [R, F] of this rank's experts, as ``dispatch_matmul`` gave them.
        w_EDF: [E, D, F] of the same dtype; D is the width of the rows that were dispatched.
        weights_TK: [T, K] routing weights.
        passage: what ``dispatch_matmul`` returned.

    Raises:
        InputError: something does not fit; on every rank if the dispatcher is checked.
        RankMismatch: ranks differ in what they do, or in whether weights need a gradient; if it is checked.
        PeerDied, PeerTimeout: a rank is gone, or did not call in time.
    """
    layout = passage.layout
    fault = combine_fault(passage.dispatcher, layout, rows_RF, w_EDF, weights_TK)
    if fault is not None:
        passage.refuse("combine", fault)
    if isinstance(passage, SharedPassage):
        return shared_combine(rows_RF, w_EDF, weights_TK, passage)
    if passage.fused is not None:
        return fused_combine(passage, rows_RF, w_EDF, weights_TK)
    forward, backward = passage.each_way("matmul_combine", rows_RF.shape[1])
    if forward.chunks == backward.chunks == 1:
        results_RD = grouped_linear(rows_RF, layout.rows_per_expert, w_EDF)
        return passage.dispatcher.combine(results_RD, weights_TK, layout)
    return _MatmulCombine.apply(rows_RF, w_EDF, weights_TK, forward, backward)  # type: ignore[no-any-return]


def reference(rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor, passage: Passage | SharedPassage) -> Tensor:
    """The forward pass one step after the other: the bits that ``matmul_combine`` must give."""
    layout: Layout = passage.layout
    return passage.dispatcher.combine(grouped_mm(rows_RF, layout.rows_per_expert, w_EDF), weights_TK, layout)


class _MatmulCombine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor, passage: Passage, backward: Passage
    ) -> Tensor:
        wide_TK, rows_RF, needs_dots = weights_TK.to(passage.wide), rows_RF.contiguous(), ctx.needs_input_grad[2]
        ctx.passage, ctx.weights_dtype = backward, weights_TK.dtype
        if passage.chunks == 1:
            results_RD = grouped_mm(rows_RF, passage.layout.rows_per_expert, w_EDF)
            ctx.save_for_backward(rows_RF, w_EDF, wide_TK, results_RD if needs_dots else None)
            return passage.sum_at_once(results_RD, wide_TK, passage.header("combine", needs_dots))
        results_RD = warm_rows(rows_RF.shape[0], w_EDF.shape[1], rows_RF.dtype, rows_RF.device)
        homeward = Homeward(passage, results_RD, passage.begin("combine", needs_dots))
        aligned, aligned_w = align(rows_RF), align(w_EDF)

        def compute(piece: Piece) -> None:
            w = aligned_w(w_EDF[piece.expert])
            expert_mm(aligned(rows_RF[piece.rows]), w.t(), results_RD[piece.rows])

        lead(passage.crossing, compute, homeward.start)
        ctx.save_for_backward(rows_RF, w_EDF, wide_TK, results_RD if needs_dots else None)
        return homeward.summed(wide_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RF, w_EDF, wide_TK, results_RD = ctx.saved_tensors
        passage: Passage = ctx.passage
        needs_rows, needs_w = wanted_gradients(ctx)[:2]
        if passage.chunks == 1:
            header = passage.header("combine backward", results_RD is not None)
            grad_RD, grad_TK = passage.spread_at_once(grad_TD, results_RD, wide_TK, header)
            sizes = passage.layout.rows_per_expert
            grad_rows_RF = grouped_mm(grad_RD, sizes, w_EDF.transpose(1, 2)) if needs_rows else None
            grad_w = ExpertGradients(sizes, grad_RD, rows_RF, w_EDF).at_once() if needs_w else None
            grad_TK = None if grad_TK is None else grad_TK.to(ctx.weights_dtype)
            return grad_rows_RF, grad_w, grad_TK, None, None
        arriving = Gradients(passage, grad_TD, wide_TK, results_RD is not None)
        grad_rows_RF = torch.empty_like(rows_RF)
        weight = ExpertGradients(passage.layout.rows_per_expert, arriving.rows_RD, rows_RF, w_EDF) if needs_w else None
        aligned, aligned_w = align(arriving.rows_RD), align(w_EDF)

        def compute(piece: Piece) -> None:
            grad = arriving.scaled(piece, results_RD)
            if needs_rows:
                expert_mm(aligned(grad), aligned_w(w_EDF[piece.expert]), grad_rows_RF[piece.rows])
            if weight is not None:
                weight.computed(piece)

        spare = (lambda: False) if weight is None else weight.one
        follow(arriving, passage.crossing, compute, lambda chunk: None, spare)
        dots = arriving.start_dots(results_RD)
        grad_w = None if weight is None else weight.result()
        grad_TK = None if dots is None else dots().to(ctx.weights_dtype)
        return grad_rows_RF if needs_rows else None, grad_w, grad_TK, None, None


class Gradients(Outward):
    """Gradients of tokens on their way to the experts, where they are multiplied with the routing weights."""

    def __init__(self, passage: Passage, grad_TD: Tensor, weights_TK: Tensor, weights_grad: bool) -> None:
        header = passage.begin("combine backward", weights_grad)
        self._passage, self._doing = passage, f"{describe(header)}, routing weights"
        self._scales = passage.start_out(weights_TK.reshape(-1)[passage.routes.slot_S], self._doing)
        self._weights_R: Tensor | None = None
        self._dots_R: Tensor | None = None
        super().__init__(
            passage, grad_TD, header, lambda num: warm_rows(num, grad_TD.shape[1], grad_TD.dtype, grad_TD.device)
        )

    def scaled(self, piece: Piece, results_RD: Tensor | None) -> Tensor:
        """The gradients of rows that have landed, times their weights; in place, and so once for each row.

        Args:
            results_RD: of the experts, for the gradient of the routing weights; None: it is not wanted.
        """
        grad = self.rows_RD[piece.rows]
        dots = scale_(grad, self._weights_at(piece.rows), None if results_RD is None else results_RD[piece.rows])
        if dots is not None:
            if self._dots_R is None:
                self._dots_R = dots.new_empty(self.rows_RD.shape[0])
            self._dots_R[piece.rows] = dots
        return grad

    def _weights_at(self, rows: slice) -> Tensor:
        if self._weights_R is None:
            self._weights_R = self._scales()
        return self._weights_R[rows]

    def start_dots(self, results_RD: Tensor | None) -> Coming | None:
        """Begin to send the gradient of the routing weights home, [T, K] there; None if it is not wanted."""
        self._weights_at(slice(0))  # taken in any case, as every rank does
        if results_RD is None:
            return None
        dots_R = results_RD.new_empty(0, dtype=self._passage.wide) if self._dots_R is None else self._dots_R
        return self._passage.start_back(dots_R, self._doing)
