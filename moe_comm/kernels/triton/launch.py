"""Helpers of all kernel launches: dtypes, checks of tensors, device, and ``launch``.

Triton's own launch takes several times as long as that of torch: it binds the arguments by name, computes a text of
their classes as the key of the compiled kernel, and asks the driver about each pointer. ``launch`` does so once per
class of arguments; later it passes addresses and numbers to the C function that Triton has compiled for the kernel.
That function is private to a version of Triton, so other versions launch as usual.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_comm.errors import ConfigError, InputError
from moe_comm.gpu.record import BufferIndex
from moe_comm.kernels.recording import Step, record

if TYPE_CHECKING:
    from moe_comm import _C

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
    device: torch.device | None = None
    for t in tensors:
        if t is None:
            continue
        if device is None:
            device = t.device
        elif t.device != device:
            devices = {t.device for t in tensors if t is not None}
            raise InputError(f"{operator} needs tensors of one device; got {', '.join(map(str, devices))}")
    kind = "no tensor" if device is None else device.type
    if kind == "cuda":
        return
    if kind == "cpu" and not INTERPRETING:
        raise ConfigError(
            f"{operator}: Triton kernels support CPU tensors only in Triton's interpreter; set TRITON_INTERPRET=1 "
            "before triton is first imported (for tests), or call the operator in plain torch"
        )
    if kind != "cpu":
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
    device = tensor.device
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _NOTHING
    return torch.cuda.device(device)


_NOTHING = nullcontext()


def options(tensor: Tensor, **of_gpu: Any) -> dict[str, Any]:
    """Return launch options, which the interpreter does not support."""
    return of_gpu if tensor.device.type == "cuda" else {}


class Matrix(NamedTuple):
    """An argument of ``launch``: a matrix that the kernel loads by TMA, in blocks, as a tensor descriptor."""

    tensor: Any
    """The tensor, or its ``BufferIndex`` in a record."""
    shape: tuple[int, int]
    strides: tuple[int, int]
    block: tuple[int, int]

    def described(self) -> TensorDescriptor:
        """Return Triton's object for it."""
        return TensorDescriptor(self.tensor, list(self.shape), list(self.strides), list(self.block))


OPTIONS = frozenset({"num_warps", "num_stages", "enable_fp_fusion", "launch_cooperative_grid"})
"""Launch options; other settings of ``launch`` are constants of the kernel."""
DIRECT = triton.__version__.split(".")[:2] == ["3", "6"]
"""Whether ``_Compiled`` knows the C function of this version of Triton."""
MAX_KEPT = 4096
"""Maximum number of compiled kernels, and of tensor maps, that are found without Triton."""
_FORMATS = {"i32": "=i", "i64": "=q", "u32": "=I", "u64": "=Q", "fp32": "=f"}
"""Formats of numbers among the parameters of a kernel."""
_compiled: dict[Any, _Compiled | None] = {}
_maps: dict[Any, Any] = {}


def launch(kernel: Any, grid: Sequence[int], on: Tensor, args: Sequence[Any], **settings: Any) -> None:
    """Launch a kernel on the device and the current stream of ``on``.

    Args:
        grid: Number of programs in up to three dimensions.
        args: Arguments that are not constants, in the kernel's order: tensors, integers, floats, and ``Matrix``.
        settings: Constants of the kernel, which follow the arguments, and ``OPTIONS``.
    """
    device = on.device
    if device.type != "cuda":
        constants = {name: value for name, value in settings.items() if name not in OPTIONS}
        kernel[tuple(grid)](*_described(args), **constants)
        return
    kinds: list[Any] = [id(kernel), device.index]
    values: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is int:
            # Triton compiles anew for 1, for multiples of 16, and for numbers beyond 32 bits.
            kinds.append(arg & 15 == 0 if 1 < arg < 2**31 else (arg == 1, arg & 15 == 0, -(2**31) <= arg < 2**31))
            values.append(arg)
        elif kind is float:
            kinds.append(kind)
            values.append(arg)
        elif kind is Matrix:
            kinds += (arg.tensor.dtype, arg.block)
            values.append(arg)
        else:
            address = arg.data_ptr()
            kinds += (arg.dtype, address & 15 == 0)
            values.append(address)
    key = (*kinds, *settings.items())
    compiled = _compiled.get(key)
    if compiled is None or _is_hooked():
        with on_device_of(on):
            result = kernel[tuple(grid)](*_described(args), **settings)
        if key not in _compiled:
            if len(_compiled) >= MAX_KEPT:
                _compiled.clear()
            _compiled[key] = _Compiled.of(result, len(args))
        _record(_compiled[key], grid, args)
        return
    _record(compiled, grid, args)
    if torch._C._cuda_getDevice() == device.index:
        compiled(grid, device.index, values)
    else:
        with torch.cuda.device(device):
            compiled(grid, device.index, values)


def _record(compiled: _Compiled | None, grid: Sequence[int], args: Sequence[Any]) -> None:
    record(Step(None if compiled is None else compiled.add_to, grid, args))


def repeats(device: torch.device) -> bool:
    """Return whether recorded launches on ``device`` can be repeated: it is the current one, and no profiler of Triton
    wants to see them."""
    return device.type == "cuda" and torch._C._cuda_getDevice() == device.index and not _is_hooked()


