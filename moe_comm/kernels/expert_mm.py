"""One expert's matrix product into a given place: the same bits for a row whichever rows of the expert come with it.

BLAS adds in another order for fewer than ``FEW`` rows (a vector-matrix product), and at odd addresses. So few rows are
padded, and what does not stand on a cache line is copied. Widths that are no multiple of 16 are left to
``row_invariant.py``, which rounds everything up, at the price of copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.kernels.row_invariant import TILE, row_invariant_mm

ALIGNMENT = 64
FEW = 4
"""Rows from which the kernels seen (MKL, oneDNN) give a row the same bits in every product."""


def align(x: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes slices of ``x`` along its first dimension aligned. There may be hundreds, so they are asked once."""
    return aligned if may_misalign(x) else _as_it_is


def may_misalign(x: Tensor) -> bool:
    """Whether slices of ``x`` along its first dimension may begin within a cache line, and have to be ``aligned``."""
    return x.data_ptr() % ALIGNMENT != 0 or x.stride(0) * x.element_size() % ALIGNMENT != 0


def each_expert(x_E: Tensor | None, num_experts: int) -> Sequence[Tensor | None]:
    """What each expert has of a parameter that may be missing."""
    return [None] * num_experts if x_E is None else x_E.unbind(0)


def expert_mm(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, bias_N: Tensor | None = None) -> None:
    """out = a @ b + bias. ``a`` and ``b`` are aligned. On CPUs the same bits for a row of ``a`` for every M."""
    rows = a_MK.shape[0]
    whole = a_MK.device.type != "cpu" or not (a_MK.shape[1] % TILE or out_MN.shape[1] % TILE)
    if whole and rows >= FEW and out_MN.data_ptr() % ALIGNMENT == 0:
        if bias_N is None:
            torch.mm(a_MK, b_KN, out=out_MN)
        else:
            torch.addmm(bias_N, a_MK, b_KN, out=out_MN)
    elif not whole:
        row_invariant_mm(a_MK, b_KN, out_MN)
        if bias_N is not None:
            out_MN.add_(bias_N)
    elif rows < FEW:
        padded = out_MN.new_empty(FEW, out_MN.shape[1])
        _mm(F.pad(a_MK, (0, 0, 0, FEW - rows)), b_KN, padded, bias_N)
        out_MN.copy_(padded[:rows])
    else:
        product_into(a_MK, b_KN, out_MN, bias_N)


def product_into(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, bias_N: Tensor | None = None) -> None:
    """out = a @ b + bias, where M is no number of rows: for gradients of weights."""
    into = out_MN if out_MN.data_ptr() % ALIGNMENT == 0 else torch.empty_like(out_MN)
    _mm(a_MK, b_KN, into, bias_N)
    if into is not out_MN:
        out_MN.copy_(into)


def _mm(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, bias_N: Tensor | None) -> None:
    if bias_N is None:
        torch.mm(a_MK, b_KN, out=out_MN)
    else:
        torch.addmm(bias_N, a_MK, b_KN, out=out_MN)


def aligned(x: Tensor) -> Tensor:
    """``x``, or a copy that begins on a cache line."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def _as_it_is(x: Tensor) -> Tensor:
    return x
