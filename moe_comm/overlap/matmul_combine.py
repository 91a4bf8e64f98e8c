"""Grouped GEMM + combine: the last GEMM of the experts, and the sum of each token's results (COMET, layer 1).

y = sum over k of weights[t, k] * (rows @ w[e].T)        on the rank of token t

forward    Rows of other ranks come first, in chunks: while the results of a chunk are sent, the next chunk is computed.
           Own rows are last.
backward   Gradients are sent in chunks. Own rows come first, then each chunk as it completes: its GEMMs with w[e], and
           its dot products with the results (for the gradient of weights). grad.T @ rows fills the waits.

COMET cuts the results along columns, so that sums of a token can start after one slice of all its experts. Here each
result row is returned and summed by the token's rank, so the bits are the same for every number of ranks. Rows can be
sent as soon as they are computed, expert by expert, with whole GEMMs.

This is the pipelined executor (``executors/pipelined.py``) with one GEMM for each expert. CPU ranks that share memory
read results in place (``executors/shared_rows.py``).
"""

from __future__ import annotations

from torch import Tensor

from moe_comm.dispatch.expert_call import grouped
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import InputError
from moe_comm.kernels.expert_mlp import ExpertLinear
from moe_comm.overlap.checks import combine_fault
from moe_comm.overlap.executors.chunked_rows import ChunkedDispatch
from moe_comm.overlap.executors.device import device_matmul_combine
from moe_comm.overlap.executors.pipelined import pipelined_combine
from moe_comm.overlap.executors.shared_rows import SharedDispatch
from moe_comm.overlap.executors.transport import RowDispatch
from moe_comm.runtime.memory import as_tensors


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
    fault = fault or combine_fault(dispatch.dispatcher, handle, rows_RF, w_EDF, weights_TK)
    if fault is not None:
        dispatch.refuse("combine", fault)
    if isinstance(dispatch, SharedDispatch) and dispatch.on_device:
        return device_matmul_combine(dispatch, rows_RF, w_EDF, weights_TK)
    if all(direction.chunks == 1 for direction in dispatch.per_direction("matmul_combine", rows_RF.shape[1])):
        results_RD = grouped(experts, rows_RF, handle.rows_per_expert)
        return dispatch.dispatcher.combine(results_RD, weights_TK, handle)
    return pipelined_combine(dispatch, rows_RF, experts, weights_TK)


def reference(rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor, dispatch: ChunkedDispatch | SharedDispatch) -> Tensor:
    """Compute the forward pass serially. ``matmul_combine`` has the same bits."""
    handle: DispatchHandle = dispatch.handle
    results_RD = grouped(ExpertLinear((w_EDF,)), rows_RF, handle.rows_per_expert)
    return dispatch.dispatcher.combine(results_RD, weights_TK, handle)
