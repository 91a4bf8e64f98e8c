"""Launchers of the kernels in csrc/cuda: on a GPU, or on the CPU from the same source.

nvcc compiles them into the native core, or NVRTC compiles them at run time. The driver's library comes with the GPU, so
NVRTC's kernels need no package: ctypes calls the driver functions that load them, and the native core calls those that
launch them by their addresses. Launches are queued on a stream and return immediately.

A launcher starts single kernels. Their arguments (``arguments``) are passed by name, so a missing or misspelt one
raises before the launch. Native code starts the kernels of whole operations (csrc/cuda/plan.h).

Errors: MissingDependency if there is no native core with kernels and no NVRTC; KernelError if NVRTC or the driver
fails, also for a kernel that was queued before; ConfigError for arguments that do not match the kernel.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch

from moe_comm.errors import ConfigError, KernelError, MissingDependency
from moe_comm.gpu import nvrtc
from moe_comm.gpu.arguments import Packer, Words, kernel_fields
from moe_comm.runtime.native_core import native

if TYPE_CHECKING:
    from moe_comm import _C

Machine = Literal["cuda", "cpu"]

NEEDED = -1
"""Value of ``shared`` in ``Launcher.launch``: the size that the kernel computes from its arguments."""
PTX_FROM = 80
"""Compute capability of the PTX that nvcc includes; see CMakeLists.txt."""


class Launcher:
    """Launches kernels by name. ``starter`` is the native object by which operations start them without Python."""

    def __init__(self, starter: _C.P2pStarter) -> None:
        self.starter = starter
        self._packer = Packer(kernel_fields())

    def launch(self, kernel: str, grid: int, block: int, shared: int, stream: int, words: Words) -> None:
        """Queue ``kernel`` on ``grid`` blocks of ``block`` threads with ``shared`` bytes of dynamic shared memory.

        When emulated, it returns after the kernel has ended.

        Args:
            grid, block: numbers of thread blocks and of threads per block.
            shared: NEEDED for the size that the kernel computes from its arguments.
            stream: handle of a CUDA stream; 0 is the default stream.
            words: all arguments of the kernel, by name.
        """
        self.starter.start(kernel, grid, block, shared, stream, self._packer.pack(kernel, words))


def compiled_archs() -> tuple[str, ...]:
    """Return the architectures of compiled kernels, such as ("sm_80", "sm_90a"); () without nvcc at build time."""
    archs: str = native().cuda_archs()
    return tuple(archs.split(",")) if archs else ()


def compiled_for(archs: Sequence[str], capability: tuple[int, int]) -> str:
    """Return the entry of ``archs`` for a compute capability, "PTX" if the driver can compile the PTX, or ""."""
    number = 10 * capability[0] + capability[1]
    exact = next((arch for arch in archs if re.fullmatch(rf"sm_{number}[af]?", arch)), "")
    return exact or ("PTX" if archs and number >= PTX_FROM else "")


def cuda_kernels_at_hand(device: torch.device) -> bool:
    """Return whether ``cuda_launcher`` finds kernels for ``device``, without compiling them."""
    try:
        capability = torch.cuda.get_device_capability(device)
        if not compiled_for(compiled_archs(), capability):
            nvrtc.arch_for(capability, nvrtc.find().archs)
    except (MissingDependency, KernelError):
        return False
    return True


def cuda_launcher(device: torch.device) -> Launcher:
    """Return a launcher of the compiled kernels if they run on ``device``, else of kernels compiled by NVRTC."""
    if compiled_for(compiled_archs(), torch.cuda.get_device_capability(device)):
        return NativeLauncher("cuda", device)
    return nvrtc_launcher(device.index if device.index is not None else torch.cuda.current_device())


class NativeLauncher(Launcher):
    """Launches the kernels that are compiled into the native core.

    Args:
        machine: "cuda" for the kernels compiled by nvcc; "cpu" runs the same source on CPU memory, block by block.
        device: of streams and addresses; default: the current device.
    """

    def __init__(self, machine: Machine, device: torch.device | None = None) -> None:
        starters = native().P2pStarter
        index = None if device is None else device.index
        if machine == "cuda" and index is None:
            index = torch.cuda.current_device()
        super().__init__(starters.host() if machine == "cpu" else starters.cuda(index))


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

    def addresses(self, *more: str) -> dict[str, int]:
        """Return the addresses of the functions that launch kernels, and of ``more``, by name."""
        try:
            functions = {name: getattr(self._library, name) for name in (*LAUNCHING, *more)}
        except AttributeError as error:
            raise KernelError(f"the CUDA driver is too old ({error})") from error
        return {name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in functions.items()}

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


class Module:
    """Functions of compiled code, loaded on a device by the driver.

    They belong to the device's primary context, which torch uses as well, so they take streams and addresses of torch.

    Args:
        index: of the CUDA device.
        names: of the functions; in the code their names start with ``prefix``.
        driver: for tests.

    Raises:
        KernelError: there is no driver, or it cannot load the code.
    """

    def __init__(
        self, index: int, code: bytes, names: Iterable[str], prefix: str, driver: Driver | None = None
    ) -> None:
        self.driver = driver or Driver()
        self.driver.init(0)
        self._context = ctypes.c_void_p()
        self.driver.retain_context(ctypes.byref(self._context), index)
        self.functions: dict[str, int] = {}
        module, previous_context = ctypes.c_void_p(), self._enter()
        try:
            self.driver.load(ctypes.byref(module), code)
            # Load all kernels now: a kernel cannot be loaded during the capture of a graph.
            for name in names:
                function = ctypes.c_void_p()
                self.driver.get_function(ctypes.byref(function), module, f"{prefix}{name}".encode())
                self.functions[name] = function.value or 0
        finally:
            self._leave(previous_context)

    @property
    def context(self) -> int:
        """Handle of the context."""
        return self._context.value or 0

    def _enter(self) -> int | None:
        """Make this device's context current on this thread. Return the previous context, or None."""
        current = ctypes.c_void_p()
        self.driver.get_context(ctypes.byref(current))
        if current.value == self._context.value:
            return self._context.value
        self.driver.set_context(self._context)
        return current.value

    def _leave(self, previous_context: int | None) -> None:
        # A thread without a context keeps this one, which torch would also use.
        if previous_context is not None and previous_context != self._context.value:
            self.driver.set_context(previous_context)


