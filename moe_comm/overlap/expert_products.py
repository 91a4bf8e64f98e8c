"""Products of experts whose rows come in pieces: checks, the reference, gradients of weights when all is there."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.types import Layout
from moe_comm.errors import InputError
from moe_comm.kernels.expert_mm import align, expert_mm, product_into
from moe_comm.kernels.wanted import wanted_gradients
from moe_comm.overlap.crossing import Piece
from moe_comm.runtime.memory import warm_like, warm_rows


def weights_fault(dispatcher: Dispatcher, w_EGD: Tensor, rows: Tensor, operator: str) -> InputError | None:
    """What is wrong with the weights of the dispatcher's experts for ``rows`` [.., D]."""
    experts = len(dispatcher.local_experts)
    fits = w_EGD.dim() == 3 and w_EGD.shape[0] == experts and w_EGD.shape[2] == rows.shape[-1]
    if fits and w_EGD.dtype == rows.dtype and w_EGD.device == rows.device:
        return None
    return InputError(
        f"{operator} needs weights [{experts}, .., {rows.shape[-1]}] of this rank's experts for rows of {rows.dtype} "
        f"on {rows.device}; got {tuple(w_EGD.shape)} {w_EGD.dtype} on {w_EGD.device}"
    )


def combine_fault(
    dispatcher: Dispatcher, layout: Layout, rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor
) -> InputError | None:
    """What is wrong with the input of a ``matmul_combine`` of rows that stand as ``layout`` says."""
    if (fault := weights_fault(dispatcher, w_EDF, rows_RF, "matmul_combine")) is not None:
        return fault
    if rows_RF.shape[0] != layout.num_rows or w_EDF.shape[1] != layout.hidden or rows_RF.dtype != layout.dtype:
        return InputError(
            f"matmul_combine needs rows [{layout.num_rows}, F] {layout.dtype} and weights [E, {layout.hidden}, F]; got "
            f"{tuple(rows_RF.shape)} {rows_RF.dtype} and {tuple(w_EDF.shape)}"
        )
    if tuple(weights_TK.shape) != (layout.num_tokens, layout.top_k):
        return InputError(
            f"matmul_combine needs weights [{layout.num_tokens}, {layout.top_k}]; got {tuple(weights_TK.shape)}"
        )
    if rows_RF.device != layout.device or weights_TK.device != layout.device:
        return InputError(
            f"matmul_combine needs rows and weights on {layout.device}; got rows on {rows_RF.device} and weights on "
            f"{weights_TK.device}"
        )
    return None


def grouped_mm(rows_RD: Tensor, rows_per_expert: tuple[int, ...], w_EGD: Tensor) -> Tensor:
    """[R, G] = rows @ w[e].T, expert by expert: the reference of what is computed in pieces. No autograd."""
    h_RG = warm_rows(rows_RD.shape[0], w_EGD.shape[1], rows_RD.dtype, rows_RD.device)
    aligned, aligned_w = align(rows_RD), align(w_EGD)
    for rows, h, w in zip(rows_RD.split(rows_per_expert), h_RG.split(rows_per_expert), w_EGD, strict=True):
        if rows.shape[0]:
            expert_mm(aligned(rows), aligned_w(w).t(), h)
    return h_RG


def grouped_linear(rows_RD: Tensor, rows_per_expert: tuple[int, ...], w_EGD: Tensor) -> Tensor:
    """``grouped_mm``, differentiable once."""
    if not (torch.is_grad_enabled() and (rows_RD.requires_grad or w_EGD.requires_grad)):
        return grouped_mm(rows_RD, rows_per_expert, w_EGD)
    return _GroupedLinear.apply(rows_RD, w_EGD, rows_per_expert)  # type: ignore[no-any-return]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, w_EGD: Tensor, rows_per_expert: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(rows_RD, w_EGD)
        ctx.rows_per_expert = rows_per_expert
        return grouped_mm(rows_RD, rows_per_expert, w_EGD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RG: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, w_EGD = ctx.saved_tensors
        needs_rows, needs_w, _ = wanted_gradients(ctx)
        grad_RG, sizes = grad_RG.contiguous(), ctx.rows_per_expert
        grad_rows = grouped_mm(grad_RG, sizes, w_EGD.transpose(1, 2)) if needs_rows else None
        grad_w = ExpertGradients(sizes, grad_RG, rows_RD, w_EGD).at_once() if needs_w else None
        return grad_rows, grad_w, None


class ExpertGradients:
    """grad.T @ rows of every expert: one product each, once all its rows are there; the same bits for any pieces.

    Args:
        grad_RG, rows_RD: filled piece by piece. like_EGD: the weights.
    """

    def __init__(self, rows_per_expert: tuple[int, ...], grad_RG: Tensor, rows_RD: Tensor, like_EGD: Tensor) -> None:
        self._grads, self._rows = grad_RG.split(rows_per_expert), rows_RD.split(rows_per_expert)
        self._aligned_grad, self._aligned_rows = align(grad_RG), align(rows_RD)
        self._found = warm_like(like_EGD)
        self._left = list(rows_per_expert)
        self._due = deque(expert for expert, rows in enumerate(self._left) if not rows)

    def computed(self, piece: Piece) -> None:
        """``piece`` of both is there."""
        self._left[piece.expert] -= piece.end - piece.first
        if not self._left[piece.expert]:
            self._due.append(piece.expert)

    def one(self) -> bool:
        """Compute one expert's gradient; False: none is due."""
        if not self._due:
            return False
        expert = self._due.popleft()
        into, grad = self._found[expert], self._grads[expert]
        if grad.shape[0]:
            product_into(self._aligned_grad(grad).t(), self._aligned_rows(self._rows[expert]), into)
        else:
            into.zero_()  # not None: an optimizer or a reduction over ranks treats the expert like any other
        return True

    def at_once(self) -> Tensor:
        """``result``, where all pieces were there from the beginning."""
        self.all_there()
        return self.result()

    def all_there(self) -> None:
        """All pieces are, from the beginning."""
        self._due = deque(range(len(self._left)))

    def result(self) -> Tensor:
        """[E, G, D], after all pieces."""
        while self.one():
            pass
        return self._found
