"""Arrays of other libraries, such as CuPy, JAX and NumPy, as arguments of dispatch and combine, without a copy."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.tensor_memory import readable


class Array(Protocol):
    """An array that other libraries can read through DLPack: CuPy, JAX and Numba on a GPU, NumPy on the CPU."""

    def __dlpack__(self, *, stream: Any = None) -> Any:
        """Return a DLPack capsule whose values are complete on ``stream``."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return kind and index of the device."""


def as_tensors(**values: Tensor | Array | None) -> tuple[list[Tensor], InputError | None]:
    """Return tensors with the values of ``values``, which are tensors or arrays, by name, in memory.

    Returns:
        The tensors, and the error if a value is neither, cannot be shared, or has no memory. The value is then replaced
        by an empty tensor, so that the caller can report the error to the other ranks.
    """
    tensors, fault = [], None
    for name, value in values.items():
        try:
            tensors.append(readable(value if isinstance(value, Tensor) else torch.from_dlpack(value), name))
            continue
        except InputError as error:
            fault = error
        except (AttributeError, TypeError, BufferError, RuntimeError) as error:
            # from_dlpack raises AttributeError or TypeError for objects without DLPack, the others for arrays that it
            # cannot share, such as read-only ones.
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            fault = InputError(f"{name}: expected a tensor, or an array with DLPack; got {kind} ({error})")
        tensors.append(torch.empty(0, 0, dtype=torch.float32, device="cpu"))
    return tensors, fault
