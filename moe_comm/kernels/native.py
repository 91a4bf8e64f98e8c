"""When an operator may hand its tensors to the native core by address."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn


@lru_cache(maxsize=1)
def core() -> Any:
    """The native core, or None where it is not built; plain torch then runs instead."""
    try:
        from moe_comm import _C
    except ImportError:
        return None
    return _C


def on_host(*tensors: Tensor) -> bool:
    """Whether all are plain tensors in this host's memory, and the core is there to take them.

    Not so for subclasses (fake tensors, DTensor) and while a compiler traces: those have no addresses.
    """
    return (
        all(type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu" for t in tensors)
        and not torch.compiler.is_compiling()
        and core() is not None
    )
