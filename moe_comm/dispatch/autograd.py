"""Autograd of dispatch and combine, on top of the primitives of a dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_comm.comm.header import Header
from moe_comm.dispatch.arrays import as_tensors
from moe_comm.dispatch.dispatch_spans import dispatch_span, record_handle
from moe_comm.dispatch.types import Dispatched, DispatchHandle
from moe_comm.dispatch.wire.group_scales import rounded_in_groups
from moe_comm.dispatch.wire.wire_dtype import rounded
from moe_comm.kernels.autograd import once_differentiable
from moe_comm.kernels.fp8 import ScaledRows

if TYPE_CHECKING:
    from moe_comm.dispatch.base import Dispatcher


def round_rows(dispatcher: Dispatcher, rows_RD: Tensor, header: Header) -> Tensor:
    """Return ``rows_RD`` rounded to the wire dtype of the operation."""
    if header.fault is not None:
        return rows_RD
    wire_dtype = dispatcher.options.wire_dtypes.of(header.op)
    return rounded_in_groups(rows_RD, wire_dtype) if wire_dtype.scales == "group" else rounded(rows_RD, wire_dtype)


class DispatchFunction(torch.autograd.Function):
    """Identity on the dispatched rows. Its backward sums the K gradient rows of each token."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows_RD: Tensor, dispatcher: Dispatcher, handle: DispatchHandle) -> Tensor:
        ctx.dispatcher, ctx.handle = dispatcher, handle
        return rows_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        return dispatch_backward(ctx.dispatcher, grad_RD, ctx.handle), None, None, None


class ExtraDispatchFunction(torch.autograd.Function):
    """``DispatchFunction`` for rows and their extra values."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        extra_TKX: Tensor,
        rows_RD: Tensor,
        extra_RX: Tensor,
        dispatcher: Dispatcher,
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
            return dispatch_backward(ctx.dispatcher, grad_RD, ctx.handle), None, None, None, None, None
        grads = return_rows(ctx.dispatcher, grad_RD if rows_grad else None, grad_RX, ctx.handle)
        return *grads, None, None, None, None


class CombineFunction(torch.autograd.Function):
    """Combine; its backward spreads the gradients of the tokens."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, weights_TK: Tensor, dispatcher: Dispatcher, handle: DispatchHandle
    ) -> Tensor:
        y_TD, wide_TK = combine_forward(dispatcher, rows_RD, weights_TK, handle, True)
        # In backward, peers read the saved rows in place again.
        ctx.save_for_backward(rows_RD, wide_TK)
        ctx.dispatcher, ctx.handle, ctx.weights_dtype = dispatcher, handle, weights_TK.dtype
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, weights_TK = ctx.saved_tensors
        rows = rows_RD if ctx.needs_input_grad[1] else None
        grad_rows_RD, grad_TK = combine_backward(ctx.dispatcher, grad_TD, rows, weights_TK, ctx.handle)
        return grad_rows_RD, None if grad_TK is None else grad_TK.to(ctx.weights_dtype), None, None


def _readable(dispatcher: Dispatcher, op: str, handle: DispatchHandle, **tensors: Tensor) -> list[Tensor]:
    """Return the tensors with their values in memory. Raise InputError on every rank if one has none."""
    values, fault = as_tensors(**tensors)
    if fault is not None:
        dispatcher.refuse_operation(op, handle, fault)
    return values


def dispatch_backward(dispatcher: Dispatcher, grad_RD: Tensor, handle: DispatchHandle) -> Tensor:
    """Return [T, D], the gradient of dispatched tokens. For operators that have their own autograd. Collective."""
    (grad_RD,) = _readable(dispatcher, "dispatch backward", handle, gradient=grad_RD)
    header = dispatcher.header("dispatch backward", handle, False)
    with dispatcher.report(header), dispatch_span(dispatcher, header.op, handle.label, handle):
        if dispatcher.rounds:
            grad_RD = round_rows(dispatcher, grad_RD, header)
        return dispatcher._sum(grad_RD, None, handle, header)


