"""Input checks of ``dispatch_matmul`` and ``matmul_combine``, for all executors."""

from __future__ import annotations

from torch import Tensor

from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import InputError


def weights_fault(dispatcher: Dispatcher, w_EGD: Tensor, rows: Tensor, operator: str) -> InputError | None:
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


def combine_fault(
    dispatcher: Dispatcher, handle: DispatchHandle, rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor
) -> InputError | None:
    """Return the error if the arguments of ``matmul_combine`` do not match the dispatch handle, else None."""
    if (fault := weights_fault(dispatcher, w_EDF, rows_RF, "matmul_combine")) is not None:
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
