"""Dispatch + grouped GEMM: tokens to the first GEMM of their experts (COMET, arXiv 2502.19811, layer 0).

h = dispatch(x) @ w[e].T              expert by expert, on the rank of the expert

forward    rows are sent in chunks    GEMMs of the own rows, then of each chunk as it completes
backward   grad @ w[e] of the chunk   while the gradients of a chunk are in flight, the next are computed; then own
           that is sent first         rows, and one GEMM grad.T @ rows for each expert

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
from moe_comm.errors import MoeCommError
from moe_comm.kernels.expert_mlp import ExpertLinear
from moe_comm.overlap.checks import weights_fault
from moe_comm.overlap.executors.chunked_rows import ChunkedDispatch
from moe_comm.overlap.executors.device import device_dispatch_matmul, device_fault
from moe_comm.overlap.executors.pipelined import pipelined_dispatch
from moe_comm.overlap.executors.shared_rows import SharedDispatch
from moe_comm.overlap.options import TRITON, Overlap


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
    fault: MoeCommError | None = weights_fault(dispatcher, w_EGD, x_TD, "dispatch_matmul")
    if overlap.backend == TRITON:
        fault = fault or device_fault(dispatcher, x_TD)
    if fault is not None:
        dispatcher.refuse(fault, x_TD, label=label)
    width = w_EGD.shape[1]
    if overlap.backend == TRITON:
        assert isinstance(dispatcher, OverlappedPrimitives)
        return device_dispatch_matmul(dispatcher, x_TD, ids_TK, w_EGD, overlap, label)
    if isinstance(dispatcher, PendingDispatcher):
        shared, send = SharedDispatch.open(dispatcher, x_TD, ids_TK, overlap, label=label)
        if shared.chunks == 1:
            rows_RD = shared.dispatch_at_once(send, x_TD).rows_RD
            return grouped(experts, rows_RD, shared.handle.rows_per_expert), shared
        return pipelined_dispatch(shared, lambda _: send, x_TD, experts), shared
    dispatch = ChunkedDispatch.open(dispatcher, x_TD, ids_TK, overlap, width=width, label=label)
    forward, backward = dispatch.per_direction("dispatch_matmul", width)
    if forward.chunks == backward.chunks == 1:
        rows_RD = dispatch.dispatch_at_once(x_TD).rows_RD
        return grouped(experts, rows_RD, dispatch.handle.rows_per_expert), dispatch
    return pipelined_dispatch(dispatch, forward.send, x_TD, experts), dispatch


def reference(dispatcher: Dispatcher, x_TD: Tensor, ids_TK: Tensor, w_EGD: Tensor, *, label: str = "") -> Tensor:
    """Compute the forward pass serially. ``dispatch_matmul`` has the same bits."""
    dispatched = dispatcher.dispatch(x_TD, ids_TK, label=label)
    return grouped(ExpertLinear((w_EGD,)), dispatched.rows_RD, dispatched.handle.rows_per_expert)
