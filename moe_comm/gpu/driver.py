"""Loads and launches kernels compiled by NVRTC, with the CUDA driver.

The driver's library comes with the GPU, so this needs no package. ctypes calls the functions that load kernels. The
native core calls those that launch kernels by their addresses. Launches are queued on a stream and return immediately.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from moe_comm.errors import KernelError
from moe_comm.gpu import nvrtc
from moe_comm.gpu.arguments import Packer, Words, kernel_fields, native_core

if TYPE_CHECKING:
    from moe_comm import _C

LIBRARY = "libcuda.so.1"
LAUNCHING = (
    "cuLaunchKernel",
    "cuFuncSetAttribute",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuGetErrorName",
    "cuGetErrorString",
)
"""Driver functions that the native core calls to launch kernels."""


class Driver:
    """Driver functions that load kernels. Each raises KernelError with the driver's name and text of an error."""

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

    def addresses(self) -> dict[str, int]:
        """Return the addresses of the functions that launch kernels, by name."""
        values = {name: ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value for name in LAUNCHING}
        return {name: value or 0 for name, value in values.items()}

    def _function(self, name: str, *arguments: Any) -> Callable[..., None]:
        function = getattr(self._library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int

        def call(*args: Any) -> None:
            if status := function(*args):
                raise KernelError(f"{name} of the CUDA driver failed with {self._error_text(status)}")

        return call

    def _error_text(self, status: int) -> str:
        texts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            function = getattr(self._library, name)
            function.argtypes, function.restype = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)), ctypes.c_int
            if function(status, ctypes.byref(text)) == 0 and text.value:
                texts.append(text.value.decode())
        return f"error {status}" + (f" ({': '.join(texts)})" if texts else "")


class NvrtcLauncher:
    """A ``Launcher`` of kernels compiled for the present GPU.

    It uses the device's primary context, as torch does, so it can use streams and addresses of torch. The function of
    kernel ``name`` is called ``p2p_name``. Any thread may launch.

    Args:
        device: a CUDA device; default index: the current device.
        code, driver: for tests.

    Raises:
        KernelError: NVRTC or the driver fails.
        MissingDependency: no NVRTC, or no native core with the kernels.
    """

    def __init__(self, device: torch.device, *, code: bytes | None = None, driver: Driver | None = None) -> None:
        fields = kernel_fields()
        self._packer = Packer(fields)
        index = device.index if device.index is not None else torch.cuda.current_device()
        if code is None:
            compiler = nvrtc.find()
            arch = nvrtc.arch_for(torch.cuda.get_device_capability(index), compiler.archs)
            code = nvrtc.kernels(arch, compiler=compiler)
        self._driver = driver or Driver()
        self._driver.init(0)
        self._context = ctypes.c_void_p()
        self._driver.retain_context(ctypes.byref(self._context), index)
        functions: dict[str, int] = {}
        module, previous_context = ctypes.c_void_p(), self._enter()
        try:
            self._driver.load(ctypes.byref(module), code)
            # Load all kernels now: a kernel cannot be loaded during the capture of a graph.
            for kernel in fields:
                function = ctypes.c_void_p()
                self._driver.get_function(ctypes.byref(function), module, f"p2p_{kernel}".encode())
                functions[kernel] = function.value or 0
        finally:
            self._leave(previous_context)
        self.starter: _C.P2pStarter = native_core().P2pStarter.driver(
            self._driver.addresses(), self._context.value or 0, functions
        )

    def launch(self, kernel: str, grid: int, block: int, shared: int, stream: int, words: Words) -> None:
        """See ``Launcher``.

        Raises:
            KernelError: the driver fails. A later call raises errors of the running kernel.
        """
        self.starter.start(kernel, grid, block, shared, stream, self._packer.pack(kernel, words))

    def _enter(self) -> int | None:
        """Make this device's context current on this thread. Return the previous context, or None."""
        current = ctypes.c_void_p()
        self._driver.get_context(ctypes.byref(current))
        if current.value == self._context.value:
            return self._context.value
        self._driver.set_context(self._context)
        return current.value

    def _leave(self, previous_context: int | None) -> None:
        # A thread without a context keeps this one, which torch would also use.
        if previous_context is not None and previous_context != self._context.value:
            self._driver.set_context(previous_context)


@cache
def nvrtc_launcher(index: int) -> NvrtcLauncher:
    """Return the launcher of a device, which all dispatchers of the process share.

    Raises:
        KernelError, MissingDependency: see ``NvrtcLauncher``.
    """
    return NvrtcLauncher(torch.device("cuda", index))
