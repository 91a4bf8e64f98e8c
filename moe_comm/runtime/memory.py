"""Tensors and their memory: the values that native code reads, addresses, and buffers whose pages stay mapped.

Some tensors have other values than their memory, or no memory: views with the negative or conjugate bit, torch's zero
tensors (which autograd produces as gradients), wrapper subclasses (FakeTensor, DTensor), tensors inside transforms of
``torch.func``, and layouts other than strided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_comm.errors import InputError
from moe_comm.runtime.native_core import native, native_is_built

if TYPE_CHECKING:
    from moe_comm import _C
    from moe_comm._C import is_plain as _is_plain
else:
    try:
        from moe_comm._C import is_plain as _is_plain
    except ImportError:  # the native core is not built

        def _is_plain(tensors):
            return False


from_capsule: Callable[[Any], Tensor] = getattr(torch._C, "_from_dlpack", torch.from_dlpack)
"""Return a tensor of a DLPack capsule. ``torch.from_dlpack`` calls it after protocol checks that a capsule skips."""
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@lru_cache(maxsize=1)
def private_heap() -> _C.Heap:
    """Return this process's heap of private memory, for dispatch within one rank.

    Its pages stay mapped: faulting in new pages costs more than the copies into them.
    """
    heap: _C.Heap = native().Heap("")
    return heap


def block(heap: _C.Heap, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised [rows, width] tensor in ``heap``. The memory is freed with the tensor, on any thread."""
    if rows == 0 or width == 0:
        return torch.empty(rows, width, dtype=dtype, device="cpu")
    return from_capsule(heap.tensor(rows, width, DTYPE_CODES[dtype]))


WARM_BYTES = 128 << 10
"""malloc keeps the pages of smaller tensors mapped (its mmap threshold)."""


def warm_rows(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised [rows, width] tensor. On the CPU its pages are mapped already, if it is large."""
    size = rows * width * dtype.itemsize
    if size < WARM_BYTES or device.type != "cpu" or not native_is_built():
        return torch.empty(rows, width, dtype=dtype, device=device)
    if dtype in DTYPE_CODES:
        return block(private_heap(), rows, width, dtype)
    words = block(private_heap(), 1, -(-size // 4), torch.float32).view(-1).view(torch.uint8)
    return words[:size].view(dtype).view(rows, width)


def warm_like(x: Tensor) -> Tensor:
    """Return an uninitialised tensor with the shape and strides of ``x``, as ``warm_rows``. ``x`` must be dense."""
    if x.is_contiguous() and x.numel():
        return warm_rows(x.numel() // x.shape[-1], x.shape[-1], x.dtype, x.device).view(x.shape)
    if x.dim() == 3 and x.transpose(1, 2).is_contiguous() and x.numel():
        return warm_like(x.transpose(1, 2)).transpose(1, 2)
    return torch.empty_like(x)


def take(rows_RX: Tensor, index_N: Tensor) -> Tensor:
    """Return the rows at ``index_N`` (int64) as [N, X], in memory of ``warm_rows``. No autograd."""
    out_NX = warm_rows(index_N.shape[0], rows_RX.shape[1], rows_RX.dtype, rows_RX.device)
    return torch.index_select(rows_RX, 0, index_N, out=out_NX)


def as_dtype(dtype: torch.dtype, rows_RX: Tensor) -> Tensor:
    """Return the bytes of rows [R, X] as another dtype, without a copy if the rows are contiguous.

    Torch does not view a tensor as another dtype if its last stride is not 1, even if that stride has no effect: with
    at most one element, or with one column. So the strides are set here.
    """
    width = rows_RX.shape[1] * rows_RX.element_size() // dtype.itemsize
    return rows_RX.contiguous().as_strided((rows_RX.numel(),), (1,)).view(dtype).view(rows_RX.shape[0], width)


# --- the values and addresses of tensors ---

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


def is_plain(tensors: list[Any]) -> bool:
    """Return whether all are tensors, not of a subclass, for which ``in_memory`` is true. False for some others, too.

    The native core reads tensors without methods of torch, which counts if the code is not in the caches, as in decode.
    """
    return forward_ad._current_level < 0 and _is_plain(tensors)


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
    tensors: list[Any] = list(values.values())
    if forward_ad._current_level < 0 and _is_plain(tensors):
        return tensors, None
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
    on_device = x.is_cpu if device == "cpu" else x.device.type == device
    if x.dtype is not dtype or not on_device or (shape is not None and x.shape != shape):
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
    if (
        rows_RX.dtype is not dtype
        or not (rows_RX.is_cpu if device == "cpu" else rows_RX.device.type == device)  # device.type is slower
        or (shape is not None and rows_RX.shape != shape)
    ):
        raise _cannot_pass(rows_RX, dtype, shape, device)
    pointer = rows_RX.data_ptr()
    if shape is not None and len(shape) == 2 and pointer and rows_RX.is_contiguous() and not rows_RX.is_neg():
        return pointer, shape[1] * dtype.itemsize
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
