"""Where layers and operators take large buffers from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_comm.runtime.shared import native_is_built, warm

Alloc = Callable[[int, int, torch.dtype, torch.device], Tensor]
"""(rows, width, dtype, device) to an uninitialised [rows, width] tensor; ``Dispatcher.empty_rows`` is one."""


def warm_rows(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory; on the CPU with its pages mapped, as faulting in fresh ones costs more than using them."""
    if device.type == "cpu" and native_is_built():
        return warm(rows, width, dtype)
    return torch.empty(rows, width, dtype=dtype, device=device)


def warm_like(x: Tensor) -> Tensor:
    """Uninitialised tensor of the shape and strides of ``x``, as ``warm_rows``; ``x`` must be dense."""
    if x.is_contiguous() and x.numel():
        return warm_rows(x.numel() // x.shape[-1], x.shape[-1], x.dtype, x.device).view(x.shape)
    if x.dim() == 3 and x.transpose(1, 2).is_contiguous() and x.numel():
        return warm_like(x.transpose(1, 2)).transpose(1, 2)
    return torch.empty_like(x)


def take(rows_RX: Tensor, index_N: Tensor) -> Tensor:
    """[N, X] the rows at ``index_N``, int64, in memory as ``warm_rows`` gives. No autograd."""
    out_NX = warm_rows(index_N.shape[0], rows_RX.shape[1], rows_RX.dtype, rows_RX.device)
    return torch.index_select(rows_RX, 0, index_N, out=out_NX)


def as_dtype(dtype: torch.dtype, rows_RX: Tensor) -> Tensor:
    """Return the bytes of rows [R, X] as another dtype, without a copy if the rows are contiguous.

    Torch refuses to view a tensor whose last stride is not 1 even where that stride has no meaning: with no elements,
    with one, or with one column. So the strides are set here.
    """
    width = rows_RX.shape[1] * rows_RX.element_size() // dtype.itemsize
    return rows_RX.contiguous().as_strided((rows_RX.numel(),), (1,)).view(dtype).view(rows_RX.shape[0], width)
