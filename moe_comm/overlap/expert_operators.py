"""Dispatch + grouped GEMM, and grouped GEMM + combine: the first and the last GEMM of experts, overlapped with the
transfer of their rows (COMET, arXiv 2502.19811, layers 0 and 1).

dispatch_matmul    h = dispatch(x) @ w[e].T                             expert by expert, on the rank of the expert
matmul_combine     y = sum over k of weights[t, k] * (rows @ w[e].T)    on the rank of token t

dispatch_matmul
    forward    rows are sent in chunks: GEMMs of the own rows, then of each chunk as it completes
    backward   grad @ w[e] of the chunk that is sent first; while the gradients of a chunk are in flight, the next are
               computed; then own rows, and one GEMM grad.T @ rows for each expert
matmul_combine
    forward    rows of other ranks come first, in chunks: while the results of a chunk are sent, the next chunk is
               computed; own rows are last
    backward   gradients are sent in chunks. Own rows come first, then each chunk as it completes: its GEMMs with w[e],
               and its dot products with the results (for the gradient of weights). grad.T @ rows fills the waits

COMET cuts the results along columns, so that sums of a token can start after one slice of all its experts. Here each
result row is returned and summed by the token's rank, so the bits are the same for every number of ranks. Rows can be
sent as soon as they are computed, expert by expert, with whole GEMMs.

This is the pipelined executor (``executors/pipelined.py``) with one GEMM for each expert. CPU ranks that share memory
write and read rows in place instead (``executors/shared_rows.py``).
"""

from __future__ import annotations

from torch import Tensor

from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.expert_call import grouped
from moe_comm.dispatch.peer_to_peer.overlapped import OverlappedPrimitives
from moe_comm.dispatch.pending import PendingDispatcher
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import InputError, MoeCommError
from moe_comm.kernels.expert_mlp import ExpertLinear
from moe_comm.overlap.executors.chunked_rows import ChunkedDispatch
from moe_comm.overlap.executors.device import device_fault
from moe_comm.overlap.executors.pipelined import pipelined_combine, pipelined_dispatch
from moe_comm.overlap.executors.shared_rows import SharedDispatch
from moe_comm.overlap.executors.transport import RowDispatch, pipelined_fault
from moe_comm.overlap.options import TRITON, Overlap
from moe_comm.runtime.memory import as_tensors


def dispatch_matmul(
    dispatcher: AllToAllDispatcher | PendingDispatcher,
    x_TD: Tensor,
    ids_TK: Tensor,
    w_EGD: Tensor,
    overlap: Overlap | None = None,
    *,
    label: str = "",
) -> tuple[Tensor, ChunkedDispatch | SharedDispatch]:
    """Dispatch each token to its K experts and multiply it there by the expert's weight. Collective.

    Args:
        dispatcher: ``all_to_all``, whose rows are sent in chunks, or ``shared_memory`` or ``peer_to_peer``, whose rows
            are written and read in place; chunks are groups of peers there.
        x_TD: [T, D] as for ``Dispatcher.dispatch``.
        ids_TK: [T, K] global expert ids; -1 drops the slot.
        w_EGD: [E, G, D] weights of this rank's experts, in the dtype of ``x_TD``.
        overlap: Backend and chunks. The result and the gradients have the same bits for every number of chunks;
            Triton kernels have their own bits. One chunk runs serially.
        label: Name of the layer, for error messages.

    Returns:
        h_RG: [R, G] for the rows of this rank's experts, by (expert, source rank, token, slot).
        dispatch: The argument of ``matmul_combine``. ``dispatch.handle`` is the dispatch handle.

    Raises:
        ConfigError: the dispatcher does not support overlap, or Triton is requested and cannot run here; the message
            says what to do.
        MissingDependency: Triton is requested and not installed.
        InputError, RoutingError, RankMismatch: on every rank, before rows move.
        PeerDied, PeerTimeout: a rank failed or did not call in time.
    """
    x_TD, ids_TK, w_EGD = dispatcher.readable(label, x=x_TD, ids=ids_TK, w=w_EGD)
    overlap, experts = overlap or Overlap(), ExpertLinear((w_EGD,))
    fault: MoeCommError | None = _weights_fault(dispatcher, w_EGD, x_TD, "dispatch_matmul")
    fault = fault or (device_fault(dispatcher, x_TD) if overlap.backend == TRITON else pipelined_fault(dispatcher))
    if fault is not None:
        dispatcher.refuse(fault, x_TD, label=label)
    width = w_EGD.shape[1]
    if overlap.backend == TRITON:
        assert isinstance(dispatcher, OverlappedPrimitives)
        from moe_comm.overlap.executors.device_rows import DeviceDispatch  # needs Triton

        on_device, send = DeviceDispatch.start(dispatcher, x_TD, ids_TK, overlap, label)
        return pipelined_dispatch((on_device, on_device), send, x_TD, experts), on_device
    if isinstance(dispatcher, PendingDispatcher):
        shared, send = SharedDispatch.open(dispatcher, x_TD, ids_TK, overlap, label=label)
        if shared.chunks == 1:
            rows_RD = shared.dispatch_at_once(send, x_TD).rows_RD
            return grouped(experts, rows_RD, shared.handle.rows_per_expert), shared
        return pipelined_dispatch((shared, shared), send, x_TD, experts), shared
    dispatch = ChunkedDispatch.open(dispatcher, x_TD, ids_TK, overlap, width=width, label=label)
    forward, backward = dispatch.per_direction("dispatch_matmul", width)
    if forward.chunks == backward.chunks == 1:
        rows_RD = dispatch.dispatch_at_once(x_TD).rows_RD
        return grouped(experts, rows_RD, dispatch.handle.rows_per_expert), dispatch
    return pipelined_dispatch((forward, backward), forward.send(x_TD.detach()), x_TD, experts), dispatch


