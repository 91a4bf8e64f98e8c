"""Whether an operator can pass its tensors to the native core by address, or to a Triton kernel."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.runtime.memory import in_memory
from moe_comm.runtime.native_core import native, native_is_built

TRITON_DEVICES = {"cuda"}
"""Device types whose tensors run in Triton kernels if Triton is installed. Tests with interpreted kernels add "cpu";
comparisons with plain torch remove "cuda"."""


@lru_cache(maxsize=1)
def core() -> Any:
    """Return the native core, or None if it is not built; callers then use plain torch."""
    return native() if native_is_built() else None


def on_cpu(*tensors: Tensor) -> bool:
    """Return whether all tensors are plain CPU tensors and the native core is built.

    Subclasses (fake tensors, DTensor) and tensors that a compiler traces have no addresses; see ``in_memory``.
    """
    for t in tensors:  # not all(...), which enters a frame for each tensor
        if type(t) not in (Tensor, nn.Parameter) or not t.is_cpu:
            return False
    return not torch.compiler.is_compiling() and in_memory(*tensors) and core() is not None


@lru_cache(maxsize=1)
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


def for_triton(*tensors: Tensor | None) -> bool:
    """Return whether Triton kernels support the tensors: plain tensors on a GPU, outside compiler traces; None is
    allowed."""
    for t in tensors:
        if t is not None and (t.device.type not in TRITON_DEVICES or type(t) not in (Tensor, nn.Parameter)):
            return False
    return not torch.compiler.is_compiling() and _triton_is_installed() and in_memory(*tensors)
