"""Kernels that NVRTC compiled, loaded and launched by the CUDA driver.

The driver's library comes with the GPU, so no package is needed for it: ctypes finds its functions and calls those that
load; the native core calls by their addresses those that launch. Launches queue on the stream that they are given and
return.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
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


class Driver:
    """The calls that loading needs. Each raises KernelError with the driver's name and words for what is wrong.

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

    def addresses(self) -> dict[str, int]:
        """Where the calls are that launching needs, by name."""
        found = {name: ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value for name in LAUNCHING}
        return {name: at or 0 for name, at in found.items()}

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


def driver_starter(calls: Mapping[str, int], context: int, functions: Mapping[str, int]) -> _C.P2pStarter:
    """A ``starter`` that calls the CUDA driver.

    Args:
        calls: addresses of the driver's functions by name. context: to launch in.
        functions: of every kernel, as the driver has loaded them.
    """
    made: _C.P2pStarter = native_core().P2pStarter.driver(calls, context, functions)
    return made


class NvrtcLauncher:
    """Kernels compiled for the GPU at hand when it is made; a ``Launcher``.

    Takes the device's primary context, which is torch's, so streams and addresses of torch's may be given. A kernel
    called ``name`` is the function ``p2p_name``. Any thread may launch, autograd's too.

    Args:
        device: a CUDA device; its current one if it has no index.
        code, driver: what is loaded, and by whom; others in tests.

    Raises:
        KernelError: NVRTC or the driver refuses.
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
        module, before = ctypes.c_void_p(), self._enter()
        try:
            self._driver.load(ctypes.byref(module), code)
            # All of them now: what is first used while a graph is captured could not be loaded then.
            for kernel in fields:
                function = ctypes.c_void_p()
                self._driver.get_function(ctypes.byref(function), module, f"p2p_{kernel}".encode())
                functions[kernel] = function.value or 0
        finally:
            self._leave(before)
        self.starter = driver_starter(self._driver.addresses(), self._context.value or 0, functions)

    def launch(self, kernel: str, grid: int, block: int, shared: int, stream: int, words: Words) -> None:
        """See ``Launcher``.

        Raises:
            KernelError: also if the driver refuses; what a kernel does wrong later shows in a later call.
        """
        self.starter.start(kernel, grid, block, shared, stream, self._packer.pack(kernel, words))

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