def matmul_combine(
    rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor, dispatch: ChunkedDispatch | SharedDispatch
) -> Tensor:
    """Multiply rows by their expert's weight and sum each token's results. Collective; differentiable once.

    Args:
        rows_RF: [R, F] rows of this rank's experts, in the order of ``dispatch_matmul``.
        w_EDF: [E, D, F] weights of the same dtype. D is the width of the rows that were dispatched.
        weights_TK: [T, K] routing weights.
        dispatch: The dispatch that ``dispatch_matmul`` returned.

    Returns:
        [T, D] the weighted sum of each token's experts.

    Raises:
        InputError: arguments do not match; raised on every rank if the dispatcher is checked.
        RankMismatch: ranks make different calls, or differ in whether weights need a gradient; if it is checked.
        PeerDied, PeerTimeout: a rank failed or did not call in time.
    """
    if not isinstance(dispatch, RowDispatch):  # without it there are no ranks to report to
        raise InputError(f"dispatch must be the result of dispatch_matmul; got {type(dispatch).__name__}")
    (rows_RF, w_EDF, weights_TK), fault = as_tensors(rows=rows_RF, w=w_EDF, weights=weights_TK)
    handle, experts = dispatch.handle, ExpertLinear((w_EDF,))
    fault = fault or _combine_fault(dispatch.dispatcher, handle, rows_RF, w_EDF, weights_TK)
    if fault is not None:
        dispatch.refuse("combine", fault)
    directions = dispatch.per_direction("matmul_combine", rows_RF.shape[1])
    if dispatch.experts_function is None and all(direction.chunks == 1 for direction in directions):
        results_RD = grouped(experts, rows_RF, handle.rows_per_expert)
        return dispatch.dispatcher.combine(results_RD, weights_TK, handle)
    return pipelined_combine(directions, rows_RF, experts, weights_TK)


def _weights_fault(dispatcher: Dispatcher, w_EGD: Tensor, rows: Tensor, operator: str) -> InputError | None:
    """Return the error if the weights of the dispatcher's experts do not match ``rows`` [.., D], else None."""
    experts = len(dispatcher.local_experts)
    if not rows.dim():
        return InputError(f"{operator} needs rows [.., D]; got a scalar")
    fits = w_EGD.dim() == 3 and w_EGD.shape[0] == experts and w_EGD.shape[2] == rows.shape[-1]
    if fits and w_EGD.dtype == rows.dtype and w_EGD.device == rows.device:
        return None
    return InputError(
        f"{operator} needs weights [{experts}, .., {rows.shape[-1]}] of this rank's experts for rows of {rows.dtype} "
        f"on {rows.device}; got {tuple(w_EGD.shape)} {w_EGD.dtype} on {w_EGD.device}"
    )


def _combine_fault(
    dispatcher: Dispatcher, handle: DispatchHandle, rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor
) -> InputError | None:
    """Return the error if the arguments of ``matmul_combine`` do not match the dispatch handle, else None."""
    if (fault := _weights_fault(dispatcher, w_EDF, rows_RF, "matmul_combine")) is not None:
        return fault
    if (
        rows_RF.dim() != 2
        or rows_RF.shape[0] != handle.num_rows
        or w_EDF.shape[1] != handle.hidden
        or rows_RF.dtype != handle.dtype
    ):
        return InputError(
            f"matmul_combine needs rows [{handle.num_rows}, F] {handle.dtype} and weights [E, {handle.hidden}, F]; got "
            f"{tuple(rows_RF.shape)} {rows_RF.dtype} and {tuple(w_EDF.shape)}"
        )
    if tuple(weights_TK.shape) != (handle.num_tokens, handle.top_k) or weights_TK.is_complex():
        return InputError(
            f"matmul_combine needs real weights [{handle.num_tokens}, {handle.top_k}]; got {weights_TK.dtype} "
            f"{tuple(weights_TK.shape)}"
        )
    if rows_RF.device != handle.device or weights_TK.device != handle.device:
        return InputError(
            f"matmul_combine needs rows and weights on {handle.device}; got rows on {rows_RF.device} and weights on "
            f"{weights_TK.device}"
        )
    return None
