"""Accumulation dtype, and a sum over ranks that has the same bits on every rank."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_in_rank_order(parts_W: Tensor) -> Tensor:
    """Sum over the first dimension in rank order, in the accumulation dtype, rounded once; exact for integers."""
    wide = accumulate_dtype(parts_W.dtype) if parts_W.is_floating_point() else torch.int64
    total = parts_W[0].to(wide, copy=True)
    for part in parts_W[1:]:
        total += part
    return total.to(parts_W.dtype)