class NvrtcLauncher(Launcher):
    """Launches kernels compiled for the present GPU. Any thread may launch.

    Args:
        device: a CUDA device; default index: the current device.
        code, driver: for tests.
    """

    def __init__(self, device: torch.device, *, code: bytes | None = None, driver: Driver | None = None) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        if code is None:
            compiler = nvrtc.find()
            arch = nvrtc.arch_for(torch.cuda.get_device_capability(index), compiler.archs)
            code = nvrtc.kernels(arch, compiler=compiler)
        module = Module(index, code, kernel_fields(), "p2p_", driver)
        super().__init__(native().P2pStarter.driver(module.driver.addresses(), module.context, module.functions))


@cache
def nvrtc_launcher(index: int) -> NvrtcLauncher:
    """Return the launcher of a device, which all dispatchers of the process share."""
    return NvrtcLauncher(torch.device("cuda", index))


UNASKED = 48 << 10
"""Bytes of shared memory per thread block that a kernel gets on every GPU without asking for more."""


def shared_limit(device: torch.device) -> int | None:
    """Return the maximum bytes of shared memory per thread block on ``device``; None without a limit (emulated)."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", UNASKED))


def check_shared(kernel: str, device: torch.device, what: str, **words: int) -> None:
    """Check that a thread block of ``kernel`` gets the shared memory that it needs for the arguments ``words``.

    Args:
        what: the caller's setting that determines the size, such as "max_tokens=20000".
        words: arguments of the kernel that determine the size; others count as 0.
    """
    limit = shared_limit(device)
    if limit is None:
        return
    fields = kernel_fields()
    packed = Packer(fields).pack(kernel, {**dict.fromkeys(fields[kernel], 0), **words})
    core = native()
    needed = core.p2p_shared_bytes(kernel, core.p2p_threads()[kernel], packed)
    if needed > limit:
        raise ConfigError(
            f"peer_to_peer with {what} needs {needed} bytes of shared memory per thread block, and {device} has "
            f"{limit}; use a smaller value, or another dispatcher"
        )
