"""Operations on rows without autograd, on top of three primitives of each backend, and their autograd functions.

    _send    dispatch forward: copy each routed row to the rank of its expert
    _sum     combine forward (weighted) and dispatch backward (unweighted): sum the K rows of each token in slot order
    _spread  combine backward: send each token's gradient, times its weight, to its K rows; compute weight gradients

Each runs inside an ``Operation``, ``Dispatcher.context.operation`` in the thread that runs it. It holds the header that
ranks compare, the layer's label and the span, and it reports an error of this rank to the other ranks, which would
otherwise wait.

Extra values are a few 32-bit words for each slot, which are sent with its row. The native core copies them in the
operation that moves the rows. Collectives use the routes of the rows again. Other backends start a second dispatch, in
which each slot is a token. Its rows are ordered by (expert, source rank, slot), as those of the first dispatch.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_comm.comm.header import EXTRA, EXTRA_BACKWARD
from moe_comm.dispatch.operation import Operations
from moe_comm.dispatch.types import DispatchHandle, ExtraRoutes
from moe_comm.dispatch.wire_dtype import rounded
from moe_comm.kernels.autograd import once_differentiable


class RowOperations(Operations):
    """Base class of ``Dispatcher``: its operations on rows without autograd. Collective.

    Attributes: see ``Dispatcher``.
    """

    rounds: bool

    def combine_forward(
        self, rows_RD: Tensor, weights_TK: Tensor, handle: DispatchHandle, grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Combine. Also return the weights in the dtype of the multiplication."""
        wide = torch.float64 if rows_RD.dtype is torch.float64 else torch.float32
        with self.operation("combine", handle, grad):
            wide_TK = weights_TK if weights_TK.dtype is wide else weights_TK.to(wide)
            return self._sum(self._rounded(rows_RD) if self.rounds else rows_RD, wide_TK, handle), wide_TK

    def dispatch_backward(self, grad_RD: Tensor, handle: DispatchHandle) -> Tensor:
        """Return [T, D], the gradient of dispatched tokens."""
        (grad_RD,) = self._readable("dispatch backward", handle, gradient=grad_RD)
        with self.operation("dispatch backward", handle):
            return self._sum(self._rounded(grad_RD) if self.rounds else grad_RD, None, handle)

    def send_gradients(
        self, grad_TD: Tensor, weights_TK: Tensor, needs_weights: bool, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor]:
        """Send the gradient and the weights of a combine to the experts, which multiply them.

        Args:
            weights_TK: fp32 (fp64 for fp64 rows).
            needs_weights: Whether the weights need a gradient; compared between ranks.

        Returns:
            [R, D], each row's gradient of its token; and [R] weights.
        """
        (grad_TD,) = self._readable("combine backward", handle, gradient=grad_TD)
        with self.operation("combine backward", handle, needs_weights, extra=1):
            if self.rounds:
                grad_TD = self._rounded(grad_TD)
            rows_RD, weights_R1 = self._send_gradients(grad_TD, weights_TK.unsqueeze(2), handle)
        return rows_RD, weights_R1.squeeze(1)

    def return_gradients(
        self, rows_RD: Tensor | None, dots_R: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor | None, Tensor]:
        """Return ``dispatch_backward`` of rows, if given, and the gradient of the weights [T, K]; 0 where dropped.

        Args:
            rows_RD: None on every rank, or on none.
            dots_R: the gradient of each row's weight, after ``send_gradients``.
        """
        if rows_RD is not None:
            (rows_RD,) = self._readable("dispatch backward", handle, gradient=rows_RD)
        with self.operation("dispatch backward", handle, rows_RD is not None, extra=1):
            if self.rounds and rows_RD is not None:
                rows_RD = self._rounded(rows_RD)
            y_TD, dots_TK1 = self._sum_with(rows_RD, dots_R.unsqueeze(1), handle)
        return y_TD, dots_TK1.squeeze(2)

    def return_rows(
        self, rows_RD: Tensor | None, extra_RX: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor | None, Tensor]:
        """Return ``dispatch_backward`` of rows, and [T, K, X]: extra values of each slot's row, 0 if dropped.

        Args:
            rows_RD: None if only the values are needed; the same on every rank.
            extra_RX: fp32 or int32 values [R, X], such as gradients of the extra values of the dispatch.
        """
        (extra_RX,) = self._readable("dispatch backward", handle, extra_values=extra_RX)
        if rows_RD is not None:
            (rows_RD,) = self._readable("dispatch backward", handle, gradient=rows_RD)
        is_int = extra_RX.dtype is torch.int32
        with self.operation(
            "dispatch backward", handle, rows_RD is not None, extra=extra_RX.shape[1], extra_int=is_int
        ):
            if self.rounds and rows_RD is not None:
                rows_RD = self._rounded(rows_RD)
            y_TD, words_TKX = self._sum_with(rows_RD, extra_RX.view(torch.float32), handle)
        return y_TD, words_TKX.view(extra_RX.dtype)

    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the rows and weights of a combine.

        Args:
            rows_RD: the combined rows; None if the weights need no gradient.
            weights_TK: fp32 (fp64 for fp64 rows).
        """
        (grad_TD,) = self._readable("combine backward", handle, gradient=grad_TD)
        with self.operation("combine backward", handle, rows_RD is not None):
            return self._spread(self._rounded(grad_TD) if self.rounds else grad_TD, rows_RD, weights_TK, handle)

    def _rounded(self, rows_RD: Tensor, op: str = "") -> Tensor:
        """Return ``rows_RD`` rounded to the wire dtype of ``op``; by default, of the current operation."""
        if self.context.operation.fault is not None:
            return rows_RD
        wire_dtype = self.options.wire_dtypes.of(op or self.context.operation.op)
        if wire_dtype.scales != "group":
            return rounded(rows_RD, wire_dtype)
        from moe_comm.dispatch.wire_dtype import rounded_in_groups  # an option that few calls use

        return rounded_in_groups(rows_RD, wire_dtype)

    def extra_routes(self, ids_TK: Tensor, handle: DispatchHandle) -> ExtraRoutes:
        """Return the routes on which ``send_gradients`` sends the weights of a dispatch with these ids."""
        ids_TK = ids_TK.detach()
        if self._places(handle) is None:
            ids_TK = ids_TK.clone()  # they are dispatched again, and the caller may change its tensor
        return ExtraRoutes(1, ids_TK.reshape(-1, 1))

    # --- the primitives of a backend ---

    @abstractmethod
    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle) -> Tensor: ...

    @abstractmethod
    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor | None]:
        """``rows_RD`` is None if the weights need no gradient."""

    # --- extra values as words in fp32. Backends that send them with the rows override the first three ---

    def _send_with(
        self, x_TD: Tensor, ids_TK: Tensor, words_TKX: Tensor | None
    ) -> tuple[Tensor, DispatchHandle, Tensor | None]:
        """Run ``_send``, and also return the words [R, X]; None without, and if ``_send_words`` sends them."""
        return *self._send(x_TD, ids_TK), None

    def _spread_with(
        self, grad_TD: Tensor, weights_TK: Tensor, words_TKX: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor]:
        """Return [R, D] of ``_spread``, and the words [R, X]."""
        return self._spread(grad_TD, None, weights_TK, handle)[0], self._send_words(words_TKX, handle)

    def _send_gradients(self, grad_TD: Tensor, words_TKX: Tensor, handle: DispatchHandle) -> tuple[Tensor, Tensor]:
        """Return the gradient of each row's token, [R, D], and the routing weights as words [R, 1]."""
        wide = torch.promote_types(handle.dtype, torch.float32)
        ones_TK = torch.ones(handle.num_tokens, handle.top_k, dtype=wide, device=handle.device)
        if self._places(handle) is None:
            return self._spread_with(grad_TD, ones_TK, words_TKX, handle)
        return self._spread(grad_TD, None, ones_TK, handle)[0], self._send_weights(words_TKX, handle)

    def _sum_with(
        self, rows_RD: Tensor | None, words_RX: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor | None, Tensor]:
        """Return [T, D] of ``_sum`` without weights, or None without rows, and the words [T, K, X], 0 where dropped."""
        y_TD = None if rows_RD is None else self._sum(rows_RD, None, handle)
        return y_TD, self._return_words(words_RX, handle)

    def _send_words(self, words_TKX: Tensor, handle: DispatchHandle) -> Tensor:
        """Return [R, X], by a dispatch in which each slot is a token. Rows then have the same order."""
        assert handle.extra is not None
        extra, words_NX = handle.extra, words_TKX.reshape(-1, words_TKX.shape[2])
        operation = self._new_operation(EXTRA, extra.width, words_NX.dtype, 1, label=handle.label, of_call=handle.call)
        with self.running(operation):
            words_RX, extra.slots = self._send(words_NX, extra.ids_N1)
        return words_RX

    def _places(self, handle: DispatchHandle) -> Tensor | None:
        """Return the places of the slots' rows, if they are what the primitives read of ``handle.state``."""

    def _send_weights(self, words_TKX: Tensor, handle: DispatchHandle) -> Tensor:
        """Run ``_send_words`` for numbers, which may be multiplied by 1. With ``_places`` no slots are counted."""
        place_TK = self._places(handle)
        if place_TK is None:
            return self._send_words(words_TKX, handle)
        assert handle.extra is not None
        words_NX = words_TKX.reshape(-1, words_TKX.shape[2])
        (tokens, width), dtype = words_NX.shape, words_NX.dtype
        slots = replace(handle, num_tokens=tokens, top_k=1, hidden=width, dtype=dtype, state=place_TK.view(-1, 1))
        handle.extra.slots = slots
        with self.running(self._new_operation(EXTRA, width, dtype, 1, label=handle.label, of_call=handle.call)):
            return self._spread(words_NX, None, torch.ones_like(words_NX[:, :1]), slots)[0]

    def _return_words(self, words_RX: Tensor, handle: DispatchHandle) -> Tensor:
        """Return [T, K, X], after ``_send_words`` with the same X."""
        assert handle.extra is not None and handle.extra.slots is not None
        slots = handle.extra.slots
        operation = self._new_operation(
            EXTRA_BACKWARD, slots.hidden, slots.dtype, 1, label=handle.label, of_call=slots.call
        )
        with self.running(operation):
            return self._sum(words_RX, None, slots).view(handle.num_tokens, handle.top_k, slots.hidden)


