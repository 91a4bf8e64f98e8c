"""Grouped GEMM + combine: the experts' last product, and its results back to their tokens (COMET, layer 1).

y = sum over k of weights[t, k] * (rows @ w[e].T)        at the rank of token t

forward    rows that leave first       while the results of a chunk are in transfer, the next are computed; own last
backward   gradients sent in chunks    own rows, then each chunk as it completes: its products with w[e], and with the
                                       results, which are the gradient of the weights; grad.T @ rows fills the waits

COMET cuts the columns, so that the first sums of a token can be taken, and sent, after one slice of all its experts.
Here the rows themselves go back, which keeps the bits at every number of ranks, and they can go as soon as they are
computed, expert after expert, with whole products. The pipelined executor (``executors/pipelined.py``) with a single
product for an expert; between CPU ranks that share memory results are read in place (``executors/shared_rows.py``).
"""

from __future__ import annotations

from torch import Tensor

from moe_comm.dispatch.types import DispatchHandle
from moe_comm.kernels.expert_mlp import ExpertLinear
from moe_comm.overlap.checks import combine_fault
from moe_comm.overlap.executors.chunked_rows import ChunkedDispatch
from moe_comm.overlap.executors.device import fused_combine
from moe_comm.overlap.executors.pipelined import pipelined_combine
from moe_comm.overlap.executors.serial import grouped
from moe_comm.overlap.executors.shared_rows import SharedDispatch


def matmul_combine(
    rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor, dispatch: ChunkedDispatch | SharedDispatch
) -> Tensor:
    """[T, D] the weighted sum of each token's experts. Collective; differentiable once.

    Args:
        rows_RF: [R, F] of this rank's experts, as ``dispatch_matmul`` gave them.
        w_EDF: [E, D, F] of the same dtype; D is the width of the rows that were dispatched.
        weights_TK: [T, K] routing weights.
        dispatch: what ``dispatch_matmul`` returned.

    Raises:
        InputError: something does not fit; on every rank if the dispatcher is checked.
        RankMismatch: ranks differ in what they do, or in whether weights need a gradient; if it is checked.
        PeerDied, PeerTimeout: a rank failed, or did not call in time.
    """
    handle, experts = dispatch.handle, ExpertLinear((w_EDF,))
    fault = combine_fault(dispatch.dispatcher, handle, rows_RF, w_EDF, weights_TK)
    if fault is not None:
        dispatch.refuse("combine", fault)
    if isinstance(dispatch, ChunkedDispatch) and dispatch.fused is not None:
        return fused_combine(dispatch, rows_RF, w_EDF, weights_TK)
    if all(each.chunks == 1 for each in dispatch.each_way("matmul_combine", rows_RF.shape[1])):
        results_RD = grouped(experts, rows_RF, handle.rows_per_expert)
        return dispatch.dispatcher.combine(results_RD, weights_TK, handle)
    return pipelined_combine(dispatch, rows_RF, experts, weights_TK)


def reference(rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor, dispatch: ChunkedDispatch | SharedDispatch) -> Tensor:
    """One step after the other: the bits that ``matmul_combine`` must give."""
    handle: DispatchHandle = dispatch.handle
    results_RD = grouped(ExpertLinear((w_EDF,)), rows_RF, handle.rows_per_expert)
    return dispatch.dispatcher.combine(results_RD, weights_TK, handle)
