"""Which executor runs a call of an expert-parallel layer."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.dispatch.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.shared_memory import SharedMemoryDispatcher
from moe_comm.errors import InputError
from moe_comm.overlap.chunked import Overlap
from moe_comm.overlap.executors.base import ExpertCall
from moe_comm.overlap.executors.chunked_rows import ChunkedDispatch, sends_chunks
from moe_comm.overlap.executors.pipelined import PipelinedCall
from moe_comm.overlap.executors.serial import SerialCall
from moe_comm.overlap.executors.shared_rows import SharedDispatch, can_pipeline

FIRST_PRODUCTS = 2
"""Products of width F that an expert has for a row before the last one: gate and up."""


def dispatch_rows(
    dispatcher: Dispatcher,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    overlap: Overlap | None = None,
    *,
    width: int = 0,
    label: str = "",
) -> ExpertCall:
    """Dispatch the rows of one call of a layer. Collective.

    Args:
        x_TD, ids_TK, label: as ``Dispatcher.dispatch`` takes them. weights_TK: [T, K] routing weights.
        overlap: pipelined, if the dispatcher can and there are enough rows; None: one step after the other. No result
            and no gradient depends on it.
        width: F of the experts, from which "auto" learns how much there is to hide behind; the same on every rank.

    Raises:
        InputError, RoutingError, RankMismatch: on every rank, before rows move.
        PeerDied, PeerTimeout: a rank failed, or did not call in time.
    """
    if overlap is not None and isinstance(dispatcher, AllToAllDispatcher) and sends_chunks(dispatcher):
        return _in_chunks(dispatcher, x_TD, ids_TK, weights_TK, overlap, width, label)
    if overlap is not None and isinstance(dispatcher, SharedMemoryDispatcher) and can_pipeline(dispatcher):
        _check_weights(dispatcher, x_TD, ids_TK, weights_TK, label)
        shared, send = SharedDispatch.open(dispatcher, x_TD, ids_TK, overlap, label=label)
        if shared.chunks == 1:
            return SerialCall(dispatcher, shared.dispatch_at_once(send, x_TD), weights_TK)
        return PipelinedCall(shared, lambda _: send, x_TD, weights_TK)
    return SerialCall(dispatcher, dispatcher.dispatch(x_TD, ids_TK, label=label), weights_TK)


def _in_chunks(
    dispatcher: AllToAllDispatcher,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    overlap: Overlap,
    width: int,
    label: str,
) -> ExpertCall:
    overlap.check_fused("a whole expert layer")
    _check_weights(dispatcher, x_TD, ids_TK, weights_TK, label)
    weights_grad = torch.is_grad_enabled() and weights_TK.requires_grad
    first = FIRST_PRODUCTS * width
    dispatch = ChunkedDispatch.open(
        dispatcher, x_TD, ids_TK, overlap, width=first, width_back=width, weights_grad=weights_grad, label=label
    )
    if dispatch.small:
        return SerialCall(dispatcher, dispatch.dispatch_at_once(x_TD), weights_TK)
    return PipelinedCall(dispatch, dispatch.send, x_TD, weights_TK)


def _check_weights(dispatcher: Dispatcher, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, label: str) -> None:
    if weights_TK.shape != ids_TK.shape or weights_TK.device != x_TD.device:
        fault = InputError(
            f"weights must be {tuple(ids_TK.shape)} on {x_TD.device}, like the ids; got {tuple(weights_TK.shape)} "
            f"on {weights_TK.device}"
        )
        dispatcher.refuse(fault, x_TD, label=label)
