"""Access to the native core (``moe_comm._C``), and allocation of large buffers in memory whose pages stay mapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_comm.errors import MissingDependency

if TYPE_CHECKING:
    from moe_comm import _C

from_capsule: Callable[[Any], Tensor] = getattr(torch._C, "_from_dlpack", torch.from_dlpack)
"""Return a tensor of a DLPack capsule. ``torch.from_dlpack`` calls it after protocol checks that a capsule skips."""
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def native() -> ModuleType:
    """Return the native core."""
    try:
        from moe_comm import _C  # may not be built
    except ImportError as error:
        raise MissingDependency(
            f"the native core moe_comm._C is not built ({error}); run `pip install -e .`"
        ) from error
    return _C


@lru_cache(maxsize=1)
def native_is_built() -> bool:
    """Whether this process has the native core."""
    try:
        native()
    except MissingDependency:
        return False
    return True


@lru_cache(maxsize=1)
def private_heap() -> _C.Heap:
    """Return this process's heap of private memory, for dispatch within one rank.

    Its pages stay mapped: faulting in new pages costs more than the copies into them.
    """
    heap: _C.Heap = native().Heap("")
    return heap


def block(heap: _C.Heap, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised [rows, width] tensor in ``heap``. The memory is freed with the tensor, on any thread."""
    if rows == 0 or width == 0:
        return torch.empty(rows, width, dtype=dtype, device="cpu")
    return from_capsule(heap.tensor(rows, width, DTYPE_CODES[dtype]))


WARM_BYTES = 128 << 10
"""malloc keeps the pages of smaller tensors mapped (its mmap threshold)."""


def warm_rows(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised [rows, width] tensor. On the CPU its pages are mapped already, if it is large."""
    size = rows * width * dtype.itemsize
    if size < WARM_BYTES or device.type != "cpu" or not native_is_built():
        return torch.empty(rows, width, dtype=dtype, device=device)
    if dtype in DTYPE_CODES:
        return block(private_heap(), rows, width, dtype)
    words = block(private_heap(), 1, -(-size // 4), torch.float32).view(-1).view(torch.uint8)
    return words[:size].view(dtype).view(rows, width)


def warm_like(x: Tensor) -> Tensor:
    """Return an uninitialised tensor with the shape and strides of ``x``, as ``warm_rows``. ``x`` must be dense."""
    if x.is_contiguous() and x.numel():
        return warm_rows(x.numel() // x.shape[-1], x.shape[-1], x.dtype, x.device).view(x.shape)
    if x.dim() == 3 and x.transpose(1, 2).is_contiguous() and x.numel():
        return warm_like(x.transpose(1, 2)).transpose(1, 2)
    return torch.empty_like(x)


def take(rows_RX: Tensor, index_N: Tensor) -> Tensor:
    """Return the rows at ``index_N`` (int64) as [N, X], in memory of ``warm_rows``. No autograd."""
    out_NX = warm_rows(index_N.shape[0], rows_RX.shape[1], rows_RX.dtype, rows_RX.device)
    return torch.index_select(rows_RX, 0, index_N, out=out_NX)


def as_dtype(dtype: torch.dtype, rows_RX: Tensor) -> Tensor:
    """Return the bytes of rows [R, X] as another dtype, without a copy if the rows are contiguous.

    Torch does not view a tensor as another dtype if its last stride is not 1, even if that stride has no effect: with
    at most one element, or with one column. So the strides are set here.
    """
    width = rows_RX.shape[1] * rows_RX.element_size() // dtype.itemsize
    return rows_RX.contiguous().as_strided((rows_RX.numel(),), (1,)).view(dtype).view(rows_RX.shape[0], width)