def return_rows(
    dispatcher: Dispatcher, rows_RD: Tensor | None, extra_RX: Tensor, handle: DispatchHandle
) -> tuple[Tensor | None, Tensor]:
    """Return ``dispatch_backward`` of rows, and [T, K, X]: extra values of each slot's row, 0 if dropped. Collective.

    Args:
        rows_RD: None if only the values are needed; the same on every rank.
        extra_RX: fp32 or int32 values; gradients of those of the dispatch, or others of the same X.
    """
    (extra_RX,) = _readable(dispatcher, "dispatch backward", handle, extra_values=extra_RX)
    if rows_RD is not None:
        (rows_RD,) = _readable(dispatcher, "dispatch backward", handle, gradient=rows_RD)
    header = dispatcher.header("dispatch backward", handle, rows_RD is not None)
    header = replace(header, extra=extra_RX.shape[1], extra_int=extra_RX.dtype is torch.int32)
    with dispatcher.report(header), dispatch_span(dispatcher, header.op, handle.label, handle):
        if dispatcher.rounds and rows_RD is not None:
            rows_RD = round_rows(dispatcher, rows_RD, header)
        y_TD, words_TKX = dispatcher._sum_with(rows_RD, extra_RX.view(torch.float32), handle, header)
    return y_TD, words_TKX.view(extra_RX.dtype)


def combine_backward(
    dispatcher: Dispatcher, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the rows and weights of a combine, as ``dispatch_backward``.

    Args:
        rows_RD: the combined rows; None if the weights need no gradient.
        weights_TK: fp32 (fp64 for fp64 rows).
    """
    (grad_TD,) = _readable(dispatcher, "combine backward", handle, gradient=grad_TD)
    header = dispatcher.header("combine backward", handle, rows_RD is not None)
    with dispatcher.report(header), dispatch_span(dispatcher, header.op, handle.label, handle):
        if dispatcher.rounds:
            grad_TD = round_rows(dispatcher, grad_TD, header)
        return dispatcher._spread(grad_TD, rows_RD, weights_TK, handle, header)


def combine_forward(
    dispatcher: Dispatcher, rows_RD: Tensor, weights_TK: Tensor, handle: DispatchHandle, grad: bool
) -> tuple[Tensor, Tensor]:
    """Combine without autograd. Also return the weights in the dtype of the multiplication."""
    header = dispatcher.header("combine", handle, grad)
    wide = torch.float64 if rows_RD.dtype is torch.float64 else torch.float32
    with dispatcher.report(header), dispatch_span(dispatcher, header.op, handle.label, handle):
        wide_TK = weights_TK if weights_TK.dtype is wide else weights_TK.to(wide)
        rounded_RD = round_rows(dispatcher, rows_RD, header) if dispatcher.rounds else rows_RD
        return dispatcher._sum(rounded_RD, wide_TK, handle, header), wide_TK


def dispatch_by(
    dispatcher: Dispatcher,
    x_TD: Tensor,
    send: Callable[[Tensor], tuple[Tensor | ScaledRows, DispatchHandle]],
    label: str = "",
    *,
    counted: bool = True,
) -> Dispatched:
    """Dispatch with autograd through ``send``, which has none.

    Args:
        counted: whether the span counts as a call of the group; False if the caller records that call.
    """
    with dispatch_span(dispatcher, "dispatch", label, counted=counted) as span:
        rows, handle = send(x_TD.detach())
        record_handle(span, dispatcher, handle)
    return connected(dispatcher, x_TD, rows, handle)


def no_rows(x_TD: Tensor, handle: DispatchHandle) -> Tensor:
    """Return [R, D] NaN without memory, in place of rows that experts read as values and scales."""
    return x_TD.new_full((1, 1), torch.nan).expand(handle.num_rows, handle.hidden)


def connected(dispatcher: Dispatcher, x_TD: Tensor, rows: Tensor | ScaledRows, handle: DispatchHandle) -> Dispatched:
    """Return rows that were dispatched without autograd, connected to the tokens."""
    if isinstance(rows, Tensor):
        rows_RD, scaled = rows, None
    else:
        rows_RD, scaled = no_rows(x_TD, handle), rows
    if x_TD.requires_grad and torch.is_grad_enabled():
        rows_RD = DispatchFunction.apply(x_TD, rows_RD, dispatcher, handle)
    return Dispatched(rows_RD, handle, scaled)
