"""Helpers of all kernel launches: dtypes, checks of tensors, device, launch options."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from moe_comm.errors import ConfigError, InputError

INTERPRETING = bool(knobs.runtime.interpret)
"""Whether TRITON_INTERPRET=1 was set when this module was imported; it applies to all kernels of the process."""


def _patch_interpreter() -> None:
    """Let the interpreter convert scalars with ``int``, for loop bounds.

    Triton 3.6, unlike later versions, stores a scalar as an array of one element, and NumPy 2.4 rejects ``int(array)``.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_add_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_add_index


if INTERPRETING:
    _patch_interpreter()

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Dtypes that the kernels support."""
FREE_SMS = "MOE_COMM_FREE_SMS"
"""Environment variable: processors that kernels which wait for other ranks leave free; the same on every rank."""
INTERPRETED_PROGRAMS = 4
"""Programs of a persistent kernel in the interpreter, which runs them one by one."""


def check_tensors(operator: str, *tensors: Tensor | None) -> None:
    """Check that all ``tensors`` are on one device that Triton supports."""
    devices = {t.device for t in tensors if t is not None}
    if len(devices) != 1:
        raise InputError(f"{operator} needs tensors of one device; got {', '.join(map(str, devices))}")
    (device,) = devices
    if device.type == "cpu" and not INTERPRETING:
        raise ConfigError(
            f"{operator}: Triton kernels support CPU tensors only in Triton's interpreter; set TRITON_INTERPRET=1 "
            "before triton is first imported (for tests), or call the operator in plain torch"
        )
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"{operator} needs CUDA tensors; got one on {device}")


def check_rows(operator: str, name: str, rows_RD: Tensor) -> None:
    """Check that ``rows_RD`` is a matrix of fp32, bf16 or fp16 with dense rows and any row stride.

    A matrix without elements may have any strides: those of an expanded gradient are 0.
    """
    dense = rows_RD.dim() == 2 and (rows_RD.stride(1) == 1 or rows_RD.shape[1] <= 1 or not rows_RD.numel())
    if not dense or rows_RD.dtype not in DTYPES:
        raise InputError(
            f"{operator} needs {name} [rows, columns] of {', '.join(map(str, DTYPES))} with dense rows; "
            f"got {tuple(rows_RD.shape)} of {rows_RD.dtype} with strides {rows_RD.stride()}"
        )


def check_index(operator: str, name: str, index: Tensor, shape: tuple[int, ...]) -> None:
    """Check that ``index`` is contiguous int64 of ``shape``, where -1 allows any size."""
    fits = index.dim() == len(shape) and all(
        size in (-1, actual) for size, actual in zip(shape, index.shape, strict=True)
    )
    if not fits or index.dtype != torch.int64 or not index.is_contiguous():
        expected = ", ".join("any" if size < 0 else str(size) for size in shape)
        raise InputError(
            f"{operator} needs {name} [{expected}], contiguous int64; got {tuple(index.shape)} of {index.dtype}"
        )


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the device of ``tensor`` is the current device."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def options(tensor: Tensor, **of_gpu: Any) -> dict[str, Any]:
    """Return launch options, which the interpreter does not support."""
    return of_gpu if tensor.device.type == "cuda" else {}


def processors(device: torch.device) -> int:
    """Return the number of programs that run concurrently, one per processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return INTERPRETED_PROGRAMS


def waiting_programs(device: torch.device) -> int:
    """Return the number of programs of a kernel whose programs wait for other ranks: some processors stay free.

    Suppose that such a kernel fills the GPU of rank 0, and a collective on another stream fills the GPU of rank 1. Then
    each waits for the other, which cannot start. A free processor lets the blocks of the collective run one after the
    other. ``MOE_COMM_FREE_SMS`` sets the number of free processors; by default a sixteenth, at least 2.
    """
    total = processors(device)
    if device.type != "cuda":
        return total
    value = os.environ.get(FREE_SMS) or str(max(2, total // 16))
    if not value.isdecimal() or total - int(value) < 3:
        raise ConfigError(f"{FREE_SMS} must be an integer from 0 to {total - 3} on this GPU; got {value!r}")
    return total - int(value)


def capability(tensor: Tensor) -> int:
    """Return the compute capability, 80 for sm_80; 0 in the interpreter."""
    if tensor.device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def tile(width: int, size: int, max_rows: int = 16) -> tuple[int, int]:
    """Return rows and columns (powers of two) of a tile of about ``size`` elements for rows of ``width``."""
    columns = min(size, 1 << max(width - 1, 0).bit_length())
    return min(max(size // columns, 1), max_rows), columns
