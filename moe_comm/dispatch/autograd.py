"""Backward of dispatch is a combine, and the other way round; written once for every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.comm.header import Header
from moe_comm.dispatch.base import Dispatched, Dispatcher, Layout
from moe_comm.dispatch.checksums import claim
from moe_comm.dispatch.group_scales import rounded_in_groups
from moe_comm.dispatch.moved import put_layout, rows_moved
from moe_comm.dispatch.payload import rounded
from moe_comm.errors import InputError, MoeCommError


def _carried(dispatcher: Dispatcher, rows_RD: Tensor, header: Header) -> Tensor:
    """``rows_RD`` as the backend takes them: rounded already if it moves them in place. Gradients pass straight."""
    if dispatcher.packs or header.fault is not None:
        return rows_RD
    payload = dispatcher.options.payloads.of(header.op)
    return rounded_in_groups(rows_RD, payload) if payload.scales == "group" else rounded(rows_RD, payload)


Send = Callable[[Tensor], tuple[Tensor, Layout]]
"""Tokens to the rows of this rank's experts, without autograd."""


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, dispatcher: Dispatcher, send: Send, out: list[Layout], label: str, counted: bool
    ) -> Tensor:
        with rows_moved(dispatcher, "dispatch", label, counted=counted) as span:
            rows_RD, layout = send(x_TD)
            put_layout(span, dispatcher, layout)
        out.append(layout)
        ctx.dispatcher, ctx.layout = dispatcher, layout
        return rows_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        header = ctx.dispatcher.header("dispatch backward", ctx.layout, False)
        grad_RD = _carried(ctx.dispatcher, grad_RD, header)
        with rows_moved(ctx.dispatcher, header.op, ctx.layout.label, ctx.layout):
            return ctx.dispatcher._sum(grad_RD, None, ctx.layout, header), None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, weights_TK: Tensor, dispatcher: Dispatcher, layout: Layout, grad: bool
    ) -> Tensor:
        header = dispatcher.header("combine", layout, grad)
        wide_TK = weights_TK.to(torch.promote_types(rows_RD.dtype, torch.float32))
        carried_RD = _carried(dispatcher, rows_RD, header)
        with rows_moved(dispatcher, header.op, layout.label, layout):
            y_TD = dispatcher._sum(carried_RD, wide_TK, layout, header)
        # Peers read the saved rows again in backward, in place.
        ctx.save_for_backward(rows_RD, wide_TK)
        ctx.dispatcher, ctx.layout, ctx.weights_dtype = dispatcher, layout, weights_TK.dtype
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, weights_TK = ctx.saved_tensors
        header = ctx.dispatcher.header("combine backward", ctx.layout, ctx.needs_input_grad[1])
        rows = rows_RD if ctx.needs_input_grad[1] else None
        grad_TD = _carried(ctx.dispatcher, grad_TD, header)
        with rows_moved(ctx.dispatcher, header.op, ctx.layout.label, ctx.layout):
            grad_rows_RD, grad_TK = ctx.dispatcher._spread(grad_TD, rows, weights_TK, ctx.layout, header)
        return grad_rows_RD, None if grad_TK is None else grad_TK.to(ctx.weights_dtype), None, None, None


def dispatch(dispatcher: Dispatcher, x_TD: Tensor, ids_TK: Tensor, label: str) -> Dispatched:
    """Differentiable dispatch; see ``Dispatcher.dispatch``."""
    header = dispatcher.dispatch_header(x_TD, ids_TK, label)

    def send(x_TD: Tensor) -> tuple[Tensor, Layout]:
        rows_RD, layout = dispatcher._send(_carried(dispatcher, x_TD, header), ids_TK, header)
        claimed = claim(dispatcher, x_TD, ids_TK, header)
        if claimed is not None:
            claimed.check(rows_RD)
        return rows_RD, layout

    return dispatch_by(dispatcher, x_TD, send, label)


def dispatch_by(
    dispatcher: Dispatcher, x_TD: Tensor, send: Send, label: str = "", *, counted: bool = True
) -> Dispatched:
    """Differentiable dispatch by a primitive of the backend, which takes rows in the payload that it moves.

    Args:
        label: name of the layer. counted: whether its span is a call of the group; False where the call has its own.
    """
    if not (torch.is_grad_enabled() and x_TD.requires_grad):
        with rows_moved(dispatcher, "dispatch", label, counted=counted) as span:
            rows_RD, layout = send(x_TD.detach())
            put_layout(span, dispatcher, layout)
            return Dispatched(rows_RD, layout)
    out: list[Layout] = []
    rows_RD = _Dispatch.apply(x_TD, dispatcher, send, out, label, counted)
    return Dispatched(rows_RD, out[0])


def _combine_fault(dispatcher: Dispatcher, rows_RD: Tensor, weights_TK: Tensor, layout: Layout) -> MoeCommError | None:
    if layout.maker != dispatcher.maker:
        return InputError(
            f"this layout, of call {layout.call}, was made by another dispatcher; combine with the one that dispatched"
        )
    if tuple(rows_RD.shape) != (layout.num_rows, layout.hidden) or rows_RD.dtype != layout.dtype:
        return InputError(
            f"combine needs rows [{layout.num_rows}, {layout.hidden}] {layout.dtype}, as dispatch gave them; "
            f"got {tuple(rows_RD.shape)} {rows_RD.dtype}"
        )
    if tuple(weights_TK.shape) != (layout.num_tokens, layout.top_k):
        return InputError(f"combine needs weights [{layout.num_tokens}, {layout.top_k}]; got {tuple(weights_TK.shape)}")
    if rows_RD.device != layout.device or weights_TK.device != layout.device:
        return InputError(
            f"combine needs rows and weights on {layout.device}, where dispatch was called; "
            f"got rows on {rows_RD.device} and weights on {weights_TK.device}"
        )
    # Without a handshake the others would not hear of it: it waits for the next dispatch.
    return dispatcher.damage.fault() if dispatcher.handshakes else None


def combine(dispatcher: Dispatcher, rows_RD: Tensor, weights_TK: Tensor, layout: Layout) -> Tensor:
    """Differentiable combine; see ``Dispatcher.combine``."""
    fault = _combine_fault(dispatcher, rows_RD, weights_TK, layout)
    if fault is not None:
        if dispatcher.handshakes:
            # A handshake that holds the fault, so that every rank raises it; no backend's _send goes further.
            header = replace(dispatcher.header("combine", layout, False), fault=fault)
            dispatcher._send(rows_RD.detach(), weights_TK.detach(), header)
        raise fault
    grad = torch.is_grad_enabled() and (rows_RD.requires_grad or weights_TK.requires_grad)
    if not grad:
        wide_TK = weights_TK.detach().to(torch.promote_types(rows_RD.dtype, torch.float32))
        header = dispatcher.header("combine", layout, False)
        rows_RD = _carried(dispatcher, rows_RD.detach(), header)
        with rows_moved(dispatcher, header.op, layout.label, layout):
            return dispatcher._sum(rows_RD, wide_TK, layout, header)
    return _Combine.apply(rows_RD, weights_TK, dispatcher, layout, grad)  # type: ignore[no-any-return]
