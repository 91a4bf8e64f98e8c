"""Autocast for our own operators, as it is for ``nn.Linear``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix product with ``x`` runs here: autocast's if it is on, else that of ``x``.

    float64 stays float64, as in torch's own autocast.
    """
    kind = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def cast_parameter(p: Tensor, x: Tensor) -> Tensor:
    """``p`` in ``compute_dtype(x)`` under autocast; without autocast as it is."""
    if not torch.is_autocast_enabled(x.device.type) or p.dtype == torch.float64:
        return p
    return p.to(compute_dtype(x))


def without_autocast(x: Tensor) -> Any:
    """A context in which autocast is off for the device of ``x``; meta tensors have none.

    Where it is off already, none is entered: that takes as long as a small product.
    """
    kind = x.device.type
    off = kind == "meta" or not torch.is_autocast_enabled(kind)
    return _NOTHING if off else torch.autocast(kind, enabled=False)


_NOTHING = nullcontext()
