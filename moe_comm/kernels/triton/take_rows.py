"""Gather rows by index, and copy each row to several places; of any dtype and width.

    take_rows      y[r] = x[index[r]]                     reference: ``x_ND[index_R]``
    copy_rows      y[place[t, k]] = x[t]                  the K copies are made one after the other: x[t] is cached

Rows are copied as words of up to 8 bytes, which the compiler combines into accesses of 16 bytes.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.triton.device import int64
from moe_comm.kernels.triton.launch import check_index, check_tensors, launch, tile

TILE_WORDS = 1024
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def take_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, x_stride,
    index_ptr,  # [rows] int64 row of x; if TOP_K, row of y
    y_ptr,  # [.., width] dense
    rows, width,
    TOP_K: tl.constexpr,  # 0, or the number of rows of y for each row of x
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy ROWS rows per program. Rows with a negative index are zeros; if TOP_K, they are not copied."""
    row = int64(tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    index = tl.load(index_ptr + row, mask=live, other=-1)
    if TOP_K:
        live = index >= 0
        to = index
        index = tl.where(live, row // TOP_K, -1)
    else:
        to = row
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (column < width)[None, :]
        word = tl.load(
            x_ptr + (index * x_stride)[:, None] + column[None, :], mask=inside & (index >= 0)[:, None], other=0
        )
        tl.store(y_ptr + (to * width)[:, None] + column[None, :], word, mask=inside & live[:, None])


def take_rows(x_ND: Tensor, index_R: Tensor) -> Tensor:
    """Return [R, D], the rows of ``x_ND`` at ``index_R``; zeros where the index is -1. No autograd.

    Args:
        x_ND: [N, D] of any dtype; dense rows, any row stride.
        index_R: [R] int64 below N. Not checked, because a check would wait for the device.
    """
    check_tensors("take_rows", x_ND, index_R)
    check_index("take_rows", "index", index_R, (-1,))
    _check_dense("take_rows", x_ND)
    y_RD = torch.empty(index_R.shape[0], x_ND.shape[1], dtype=x_ND.dtype, device=x_ND.device)
    if not x_ND.shape[0]:
        return y_RD.zero_()
    _launch(x_ND, index_R, y_RD, 0)
    return y_RD


def copy_rows(x_TD: Tensor, place_TK: Tensor, num_rows: int, out_RD: Tensor | None = None) -> Tensor:
    """Return [num_rows, D], with ``x_TD[t]`` at row ``place_TK[t, k]``. No autograd.

    Args:
        x_TD: [T, D] of any dtype; dense rows, any row stride.
        place_TK: [T, K] int64 row of each slot, below ``num_rows``, or -1. Not checked, as in ``take_rows``. Rows
            without a slot are not initialised.
        out_RD: [num_rows, D] contiguous memory of the same dtype for the result, or None.
    """
    check_tensors("copy_rows", x_TD, place_TK)
    check_index("copy_rows", "places", place_TK, (x_TD.shape[0], -1))
    _check_dense("copy_rows", x_TD)
    shape = num_rows, x_TD.shape[1]
    y_RD = torch.empty(shape, dtype=x_TD.dtype, device=x_TD.device) if out_RD is None else out_RD
    if y_RD.shape != shape or y_RD.dtype != x_TD.dtype or not y_RD.is_contiguous():
        raise InputError(
            f"copy_rows needs contiguous out {shape} of {x_TD.dtype}; got {tuple(y_RD.shape)}, {y_RD.dtype}"
        )
    _launch(x_TD, place_TK, y_RD, place_TK.shape[1])
    return y_RD


def _check_dense(operator: str, x_ND: Tensor) -> None:
    if x_ND.dim() != 2 or (x_ND.numel() and x_ND.shape[1] > 1 and x_ND.stride(1) != 1):
        raise InputError(f"{operator} needs dense rows [N, D]; got {tuple(x_ND.shape)} with strides {x_ND.stride()}")


def _launch(x_ND: Tensor, index: Tensor, y_RD: Tensor, top_k: int) -> None:
    if not y_RD.numel() or not index.numel():
        return
    x_stride = x_ND.stride(0) * x_ND.element_size()
    row_bytes = x_ND.shape[1] * x_ND.element_size()
    size = gcd(x_ND.data_ptr(), x_stride, row_bytes, x_ND.storage_offset() * x_ND.element_size(), 8)
    if x_ND.stride(1) != 1:  # one column: view() needs a unit stride
        x_ND = x_ND.as_strided(x_ND.shape, (x_ND.stride(0), 1))
    x, y = x_ND.view(_WORDS[size]), y_RD.view(_WORDS[size])
    rows, columns = tile(y.shape[1], TILE_WORDS)
    launch(
        take_rows_kernel, (-(-index.numel() // rows),), x,
        (x, x.stride(0), index, y, index.numel(), y.shape[1]),
        TOP_K=top_k, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
