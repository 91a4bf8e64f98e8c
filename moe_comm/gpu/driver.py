"""Kernels that NVRTC compiled, loaded and launched by the CUDA driver.

The driver is called through ctypes: its library comes with the GPU, so no package is needed for it. Launches queue on
the stream that they are given and return.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from moe_comm.errors import KernelError
from moe_comm.gpu import nvrtc
from moe_comm.gpu.launch import NEEDED, Fields, Packer, Words, kernel_fields, needed_shared_bytes

LIBRARY = "libcuda.so.1"
PLAIN_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that a block gets unasked."""
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Driver:
    """The calls that launching needs. Each raises KernelError with the driver's name and words for what is wrong.

    path: the library; another one in tests.
    """

    def __init__(self, path: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise KernelError(f"there is no CUDA driver ({error})") from error
        pointer, integer, unsigned = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
        to = ctypes.POINTER
        self.init = self._function("cuInit", unsigned)
        self.retain_context = self._function("cuDevicePrimaryCtxRetain", to(pointer), integer)
        self.get_context = self._function("cuCtxGetCurrent", to(pointer))
        self.set_context = self._function("cuCtxSetCurrent", pointer)
        self.load = self._function("cuModuleLoadData", to(pointer), ctypes.c_char_p)
        self.get_function = self._function("cuModuleGetFunction", to(pointer), pointer, ctypes.c_char_p)
        self.set_attribute = self._function("cuFuncSetAttribute", pointer, integer, integer)
        self.launch = self._function("cuLaunchKernel", pointer, *[unsigned] * 7, pointer, pointer, pointer)

    def _function(self, name: str, *arguments: Any) -> Callable[..., None]:
        function = getattr(self._library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int

        def call(*given: Any) -> None:
            if status := function(*given):
                raise KernelError(f"the CUDA driver answers {name} with {self._words(status)}")

        return call

    def _words(self, status: int) -> str:
        found = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            function = getattr(self._library, name)
            function.argtypes, function.restype = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)), ctypes.c_int
            if function(status, ctypes.byref(text)) == 0 and text.value:
                found.append(text.value.decode())
        return f"error {status}" + (f" ({': '.join(found)})" if found else "")


class NvrtcLauncher:
    """Kernels compiled for the GPU at hand when it is made; a ``Launcher``.

    Takes the device's primary context, which is torch's, so streams and addresses of torch's may be given. A kernel
    called ``name`` is the function ``p2p_name``. Any thread may launch, autograd's too.

    Args:
        device: a CUDA device; its current one if it has no index.
        code, fields, driver: what is loaded, the words that kernels take, the driver; others in tests.

    Raises:
        KernelError: NVRTC or the driver refuses.
        MissingDependency: no NVRTC, or no native core with the kernels.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        code: bytes | None = None,
        fields: Fields | None = None,
        driver: Driver | None = None,
    ) -> None:
        self._packer = Packer(fields if fields is not None else kernel_fields())
        index = device.index if device.index is not None else torch.cuda.current_device()
        if code is None:
            compiler = nvrtc.find()
            arch = nvrtc.arch_for(torch.cuda.get_device_capability(index), compiler.archs)
            code = nvrtc.kernels(arch, compiler=compiler)
        self._driver = driver or Driver()
        self._driver.init(0)
        self._context = ctypes.c_void_p()
        self._driver.retain_context(ctypes.byref(self._context), index)
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._shared = dict.fromkeys(self._packer.fields, PLAIN_SHARED_BYTES)
        module, before = ctypes.c_void_p(), self._enter()
        try:
            self._driver.load(ctypes.byref(module), code)
            # All of them now: what is first used while a graph is captured could not be loaded then.
            for kernel in self._packer.fields:
                self._functions[kernel] = ctypes.c_void_p()
                self._driver.get_function(ctypes.byref(self._functions[kernel]), module, f"p2p_{kernel}".encode())
        finally:
            self._leave(before)

    def launch(self, kernel: str, grid: int, block: int, shared: int, stream: int, words: Words) -> None:
        """See ``Launcher``.

        Raises:
            KernelError: also if the driver refuses; what a kernel does wrong later shows in a later call.
        """
        packed = self._packer.pack(kernel, words)
        shared = needed_shared_bytes(kernel, block, packed) if shared == NEEDED else shared
        before = self._enter()
        try:
            function = self._functions[kernel]
            if shared > self._shared[kernel]:
                self._driver.set_attribute(function, _MAX_DYNAMIC_SHARED, shared)
                self._shared[kernel] = shared
            arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.c_char_p(packed), ctypes.c_void_p))
            if grid:
                self._driver.launch(function, grid, 1, 1, block, 1, 1, shared, stream, arguments, None)
        finally:
            self._leave(before)

    def _enter(self) -> int | None:
        """Makes this device's context current on this thread; returns the one that was, if it was another."""
        current = ctypes.c_void_p()
        self._driver.get_context(ctypes.byref(current))
        if current.value == self._context.value:
            return self._context.value
        self._driver.set_context(self._context)
        return current.value

    def _leave(self, before: int | None) -> None:
        # A thread that had none keeps this one: torch would take the same.
        if before is not None and before != self._context.value:
            self._driver.set_context(before)


@cache
def nvrtc_launcher(index: int) -> NvrtcLauncher:
    """The one for a device of this process: dispatchers share it, so that kernels are loaded once.

    Raises:
        KernelError, MissingDependency: as ``NvrtcLauncher``.
    """
    return NvrtcLauncher(torch.device("cuda", index))
