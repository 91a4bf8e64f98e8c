"""Autocast for custom operators, with the rules of ``nn.Linear``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a GEMM with ``x``: the autocast dtype if autocast is enabled, else that of ``x``.

    float64 stays float64, as in torch's autocast.
    """
    kind = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def cast_parameter(p: Tensor, x: Tensor) -> Tensor:
    """Return ``p`` in ``compute_dtype(x)`` under autocast; without autocast return ``p``."""
    if not torch.is_autocast_enabled(x.device.type) or p.dtype == torch.float64:
        return p
    return p.to(compute_dtype(x))


def without_autocast(x: Tensor) -> Any:
    """Return a context in which autocast is disabled for the device of ``x``.

    If it is disabled already, the context does nothing, because entering one takes as long as a small GEMM.
    """
    kind = x.device.type
    disabled = kind == "meta" or not torch.is_autocast_enabled(kind)
    return _NOTHING if disabled else torch.autocast(kind, enabled=False)


_NOTHING = nullcontext()
