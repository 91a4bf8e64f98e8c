"""Checks of the arguments of a dispatcher's operations. A fault is reported to the other ranks before it is raised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_comm.comm.header import DTYPES
from moe_comm.dispatch.types import DROPPED, DispatchHandle, routing_error
from moe_comm.errors import InputError, MoeCommError
from moe_comm.kernels.fp8 import BLOCK

ID_DTYPES = (torch.int64, torch.int32)
EXTRA_DTYPES = (torch.float32, torch.int32)


def dispatch_fault(x_TD: Tensor, ids_TK: Tensor, num_experts: int | None) -> MoeCommError | None:
    """Return the error of invalid tensors of a dispatch, or None. num_experts None: the range of ids is not checked."""
    if x_TD.dim() != 2 or ids_TK.dim() != 2 or x_TD.shape[0] != ids_TK.shape[0]:
        return InputError(f"dispatch needs x [T, D] and ids [T, K]; got {tuple(x_TD.shape)} and {tuple(ids_TK.shape)}")
    if x_TD.dtype not in DTYPES:
        return InputError(f"rows must be float32, bfloat16, float16 or float64; got {x_TD.dtype}")
    if ids_TK.dtype not in ID_DTYPES:
        return InputError(f"expert ids must be int64 or int32; got {ids_TK.dtype}")
    if x_TD.device != ids_TK.device:
        return InputError(f"x is on {x_TD.device} but the expert ids are on {ids_TK.device}")
    if ids_TK.shape[1] < 1:
        return InputError("top-k must be at least 1; got ids of width 0")
    if num_experts is None or not ids_TK.numel():
        return None
    low, high = (int(v) for v in torch.aminmax(ids_TK))
    if low >= DROPPED and high < num_experts:
        return None
    return routing_error(ids_TK, num_experts)


def tokens_fault(x: Tensor, hidden: int) -> InputError | None:
    """Return the error of invalid tokens [..., D] of a layer with this hidden size, or None."""
    if x.dim() and x.shape[-1] == hidden and x.dtype in DTYPES:
        return None
    return InputError(f"this layer's hidden size is {hidden}; got x {tuple(x.shape)} {x.dtype}, must be floating-point")


def scaled_fault(x_TD: Tensor) -> InputError | None:
    """Return why the rows of a dispatch cannot be ``scaled``."""
    if x_TD.dim() == 2 and x_TD.shape[1] and not x_TD.shape[1] % BLOCK:
        return None
    return InputError(
        f"scaled rows have one scale per {BLOCK} channels, so D must be a positive multiple of {BLOCK}; got x "
        f"{tuple(x_TD.shape)}. Dispatch without scaled (expert_gemm_dtype='same'), or change the hidden size"
    )


def extra_fault(extra_TKX: Tensor, slots: tuple[int, ...], device: torch.device) -> InputError | None:
    """Return the error of invalid extra values of slots [T, K], or None."""
    got = type(extra_TKX).__name__
    if isinstance(extra_TKX, Tensor):
        shape, fits = extra_TKX.shape, extra_TKX.dtype in EXTRA_DTYPES and extra_TKX.device == device
        if fits and len(shape) == 3 and shape[:2] == slots and shape[2]:
            return None
        got = f"{extra_TKX.dtype} {list(shape)} on {extra_TKX.device}"
    return InputError(
        f"extra values must be float32 or int32 [{slots[0]}, {slots[1]}, X] on {device}, X at least 1; got {got}"
    )


def _maker_fault(maker: int, handle: Any) -> InputError | None:
    if not isinstance(handle, DispatchHandle):
        return InputError(f"the handle must come from dispatch of this dispatcher; got {type(handle).__name__}")
    if handle.maker == maker:
        return None
    return InputError(
        f"the handle of call {handle.call} belongs to another dispatcher; combine with the one that dispatched"
    )


def spread_fault(
    maker: int, x_TD: Tensor, handle: DispatchHandle, extra_TKX: Tensor | None = None
) -> InputError | None:
    """Return the error of invalid arguments of ``Dispatcher.spread``, or None. maker: id of the dispatcher."""
    if (fault := _maker_fault(maker, handle)) is not None:
        return fault
    if extra_TKX is not None:
        fault = extra_fault(extra_TKX, (handle.num_tokens, handle.top_k), handle.device)
        if fault is not None:
            return fault
        if handle.extra is None or handle.extra.width != extra_TKX.shape[2]:
            width = "none" if handle.extra is None else str(handle.extra.width)
            return InputError(f"spread got {extra_TKX.shape[2]} extra values for each slot; dispatch had {width}")
    given, expected = (
        (tuple(x_TD.shape), x_TD.dtype, x_TD.device),
        ((handle.num_tokens, handle.hidden), handle.dtype, handle.device),
    )
    if given == expected:
        return None
    return InputError(f"spread needs shape, dtype and device of the dispatched tokens, {expected}; got {given}")


def combine_fault(maker: int, rows_RD: Tensor, weights_TK: Tensor, handle: DispatchHandle) -> InputError | None:
    """Return the error of invalid arguments of ``Dispatcher.combine``, or None. maker: id of the dispatcher."""
    if not isinstance(handle, DispatchHandle) or handle.maker != maker:
        return _maker_fault(maker, handle)
    if rows_RD.shape != (handle.num_rows, handle.hidden) or rows_RD.dtype != handle.dtype:
        return InputError(
            f"combine needs rows [{handle.num_rows}, {handle.hidden}] {handle.dtype}, as returned by dispatch; "
            f"got {tuple(rows_RD.shape)} {rows_RD.dtype}"
        )
    if weights_TK.shape != (handle.num_tokens, handle.top_k):
        return InputError(f"combine needs weights [{handle.num_tokens}, {handle.top_k}]; got {tuple(weights_TK.shape)}")
    if weights_TK.is_complex():
        return InputError(f"combine needs real weights; got {weights_TK.dtype}")
    if rows_RD.device != handle.device or weights_TK.device != handle.device:
        return InputError(
            f"combine needs rows and weights on {handle.device}, the device of dispatch; "
            f"got rows on {rows_RD.device} and weights on {weights_TK.device}"
        )
    return None