class DispatchFunction(torch.autograd.Function):
    """Identity on the dispatched rows. Its backward sums the K gradient rows of each token."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows_RD: Tensor, dispatcher: RowOperations, handle: DispatchHandle) -> Tensor:
        ctx.dispatcher, ctx.handle = dispatcher, handle
        return rows_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.dispatcher.dispatch_backward(grad_RD, ctx.handle), None, None, None


class ExtraDispatchFunction(torch.autograd.Function):
    """``DispatchFunction`` for rows and their extra values."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        extra_TKX: Tensor,
        rows_RD: Tensor,
        extra_RX: Tensor,
        dispatcher: RowOperations,
        handle: DispatchHandle,
    ) -> tuple[Tensor, Tensor]:
        ctx.dispatcher, ctx.handle = dispatcher, handle
        outputs = zip((rows_RD, extra_RX), ctx.needs_input_grad[:2], strict=True)
        ctx.mark_non_differentiable(*(output for output, grad in outputs if not grad))
        return rows_RD, extra_RX

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor, grad_RX: Tensor) -> tuple[Tensor | None, ...]:
        rows_grad, extra_grad = ctx.needs_input_grad[:2]
        if not extra_grad:
            return ctx.dispatcher.dispatch_backward(grad_RD, ctx.handle), None, None, None, None, None
        grads = ctx.dispatcher.return_rows(grad_RD if rows_grad else None, grad_RX, ctx.handle)
        return *grads, None, None, None, None


class CombineFunction(torch.autograd.Function):
    """Combine; its backward spreads the gradients of the tokens."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, weights_TK: Tensor, dispatcher: RowOperations, handle: DispatchHandle
    ) -> Tensor:
        y_TD, wide_TK = dispatcher.combine_forward(rows_RD, weights_TK, handle, True)
        # In backward, peers read the saved rows in place again.
        ctx.save_for_backward(rows_RD, wide_TK)
        ctx.dispatcher, ctx.handle, ctx.weights_dtype = dispatcher, handle, weights_TK.dtype
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, weights_TK = ctx.saved_tensors
        rows = rows_RD if ctx.needs_input_grad[1] else None
        grad_rows_RD, grad_TK = ctx.dispatcher.combine_backward(grad_TD, rows, weights_TK, ctx.handle)
        return grad_rows_RD, None if grad_TK is None else grad_TK.to(ctx.weights_dtype), None, None
