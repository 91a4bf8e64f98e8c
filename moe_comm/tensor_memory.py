"""Addresses of tensors for native code, and whether the values of a tensor can be read at its address.

Some tensors have other values than their memory, or no memory: views with the negative or conjugate bit, torch's zero
tensors (which autograd produces as gradients), wrapper subclasses (FakeTensor, DTensor), tensors inside transforms of
``torch.func``, and layouts other than strided.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_comm.errors import InputError

_Key = torch._C.DispatchKey
_keys_of = torch._C._dispatch_keys


def _bits(*names: str) -> int:
    return reduce(or_, (torch._C.DispatchKeySet(getattr(_Key, name)).raw_repr() for name in names))


_VIEWS = _bits("Negative", "Conjugate", "ZeroTensor")
_TRANSFORMS = _bits("Functionalize", "FuncTorchBatched", "FuncTorchGradWrapper")
_META = _bits("Meta") & ~_bits("CPU")
_SPECIAL = _VIEWS | _TRANSFORMS | _META | _bits("Python", "Sparse", "SparseCsr", "Quantized", "NestedTensor")
"""Dispatch keys of the tensors of the module docstring. One test of all keys takes less time than one for each kind."""


def in_memory(*tensors: Tensor | None) -> bool:
    """Return whether the values of all tensors are at their addresses, in strides, and the tensors have no other state.

    None is allowed. False also for tensors with a tangent of forward-mode differentiation.
    """
    for x in tensors:
        if x is None:
            continue
        if _keys_of(x).raw_repr() & _SPECIAL or x.layout is not torch.strided:  # mkldnn has no separate key
            return False
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            return False
    return True


def materialized(x: Tensor) -> Tensor:
    """Return ``x``, or a copy if it is a view with the negative or conjugate bit, or a zero tensor. Differentiable."""
    if not _keys_of(x).raw_repr() & _VIEWS:
        return x
    x = x.resolve_conj().resolve_neg()
    return x.clone() if x._is_zerotensor() else x  # a clone has memory


def readable(x: Tensor, name: str = "the tensor") -> Tensor:
    """Return ``x``, or a copy whose values are at its address. Differentiable.

    Raises:
        InputError: ``x`` has no values or another layout, or it has a tangent of forward-mode differentiation, which
            the operators of this library would drop.
    """
    if _keys_of(x).raw_repr() & _SPECIAL or x.layout is not torch.strided:
        if x.layout is not torch.strided or _keys_of(x).raw_repr() & (_SPECIAL ^ _VIEWS):
            x = _waited_for(x, name)
        x = materialized(x)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise InputError(
            f"{name} has a tangent, but there is no forward-mode derivative (torch.autograd.forward_ad, "
            "torch.func.jvp); use reverse mode"
        )
    return x


def _waited_for(x: Tensor, name: str) -> Tensor:
    """Return the result of a collective in flight. Raise InputError for every other tensor without values."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # slow to import

    if isinstance(x, AsyncCollectiveTensor):
        return x.clone()  # a plain tensor
    bits = _keys_of(x).raw_repr()
    if bits & _TRANSFORMS:
        raise InputError(
            f"{name} is an argument of a transform of torch.func (vmap, grad, jvp, functionalize), which cannot see "
            "communication between ranks; call the function outside of it"
        )
    if bits & _bits("Python"):
        advice = "pass its to_local()" if hasattr(x, "to_local") else "pass a plain tensor"
        raise InputError(f"{name} is a {type(x).__module__}.{type(x).__qualname__}, which has no memory; {advice}")
    if bits & _META:
        raise InputError(f"{name} is on meta, a device without values; pass a tensor on the device of the layer")
    kind = "nested" if x.is_nested else f"quantized, {x.dtype}" if x.is_quantized else str(x.layout)
    raise InputError(f"{name} must be a dense tensor with strides; got {kind}. Convert it, for example with to_dense()")


def address(x: Tensor | None, dtype: torch.dtype, shape: Sequence[int] | None = None, device: str = "cpu") -> int:
    """Return the address of a dense tensor; 0 for None. Native code cannot check what it reads and writes.

    Raises:
        InputError: the tensor has another dtype, shape (None: any) or device type, is not dense, or has no memory.
    """
    if x is None:
        return 0
    if x.dtype is not dtype or x.device.type != device or (shape is not None and x.shape != shape):
        raise _cannot_pass(x, dtype, shape, device)
    pointer = x.data_ptr()
    # Native code would take 0 for None, and does not negate.
    if not x.is_contiguous() or (not pointer and x.numel()) or x.is_neg():
        raise _cannot_pass(x, dtype, shape, device)
    return pointer


def row_address(
    rows_RX: Tensor | None, dtype: torch.dtype, shape: Sequence[int] | None = None, device: str = "cpu"
) -> tuple[int, int]:
    """Return the address and the row stride in bytes of a matrix with dense rows and any row stride; zeros for None."""
    if rows_RX is None:
        return 0, 0
    if rows_RX.dtype is not dtype or rows_RX.device.type != device or (shape is not None and rows_RX.shape != shape):
        raise _cannot_pass(rows_RX, dtype, shape, device)
    pointer = rows_RX.data_ptr()
    strided = rows_RX.stride(-1) != 1 and rows_RX.shape[-1] > 1 and rows_RX.numel()
    if strided or (not pointer and rows_RX.numel()) or rows_RX.is_neg():
        raise _cannot_pass(rows_RX, dtype, shape, device)
    return pointer, rows_RX.stride(0) * dtype.itemsize


def _cannot_pass(x: Tensor, dtype: torch.dtype, shape: Sequence[int] | None, device: str) -> InputError:
    wanted = "" if shape is None else f" of shape {tuple(shape)}"
    return InputError(
        f"native code needs a dense {dtype} tensor{wanted} in {device} memory; got {x.dtype} {tuple(x.shape)} with "
        f"strides {x.stride()} on {x.device}"
    )
