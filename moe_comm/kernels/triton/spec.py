"""Description of a kernel for ahead-of-time compilation, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

TARGETS = (80, 90, 100)
"""sm_80 (A100), sm_90 (H100, H200), sm_100 (B200)."""
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"}


@dataclass(frozen=True)
class KernelSpec:
    """One kernel with the arguments of a common launch.

    name: unique within a target; used in tables. kernel: the ``@triton.jit`` function.
    types: Triton types ("*bf16", "i32", "i64") of all arguments that are not constants, by name.
    constants: values of the ``tl.constexpr`` arguments, and of arguments that are 1 (strides).
    aligned: names of arguments that are multiples of 16, pointers and numbers.
    cooperative: whether the GPU must run all programs at the same time, because they wait for each other.
    targets: compute capabilities, 90 for sm_90. Specs with the same name have different targets.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    cooperative: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[int, ...] = TARGETS
