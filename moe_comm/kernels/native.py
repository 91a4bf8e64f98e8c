"""When an operator may hand its tensors to the native core by address, or to a Triton kernel."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

TRITON_DEVICES = {"cuda"}
"""Kinds of device whose tensors Triton kernels take, where Triton is installed. Tests that interpret kernels add "cpu";
a comparison with plain torch takes "cuda" out."""


@lru_cache(maxsize=1)
def core() -> Any:
    """The native core, or None where it is not built; plain torch then runs instead."""
    try:
        from moe_comm import _C  # may not be built
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


@lru_cache(maxsize=1)
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


def for_triton(*tensors: Tensor | None) -> bool:
    """Whether Triton kernels take all that are not None: plain tensors on a GPU, not while a compiler traces."""
    for t in tensors:
        if t is not None and (t.device.type not in TRITON_DEVICES or type(t) not in (Tensor, nn.Parameter)):
            return False
    return not torch.compiler.is_compiling() and _triton_is_installed()
