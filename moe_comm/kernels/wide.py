"""The precision in which sums are taken, and a sum over ranks that does not depend on who takes it."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over ``dtype`` are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def added_in_order(parts_W: Tensor) -> Tensor:
    """Sum over the first dimension in order of rank, in wide precision, rounded once; exact for integers."""
    wide = wide_dtype(parts_W.dtype) if parts_W.is_floating_point() else torch.int64
    total = parts_W[0].to(wide, copy=True)
    for part in parts_W[1:]:
        total += part
    return total.to(parts_W.dtype)
