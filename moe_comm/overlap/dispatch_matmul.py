"""Dispatch + grouped GEMM: tokens to the experts' first product (COMET, arXiv 2502.19811, layer 0).

h = dispatch(x) @ w[e].T              expert by expert, on the rank that holds it

forward    rows are sent in chunks    products of the own rows, then of each chunk as it completes
backward   grad @ w[e] of what        while the gradients of a chunk are in transfer, the next are computed; then own
           is sent first              rows, and grad.T @ rows of every expert, whole: one product each

The pipelined executor (``executors/pipelined.py``) with a single product for an expert. Between CPU ranks that share
memory rows are not sent, but written and read in place (``executors/shared_rows.py``).
"""

from __future__ import annotations

from torch import Tensor

from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.backends.shared_memory import SharedMemoryDispatcher
from moe_comm.dispatch.base import Dispatcher
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.kernels.expert_mlp import ExpertLinear
from moe_comm.overlap.checks import weights_fault
from moe_comm.overlap.executors.chunked_rows import ChunkedDispatch
from moe_comm.overlap.executors.device import fused_choice, fused_dispatch, fused_fault
from moe_comm.overlap.executors.pipelined import pipelined_dispatch
from moe_comm.overlap.executors.serial import grouped
from moe_comm.overlap.executors.shared_rows import SharedDispatch
from moe_comm.overlap.options import TRITON, Overlap


def dispatch_matmul(
    dispatcher: AllToAllDispatcher | SharedMemoryDispatcher,
    x_TD: Tensor,
    ids_TK: Tensor,
    w_EGD: Tensor,
    overlap: Overlap | None = None,
    *,
    label: str = "",
) -> tuple[Tensor, ChunkedDispatch | SharedDispatch]:
    """Send each token to its K experts and multiply it there with the expert's weights. Collective.

    Args:
        dispatcher: ``all_to_all``, whose rows are sent in chunks, or ``shared_memory``, whose rows are written and read
            in place; chunks are groups of peers then.
        x_TD: [T, D] as ``Dispatcher.dispatch`` takes it. ids_TK: [T, K] global expert ids; -1 drops the slot.
        w_EGD: [E, G, D] of this rank's experts, of the same dtype.
        overlap: backend and chunks; the result has the same bits for every number of them, and so have the gradients;
            Triton's kernels have their own. One chunk is one step after the other.
        label: name of the layer, for error messages.

    Returns:
        h_RG: [R, G] for the rows of this rank's experts, by (expert, source rank, token, slot).
        dispatch: what ``matmul_combine`` needs to bring them back; ``dispatch.handle`` is the dispatch handle.

    Raises:
        ConfigError: a dispatcher that does not overlap. With MissingDependency: Triton is asked for and cannot run
            here; the message says what to do.
        InputError, RoutingError, RankMismatch: on every rank, before rows move.
        PeerDied, PeerTimeout: a rank failed, or did not call in time.
    """
    overlap, width, experts = overlap or Overlap(), w_EGD.shape[1], ExpertLinear((w_EGD,))
    fault: MoeCommError | None = weights_fault(dispatcher, w_EGD, x_TD, "dispatch_matmul")
    if isinstance(dispatcher, SharedMemoryDispatcher):
        if overlap.backend == TRITON:
            fault = fault or ConfigError("Triton's kernels move rows between GPUs; shared_memory is for ranks on CPUs")
        if fault is not None:
            dispatcher.refuse(fault, x_TD, label=label)
        shared, send = SharedDispatch.open(dispatcher, x_TD, ids_TK, overlap, label=label)
        if shared.chunks == 1:
            rows_RD = shared.dispatch_at_once(send, x_TD).rows_RD
            return grouped(experts, rows_RD, shared.handle.rows_per_expert), shared
        return pipelined_dispatch(shared, lambda _: send, x_TD, experts), shared
    fault = fault or fused_fault(dispatcher, x_TD, overlap)
    if fault is not None:
        dispatcher.refuse(fault, x_TD, label=label)
    dispatch = ChunkedDispatch.open(dispatcher, x_TD, ids_TK, overlap, width=width, label=label)
    if (choice := fused_choice(dispatch, "dispatch_matmul", width)) is not None:
        return fused_dispatch(dispatch, x_TD, ids_TK, w_EGD, choice)
    if all(each.chunks == 1 for each in dispatch.each_way("dispatch_matmul", width)):
        rows_RD = dispatch.dispatch_at_once(x_TD).rows_RD
        return grouped(experts, rows_RD, dispatch.handle.rows_per_expert), dispatch
    forward, _ = dispatch.each_way("dispatch_matmul", width)
    return pipelined_dispatch(dispatch, forward.send, x_TD, experts), dispatch


def reference(dispatcher: Dispatcher, x_TD: Tensor, ids_TK: Tensor, w_EGD: Tensor, *, label: str = "") -> Tensor:
    """One step after the other: the bits that ``dispatch_matmul`` must give."""
    dispatched = dispatcher.dispatch(x_TD, ids_TK, label=label)
    return grouped(ExpertLinear((w_EGD,)), dispatched.rows_RD, dispatched.handle.rows_per_expert)
