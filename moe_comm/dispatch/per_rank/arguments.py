"""Checks of the rows, expert ids and weights that an exchange sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_comm.dispatch.input_faults import ID_DTYPES
from moe_comm.dispatch.types import DROPPED
from moe_comm.errors import InputError
from moe_comm.kernels.fp8 import E4M3
from moe_comm.tensor_memory import readable

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Rows = Tensor | tuple[Tensor, Tensor]
"""Rows [T, H], or e4m3 values [T, H] and fp32 or int32 scales [T, S]."""
Bias = Tensor | tuple[Tensor, Tensor] | None


def unpacked(x: Any) -> tuple[Any, Any]:
    """Return values and scales."""
    return x if isinstance(x, tuple) and len(x) == 2 else (x, None)


def checked(name: str, value: Any, dtypes: Sequence[torch.dtype], *shapes: tuple[int | None, ...]) -> Tensor:
    """Return a tensor with one of ``dtypes`` and ``shapes``, or raise InputError. None: any size."""
    got = type(value).__name__
    if isinstance(value, Tensor) and not value.is_nested:
        size, known = value.shape, value.dtype in dtypes
        for shape in shapes:
            if known and len(shape) == len(size) and all(n in (None, m) for n, m in zip(shape, size, strict=True)):
                return readable(value, name)
        got = f"{value.dtype} {list(size)}"
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise InputError(f"{name} must be {names} {str(list(shapes[-1])).replace('None', '*')}; got {got}")


def check_input(x: Any, topk_idx: Any, topk_weights: Any, num_experts: int | None = None) -> None:
    """Raise InputError for rows, ids and weights that a dispatch cannot send. num_experts None: any ids."""
    values, scales = unpacked(x)
    tokens = len(checked("x", values, FLOATS if scales is None else (E4M3,), (None, None)))
    if scales is not None:
        checked("the scales of x", scales, (torch.float32, torch.int32), (tokens, None))
    if topk_idx is not None:
        check_ids(topk_idx, tokens, num_experts)
    if topk_weights is not None:
        if topk_idx is None:
            raise InputError("topk_weights needs topk_idx")
        checked("topk_weights", topk_weights, (torch.float32,), tuple(topk_idx.shape))


def check_ids(topk_idx: Any, tokens: int | None, num_experts: int | None = None) -> None:
    """Raise InputError for ids that are not [T, K], or out of range."""
    ids_TK = checked("topk_idx", topk_idx, ID_DTYPES, (tokens, None))
    if not ids_TK.shape[1]:
        raise InputError("topk_idx needs at least one column; -1 selects no expert")
    if num_experts is None:
        return
    low, high = (int(v) for v in torch.aminmax(ids_TK)) if ids_TK.numel() else (DROPPED, DROPPED)
    if low < DROPPED or high >= num_experts or num_experts < 1:
        raise InputError(f"topk_idx must be -1 or an expert id below {num_experts}; got ids from {low} to {high}")
