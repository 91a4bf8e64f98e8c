"""Launchers of the kernels in csrc/cuda: on a GPU, or on the CPU from the same source.

A launcher starts single kernels. Their arguments (``arguments``) are passed by name, so a missing or misspelt one
raises before the launch. Native code starts the kernels of whole operations (``make_plan``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from moe_comm.errors import KernelError, MissingDependency
from moe_comm.gpu import nvrtc
from moe_comm.gpu.arguments import Packer, Words, kernel_fields, native_core, unpack
from moe_comm.gpu.driver import nvrtc_launcher

if TYPE_CHECKING:
    from moe_comm import _C

Machine = Literal["cuda", "host"]

NEEDED = -1
"""Value of ``shared`` in ``Launcher.launch``: the size that the kernel computes from its arguments."""
PTX_FROM = 80
"""Compute capability of the PTX that nvcc includes; see CMakeLists.txt."""


class Launcher(Protocol):
    """Launches kernels by name. With a native ``starter`` attribute, operations start kernels without Python."""

    def launch(self, kernel: str, grid: int, block: int, shared: int, stream: int, words: Words) -> None:
        """Queue ``kernel`` on ``grid`` blocks of ``block`` threads with ``shared`` bytes of dynamic shared memory.

        Args:
            kernel: name.
            grid, block: numbers of thread blocks and of threads per block.
            shared: NEEDED for the size that the kernel computes from its arguments.
            stream: handle of a CUDA stream; 0 is the default stream.
            words: all arguments of the kernel, by name.

        Raises:
            ConfigError: unknown kernel, or missing or unknown arguments.
        """
        ...


def starter_of(launcher: Launcher) -> _C.P2pStarter:
    """Return the native object that starts kernels: the launcher's ``starter``, or a wrapper of its ``launch``."""
    starter: _C.P2pStarter | None = getattr(launcher, "starter", None)
    if starter is not None:
        return starter
    fields = kernel_fields()

    def start(kernel: str, grid: int, block: int, shared: int, stream: int, packed: bytes) -> None:
        launcher.launch(kernel, grid, block, shared, stream, unpack(fields[kernel], packed))

    wrapper: _C.P2pStarter = native_core().P2pStarter.python(start)
    return wrapper


def make_plan(
    starter: _C.P2pStarter,
    group: tuple[int, ...],
    offsets: tuple[int, ...],
    headers_at: int,
    all_headers_at: int,
    host_counts_at: int,
    left_at: int,
) -> _C.P2pPlan:
    """Return the native core's ``P2pPlan``, which launches the kernels of one rank's operations.

    ``group`` has the common first arguments of all kernels except the last one, and ``offsets`` the first expert of
    each rank, then the number of experts. ``left_at`` is the device address of the counters of the push kernel. The
    other addresses are in host memory; see csrc/cuda/plan.h.
    """
    plan: _C.P2pPlan = native_core().P2pPlan(
        starter, group, offsets, headers_at, all_headers_at, host_counts_at, left_at
    )
    return plan


def compiled_archs() -> tuple[str, ...]:
    """Return the architectures of compiled kernels, such as ("sm_80", "sm_90a"); () without nvcc at build time.

    Raises:
        MissingDependency: the native core is not built.
    """
    archs: str = native_core().cuda_archs()
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
    """Return a launcher of the compiled kernels if they run on ``device``, else of kernels compiled by NVRTC.

    Raises:
        MissingDependency: neither is available.
        KernelError: NVRTC or the driver fails.
    """
    if compiled_for(compiled_archs(), torch.cuda.get_device_capability(device)):
        return NativeLauncher("cuda", device)
    return nvrtc_launcher(device.index if device.index is not None else torch.cuda.current_device())


class NativeLauncher:
    """Launches the kernels that are compiled into the native core.

    Args:
        machine: "cuda" for the kernels compiled by nvcc; "host" runs the same source on CPU memory, block by block.
        device: of streams and addresses; default: the current device.

    Raises:
        MissingDependency: the native core is not built.
        KernelError: the native core has no CUDA kernels.
    """

    def __init__(self, machine: Machine, device: torch.device | None = None) -> None:
        starters = native_core().P2pStarter
        self._packer = Packer(kernel_fields())
        index = None if device is None else device.index
        if machine == "cuda" and index is None:
            index = torch.cuda.current_device()
        self.starter: _C.P2pStarter = starters.host() if machine == "host" else starters.cuda(index)

    def launch(self, kernel: str, grid: int, block: int, shared: int, stream: int, words: Words) -> None:
        """See ``Launcher``. On the host it returns after the kernel has ended."""
        self.starter.start(kernel, grid, block, shared, stream, self._packer.pack(kernel, words))
