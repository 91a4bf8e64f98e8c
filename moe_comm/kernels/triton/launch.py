"""What all launches share: dtypes, checks of tensors, the device, options that only a GPU knows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.triton.interpreter import INTERPRETING

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What the kernels take."""
INTERPRETED_PROGRAMS = 4
"""Of persistent kernels; they run one after another anyway."""


def check_tensors(operator: str, *tensors: Tensor | None) -> None:
    """That Triton can reach all ``tensors``, on one device.

    Raises:
        ConfigError: CPU tensors, where kernels are not interpreted.
        InputError: tensors of several devices, or of neither kind.
    """
    devices = {t.device for t in tensors if t is not None}
    if len(devices) != 1:
        raise InputError(f"{operator} needs tensors of one device; got {', '.join(map(str, devices))}")
    (device,) = devices
    if device.type == "cpu" and not INTERPRETING:
        raise ConfigError(
            f"{operator}: Triton kernels take CPU tensors only in Triton's interpreter; set TRITON_INTERPRET=1 before "
            "triton is first imported, for tests, or call the operator in plain torch"
        )
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"{operator} takes CUDA tensors; got one on {device}")


def check_rows(operator: str, name: str, rows_RD: Tensor) -> None:
    """That ``rows_RD`` is a matrix of fp32, bf16 or fp16 whose rows are dense, any distance apart.

    One without elements is, whatever its strides: those of a gradient that was expanded stay 0.

    Raises:
        InputError: it is not.
    """
    dense = rows_RD.dim() == 2 and (rows_RD.stride(1) == 1 or rows_RD.shape[1] <= 1 or not rows_RD.numel())
    if not dense or rows_RD.dtype not in DTYPES:
        raise InputError(
            f"{operator} needs {name} [rows, columns] of {', '.join(map(str, DTYPES))} with dense rows; "
            f"got {tuple(rows_RD.shape)} of {rows_RD.dtype} with strides {rows_RD.stride()}"
        )


def check_index(operator: str, name: str, index: Tensor, shape: tuple[int, ...]) -> None:
    """That ``index`` is dense int64 of ``shape``, -1 there for any size.

    Raises:
        InputError: it is not.
    """
    fits = index.dim() == len(shape) and all(want in (-1, have) for want, have in zip(shape, index.shape, strict=True))
    if not fits or index.dtype != torch.int64 or not index.is_contiguous():
        wanted = ", ".join("any" if size < 0 else str(size) for size in shape)
        raise InputError(
            f"{operator} needs {name} [{wanted}], contiguous int64; got {tuple(index.shape)} of {index.dtype}"
        )


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launches go to the device of ``tensor``, not to whichever is current."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def options(tensor: Tensor, **of_gpu: Any) -> dict[str, Any]:
    """Options of a launch, which the interpreter does not know."""
    return of_gpu if tensor.device.type == "cuda" else {}


def processors(tensor: Tensor) -> int:
    """Programs that run at once, one each."""
    if tensor.device.type == "cuda":
        return torch.cuda.get_device_properties(tensor.device).multi_processor_count
    return INTERPRETED_PROGRAMS


def capability(tensor: Tensor) -> int:
    """80 for sm_80, and so on; 0 in the interpreter."""
    if tensor.device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def tile(width: int, size: int, most_rows: int = 16) -> tuple[int, int]:
    """Rows and columns, powers of two, of a tile of about ``size`` elements for rows of ``width``."""
    columns = min(size, 1 << max(width - 1, 0).bit_length())
    return min(max(size // columns, 1), most_rows), columns
