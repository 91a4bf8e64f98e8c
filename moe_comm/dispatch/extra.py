"""Extra values: a few 32-bit words for each slot, which are sent with its row.

    slot (t, k)   row of x[t], words[t, k]   ──▶   row r and words[r] at the owner of the slot's expert

The native core copies them in the operation that moves the rows. Collectives use the routes of the rows again. Other
backends start a second dispatch, in which each slot is a token (``dispatch_slots``). Its rows are ordered by (expert,
source rank, slot), which is the order of the first dispatch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_comm.comm.header import EXTRA, EXTRA_BACKWARD, Header
from moe_comm.dispatch.autograd import ExtraDispatchFunction
from moe_comm.dispatch.input_faults import extra_fault
from moe_comm.dispatch.types import DispatchHandle

if TYPE_CHECKING:
    from moe_comm.dispatch.base import Dispatcher


def with_extra(header: Header, extra_TKX: Tensor, x_TD: Tensor, ids_TK: Tensor) -> tuple[Header, Tensor | None]:
    """Return the header of a dispatch with extra values, and the values as fp32 words; None if the input is invalid."""
    fault = header.fault or extra_fault(extra_TKX, ids_TK.shape, x_TD.device)
    if fault is not None:
        return replace(header, fault=fault), None
    grad, is_int = extra_TKX.requires_grad and torch.is_grad_enabled(), extra_TKX.dtype is torch.int32
    words_TKX = extra_TKX.detach().view(torch.float32)
    return replace(header, extra=extra_TKX.shape[2], extra_grad=grad, extra_int=is_int), words_TKX


def with_autograd(
    dispatcher: Dispatcher, x_TD: Tensor, extra_TKX: Tensor, rows_RD: Tensor, words_RX: Tensor, handle: DispatchHandle
) -> tuple[Tensor, Tensor]:
    """Return received rows and extra values with the history of ``x_TD`` and ``extra_TKX``."""
    extra_RX = words_RX.view(extra_TKX.dtype)
    if torch.is_grad_enabled() and (x_TD.requires_grad or extra_TKX.requires_grad):
        rows_RD, extra_RX = ExtraDispatchFunction.apply(x_TD, extra_TKX, rows_RD, extra_RX, dispatcher, handle)
    return rows_RD, extra_RX


def dispatch_slots(dispatcher: Dispatcher, words_TKX: Tensor, handle: DispatchHandle) -> Tensor:
    """Return the words [R, X] of this rank's rows, by a dispatch in which each slot is a token. Collective."""
    assert handle.extra is not None
    extra, words_NX = handle.extra, words_TKX.reshape(-1, words_TKX.shape[2])
    header = dispatcher._next_header(EXTRA, extra.width, words_NX.dtype, 1, label=handle.label, of_call=handle.call)
    words_RX, extra.slots = dispatcher._send(words_NX, extra.ids_N1, header)
    return words_RX


def return_slots(dispatcher: Dispatcher, words_RX: Tensor, handle: DispatchHandle) -> Tensor:
    """Return the words [T, K, X] of each slot's row, 0 for dropped slots, after ``dispatch_slots``. Collective."""
    assert handle.extra is not None and handle.extra.slots is not None
    slots = handle.extra.slots
    header = dispatcher._next_header(
        EXTRA_BACKWARD, slots.hidden, slots.dtype, 1, label=handle.label, of_call=slots.call
    )
    return dispatcher._sum(words_RX, None, slots, header).view(handle.num_tokens, handle.top_k, slots.hidden)
