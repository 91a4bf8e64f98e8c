"""Dispatch and combine as operators ``moe_comm_ep::dispatch`` and ``moe_comm_ep::combine``.

Selective activation checkpointing saves the outputs of chosen operators, so that the backward pass does not send rows
again. The outputs of an operator are tensors. A handle is therefore represented by an int64 tensor on the CPU, its
number. The autograd node of dispatch keeps the handle: it is released with the graph, also if no backward follows.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import InputError
from moe_comm.kernels.autograd import once_differentiable


class Sent:
    """A dispatch handle and its dispatcher, with a number."""

    def __init__(self, dispatcher: Dispatcher, handle: DispatchHandle) -> None:
        self.dispatcher, self.handle = dispatcher, handle
        self.number = next(_numbers)


_numbers = count(1)
_sent: WeakValueDictionary[int, Sent] = WeakValueDictionary()
_dispatchers: WeakValueDictionary[int, Dispatcher] = WeakValueDictionary()
_last: list[Sent] = []
"""The last dispatch, until its autograd node or its caller keeps it with ``sent_of``."""


def register(dispatcher: Dispatcher) -> int:
    """Return the number of ``dispatcher`` for the operators."""
    _dispatchers[dispatcher.maker] = dispatcher
    return dispatcher.maker


def sent_of(number: Tensor) -> Sent:
    """Return the dispatch of a number."""
    found = _sent.get(int(number))
    if found is None:
        raise InputError(f"the handle {int(number)} of moe_comm_ep::dispatch has been released")
    _last.clear()
    return found


@torch.library.custom_op("moe_comm_ep::dispatch", mutates_args=())
def dispatch(x_TD: Tensor, ids_TK: Tensor, dispatcher: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [R, D], rows per local expert [L] int64, and the number of the handle."""
    sent = _dispatchers[dispatcher].dispatch(x_TD, ids_TK)
    kept = Sent(_dispatchers[dispatcher], sent.handle)
    _sent[kept.number] = kept
    _last[:] = [kept]
    counts = torch.tensor(sent.handle.rows_per_expert, dtype=torch.int64, device=x_TD.device)
    return sent.rows_RD, counts, torch.tensor(kept.number, dtype=torch.int64, device="cpu")


@dispatch.register_fake
def _(x_TD: Tensor, ids_TK: Tensor, dispatcher: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    local = len(_dispatchers[dispatcher].local_experts)
    number = torch.empty((), dtype=torch.int64, device="cpu")
    return x_TD.new_empty(rows, x_TD.shape[1]), ids_TK.new_empty(local, dtype=torch.int64), number


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.sent = sent_of(output[2])


@once_differentiable
def _dispatch_backward(ctx: Any, grad_RD: Tensor, *_: Any) -> tuple[Tensor, None, None]:
    return ctx.sent.dispatcher.dispatch_backward(grad_RD, ctx.sent.handle), None, None


dispatch.register_autograd(_dispatch_backward, setup_context=_keep)


@torch.library.custom_op("moe_comm_ep::combine", mutates_args=())
def combine(rows_RD: Tensor, weights_TK: Tensor, number: Tensor) -> Tensor:
    """Return [T, D], the weighted sum of each token's rows."""
    sent = sent_of(number)
    return sent.dispatcher.combine(rows_RD, weights_TK, sent.handle)


@combine.register_fake
def _(rows_RD: Tensor, weights_TK: Tensor, number: Tensor) -> Tensor:
    return rows_RD.new_empty(weights_TK.shape[0], rows_RD.shape[1])


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    rows_RD, weights_TK, number = inputs
    ctx.sent = sent_of(number)
    ctx.save_for_backward(rows_RD, weights_TK)


@once_differentiable
def _combine_backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor | None, None]:
    rows_RD, weights_TK = ctx.saved_tensors
    wide_TK = weights_TK.double() if rows_RD.dtype is torch.float64 else weights_TK.float()
    rows = rows_RD if ctx.needs_input_grad[1] else None
    grad_RD, grad_TK = ctx.sent.dispatcher.combine_backward(grad_TD, rows, wide_TK, ctx.sent.handle)
    return grad_RD, None if grad_TK is None else grad_TK.to(weights_TK.dtype), None


combine.register_autograd(_combine_backward, setup_context=_save)