def _described(args: Sequence[Any]) -> list[Any]:
    return [arg.described() if type(arg) is Matrix else arg for arg in args]


def _is_hooked() -> bool:
    """Return whether a profiler of Triton wants to see launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class _Compiled:
    """A compiled kernel on a device, and the C function that launches it."""

    def __init__(
        self, function: Any, fixed: tuple[Any, ...], kinds: list[str], constants: int, maps: list[dict[str, Any]]
    ) -> None:
        self._function, self._fixed, self._constants, self._maps = function, fixed, (None,) * constants, maps
        self._kinds = kinds  # of the arguments before the constants

    @classmethod
    def of(cls, compiled: Any, num_args: int) -> _Compiled | None:
        """Return the direct launch of Triton's compiled kernel, or None if it needs Triton's.

        num_args: number of arguments before the constants.
        """
        if not DIRECT:
            return None
        try:
            kinds = list(compiled.src.signature.values())
            constants = kinds[num_args:]
            if any(kind != "constexpr" for kind in constants):
                return None
            run, maps = compiled.run, list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
            function = run.launch
            if run.global_scratch_size or run.profile_scratch_size or None in maps:
                return None
            if any(kind.startswith("tensordesc") for kind in kinds):
                if not maps:
                    return None
                # Triton's wrapper makes tensor maps; the C function takes them.
                names = function.__code__.co_freevars
                function = function.__closure__[names.index("launcher")].cell_contents
            fixed = (
                compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata,
                None, None, None,
            )  # fmt: skip
        except (AttributeError, TypeError, ValueError):
            return None
        return cls(function, fixed, kinds[:num_args], len(constants), maps)

    def __call__(self, grid: Sequence[int], device: int, values: list[Any]) -> None:
        if self._maps:
            values = self._with_maps(values, device)
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        self._function(x, y, z, stream, *self._fixed, *values, *self._constants)

    def add_to(self, to: _C.GpuRecord, grid: Sequence[int], args: Sequence[Any]) -> bool:
        """Add the launch to a record (``gpu.record.AddTo``), with the parameters that Triton's C function passes."""
        function, cooperative, programmatic, *_ = self._fixed
        warps, blocks, shared = self._fixed[5]  # the packed metadata
        if cooperative or programmatic or blocks != 1:
            return False
        maps = iter(self._maps)
        parameters: list[bytes | int | tuple[int, ...]] = []
        for kind, arg in zip(self._kinds, args, strict=True):
            if type(arg) is Matrix:
                form = next(maps)
                parameters.append((
                    arg.tensor, _element_kind(form), form["swizzle"], form["elem_size"], *arg.shape, arg.strides[0],
                    *form["block_size"],
                ))  # fmt: skip
                parameters += [struct.pack("=i", size) for size in arg.shape]
                parameters += [struct.pack("=q", stride) for stride in arg.strides]
            elif type(arg) is BufferIndex:
                parameters.append(arg)
            elif kind in _FORMATS:
                parameters.append(struct.pack(_FORMATS[kind], arg))
            elif kind != "constexpr":
                return False
        parameters += [bytes(8), bytes(8)]  # scratch memory, which the kernel does not need
        to.kernel(function, (*grid, 1, 1)[:3], 32 * warps, shared, parameters)
        return True

    def _with_maps(self, values: list[Any], device: int) -> list[Any]:
        """Return the values with a tensor map, sizes and strides in place of each matrix."""
        expanded: list[Any] = []
        of_map = iter(self._maps)
        for value in values:
            if type(value) is not Matrix:
                expanded.append(value)
                continue
            expanded += (_tensor_map(value, next(of_map), device), *value.shape, *value.strides)
        return expanded


def _tensor_map(matrix: Matrix, form: dict[str, Any], device: int) -> Any:
    """Return the tensor map of a matrix, which holds its address, sizes and strides, but no reference to it."""
    tensor, shape, strides, block = matrix
    address = tensor.data_ptr()
    key = (address, shape, strides, block, tensor.dtype, form["swizzle"], device)
    found = _maps.get(key)
    if found is None:
        from triton.runtime import driver

        if len(_maps) >= MAX_KEPT:
            _maps.clear()
        found = _maps[key] = driver.active.utils.fill_tma_descriptor(
            address, form["swizzle"], form["elem_size"], _element_kind(form),
            form["block_size"], list(matrix.shape), list(matrix.strides), 0,
        )  # fmt: skip
    return found


def _element_kind(form: dict[str, Any]) -> int:
    """Return the driver's number of the dtype of a matrix."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST  # of Triton 3.6

    kind: int = TMA_DTYPE_DEVICE_TO_HOST[form["elem_type"]]
    return kind


@lru_cache
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
    return _capability(tensor.device)


@lru_cache
def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache
def tile(width: int, size: int, max_rows: int = 16) -> tuple[int, int]:
    """Return rows and columns (powers of two) of a tile of about ``size`` elements for rows of ``width``."""
    columns = min(size, 1 << max(width - 1, 0).bit_length())
    return min(max(size // columns, 1), max_rows), columns


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``, a positive number."""
    return 1 << (n - 1).bit_length()
