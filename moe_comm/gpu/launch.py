"""Launches of the kernels in csrc/cuda: on a GPU, on the CPU by the same source, or only written down.

A launcher starts single kernels. Their words (``arguments``) are given by name, so that one left out or misspelt is an
error before anything runs. Native code starts the kernels of whole operations (``make_plan``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from moe_comm.errors import KernelError, MissingDependency
from moe_comm.gpu import nvrtc
from moe_comm.gpu.arguments import Fields, Packer, Words, kernel_fields, native_core, unpack
from moe_comm.gpu.driver import nvrtc_launcher

if TYPE_CHECKING:
    from moe_comm import _C

Machine = Literal["cuda", "host"]

NEEDED = -1
PTX_FROM = 80
"""The compute capability that nvcc leaves PTX of; see CMakeLists.txt."""


class Launcher(Protocol):
    """Runs kernels by name. One that has a ``starter`` of the native core starts operations' kernels without Python."""

    def launch(self, kernel: str, grid: int, block: int, shared: int, stream: int, words: Words) -> None:
        """Queue ``kernel`` on ``grid`` blocks of ``block`` threads and ``shared`` bytes of dynamic shared memory each.

        Args:
            shared: NEEDED for as much as the kernel says that it needs.
            stream: handle of a CUDA stream; 0 is the default one.
            words: exactly the words that the kernel has.

        Raises:
            ConfigError: an unknown kernel; words that are missing or unknown.
        """
        ...


def starter_of(launcher: Launcher) -> _C.P2pStarter:
    """What native code starts kernels with: the launcher's own ``starter``, or else its ``launch``."""
    own: _C.P2pStarter | None = getattr(launcher, "starter", None)
    if own is not None:
        return own
    fields = kernel_fields()

    def start(kernel: str, grid: int, block: int, shared: int, stream: int, packed: bytes) -> None:
        launcher.launch(kernel, grid, block, shared, stream, unpack(fields[kernel], packed))

    made: _C.P2pStarter = native_core().P2pStarter.python(start)
    return made


def make_plan(
    starter: _C.P2pStarter,
    group: tuple[int, ...],
    offsets: tuple[int, ...],
    headers_at: int,
    all_headers_at: int,
    host_counts_at: int,
    left_at: int,
) -> _C.P2pPlan:
    """The native core's ``P2pPlan``: one rank's operations, each as the launches that it takes.

    Args:
        group: the words that all kernels begin with, but for the last, in order.
        offsets: the first expert of each rank, then how many there are.
        headers_at, all_headers_at, host_counts_at: in host memory; left_at: on the device; see csrc/cuda/plan.h.

    Raises:
        MissingDependency: there is no native core.
    """
    made: _C.P2pPlan = native_core().P2pPlan(
        starter, group, offsets, headers_at, all_headers_at, host_counts_at, left_at
    )
    return made


def block_threads(kernel: str) -> int:
    """Of each block of ``kernel`` in an operation."""
    threads: int = native_core().p2p_threads()[kernel]
    return threads


def matrix_of_memory(
    at: int, rows: int, columns: int, code: int, bits: int, device_type: int, device: int, owner: object
) -> Any:
    """Memory as [rows, columns], for ``torch.from_dlpack``; ``owner`` lives as long as a tensor over it.

    Args:
        at: its address. code, bits: of the elements, device_type: as DLPack has them.
    """
    return native_core().p2p_tensor(at, rows, columns, code, bits, device_type, device, owner)


def needed_shared_bytes(kernel: str, block: int, packed: bytes) -> int:
    """Dynamic shared memory of a block of ``block`` threads, which some words decide. packed: the kernel's struct."""
    needed: int = native_core().p2p_shared_bytes(kernel, block, packed)
    return needed


def compiled_archs() -> tuple[str, ...]:
    """What nvcc compiled the kernels for when the native core was built, ("sm_80", "sm_90a"); () if it did not.

    Raises:
        MissingDependency: there is no native core.
    """
    archs: str = native_core().cuda_archs()
    return tuple(archs.split(",")) if archs else ()


def compiled_for(archs: Sequence[str], capability: tuple[int, int]) -> str:
    """Which of ``archs`` runs on a GPU of this compute capability: its own, else "PTX" of sm_80, which the driver
    translates for what is newer; "" for none."""
    number = 10 * capability[0] + capability[1]
    own = next((arch for arch in archs if re.fullmatch(rf"sm_{number}[af]?", arch)), "")
    return own or ("PTX" if archs and number >= PTX_FROM else "")


def cuda_kernels_at_hand(device: torch.device) -> bool:
    """Whether ``cuda_launcher`` finds kernels for ``device``. Asks the driver only what it is."""
    try:
        capability = torch.cuda.get_device_capability(device)
        if not compiled_for(compiled_archs(), capability):
            nvrtc.arch_for(capability, nvrtc.find().archs)
    except (MissingDependency, KernelError):
        return False
    return True


def cuda_launcher(device: torch.device) -> Launcher:
    """For a GPU: the kernels that nvcc compiled when the native core was built, if they run there, else what NVRTC
    compiles now.

    Raises:
        MissingDependency: neither is to be had. KernelError: NVRTC or the driver refuses.
    """
    if compiled_for(compiled_archs(), torch.cuda.get_device_capability(device)):
        return NativeLauncher("cuda", device)
    return nvrtc_launcher(device.index if device.index is not None else torch.cuda.current_device())


class NativeLauncher:
    """Kernels that the native core was compiled with.

    machine: "cuda", where nvcc compiled them in; "host" runs the same source on CPU memory, one block after the other.
    device: that streams and addresses belong to; without an index, the one that is current when this is made.

    Raises:
        MissingDependency: there is no native core. KernelError: it has no CUDA kernels.
    """

    def __init__(self, machine: Machine, device: torch.device | None = None) -> None:
        starters = native_core().P2pStarter
        self._packer = Packer(kernel_fields())
        index = None if device is None else device.index
        if machine == "cuda" and index is None:
            index = torch.cuda.current_device()
        self.starter: _C.P2pStarter = starters.host() if machine == "host" else starters.cuda(index)

    def launch(self, kernel: str, grid: int, block: int, shared: int, stream: int, words: Words) -> None:
        """See ``Launcher``; on the host it returns when the kernel is over."""
        self.starter.start(kernel, grid, block, shared, stream, self._packer.pack(kernel, words))


@dataclass(frozen=True)
class Launch:
    """One that was written down; ``words`` as the kernel would read them from its struct."""

    kernel: str
    grid: int
    block: int
    shared: int
    stream: int
    words: dict[str, int]


@dataclass
class RecordingLauncher:
    """Writes launches down: a device for tests.

    fields: what kernels take. act: called with each launch, to do what the caller relies on.
    """

    fields: Fields
    act: Callable[[Launch], None] | None = None
    launches: list[Launch] = field(default_factory=list)

    def launch(self, kernel: str, grid: int, block: int, shared: int, stream: int, words: Words) -> None:
        """See ``Launcher``."""
        packed = Packer(self.fields).pack(kernel, words)
        launch = Launch(kernel, grid, block, shared, stream, unpack(self.fields[kernel], packed))
        self.launches.append(launch)
        if self.act is not None:
            self.act(launch)
