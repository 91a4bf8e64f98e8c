"""Arrays of other libraries, such as CuPy, JAX and NumPy, as arguments of dispatch and combine, without a copy."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from moe_comm.errors import InputError


class Array(Protocol):
    """An array that other libraries can read through DLPack: CuPy, JAX and Numba on a GPU, NumPy on the CPU."""

    def __dlpack__(self, *, stream: Any = None) -> Any:
        """Return a DLPack capsule whose values are complete on ``stream``."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return kind and index of the device."""


def as_tensors(*values: Tensor | Array) -> tuple[list[Tensor], InputError | None]:
    """Return tensors over the memory of ``values``, which are tensors or arrays.

    Returns:
        The tensors, and the error if a value is neither or cannot be shared. The value is then replaced by an empty
        tensor, so that the caller can report the error to the other ranks.
    """
    tensors, fault = [], None
    for value in values:
        try:
            tensors.append(value if isinstance(value, Tensor) else torch.from_dlpack(value))
        except (AttributeError, TypeError, BufferError, RuntimeError) as error:
            # from_dlpack raises AttributeError or TypeError for objects without DLPack, the others for arrays that it
            # cannot share, such as read-only ones.
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            fault = InputError(f"expected a tensor, or an array with DLPack; got {kind} ({error})")
            tensors.append(torch.empty(0, 0, dtype=torch.float32, device="cpu"))
    return tensors, fault
