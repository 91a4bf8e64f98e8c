"""Launches of the kernels in csrc/cuda: on a GPU, on the CPU by the same source, or only written down.

A kernel takes one struct of 8-byte words by value. What they are called is declared once, in csrc/cuda/args.h, and the
native core tells it. A launcher starts single kernels, whose words are given by name, so that one left out or misspelt
is an error before anything runs; whole operations start theirs in native code (``make_plan``).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from moe_comm.errors import ConfigError, KernelError, MissingDependency

if TYPE_CHECKING:
    from moe_comm import _C

Machine = Literal["cuda", "host"]

Words = Mapping[str, int]
"""A kernel's arguments by name: numbers, and addresses (0: nothing there)."""

NEEDED = -1
PTX_FROM = 80
"""The compute capability that nvcc leaves PTX of; see CMakeLists.txt."""
Fields = Mapping[str, Sequence[str]]
"""The names of each kernel's words, in order."""


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


class Packer:
    """Words by name to the struct that a kernel takes."""

    def __init__(self, fields: Fields) -> None:
        self.fields = {kernel: tuple(names) for kernel, names in fields.items()}
        self._structs = {kernel: struct.Struct(f"={len(names)}q") for kernel, names in self.fields.items()}
        self._in_order = {kernel: _looked_up(names) for kernel, names in self.fields.items()}

    def pack(self, kernel: str, words: Words) -> bytes:
        """The struct's bytes.

        Raises:
            ConfigError: see ``Launcher.launch``; or a word that no int64 holds.
        """
        names = self.fields.get(kernel)
        if names is None:
            raise ConfigError(f"there is no kernel {kernel!r}; known: {', '.join(sorted(self.fields))}")
        try:
            if len(words) == len(names):
                return self._structs[kernel].pack(*self._in_order[kernel](words))
        except KeyError:
            pass
        except struct.error as error:
            raise ConfigError(f"kernel {kernel!r}: a word is no int64 ({error}): {dict(words)}") from None
        missing, unknown = sorted(set(names) - set(words)), sorted(set(words) - set(names))
        raise ConfigError(
            f"kernel {kernel!r}: missing words {missing}, unknown words {unknown}; it takes {list(names)}"
        )


def _looked_up(names: Sequence[str]) -> Callable[[Words], tuple[int, ...]]:
    """The words of these names, without a loop in Python where ``itemgetter`` gives a tuple."""
    return itemgetter(*names) if len(names) > 1 else lambda words: tuple(words[name] for name in names)


def _core() -> ModuleType:
    try:
        from moe_comm import _C
    except ImportError as error:
        raise MissingDependency(
            f"the native core moe_comm._C is not built ({error}); run `pip install -e .`"
        ) from error
    if not hasattr(_C, "P2pPlan") or not hasattr(_C, "cuda_archs"):
        raise MissingDependency("this build of moe_comm._C has no peer-to-peer kernels; run `pip install -e .` again")
    return _C


def kernel_fields() -> dict[str, tuple[str, ...]]:
    """The words of every kernel, as the native core was compiled with.

    Raises:
        MissingDependency: there is no native core.
    """
    return {kernel: tuple(names) for kernel, names in _core().p2p_words().items()}


def kernel_constants() -> dict[str, int]:
    """The named numbers of csrc/cuda/args.h.

    Raises:
        MissingDependency: there is no native core.
    """
    return dict(_core().p2p_constants())


def starter_of(launcher: Launcher) -> _C.P2pStarter:
    """What native code starts kernels with: the launcher's own ``starter``, or else its ``launch``."""
    own: _C.P2pStarter | None = getattr(launcher, "starter", None)
    if own is not None:
        return own
    fields = kernel_fields()

    def start(kernel: str, grid: int, block: int, shared: int, stream: int, packed: bytes) -> None:
        launcher.launch(kernel, grid, block, shared, stream, unpack(fields[kernel], packed))

    made: _C.P2pStarter = _core().P2pStarter.python(start)
    return made


def driver_starter(calls: Mapping[str, int], context: int, functions: Mapping[str, int]) -> _C.P2pStarter:
    """A ``starter`` that calls the CUDA driver.

    Args:
        calls: addresses of the driver's functions by name. context: to launch in.
        functions: of every kernel, as the driver has loaded them.
    """
    made: _C.P2pStarter = _core().P2pStarter.driver(calls, context, functions)
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
    made: _C.P2pPlan = _core().P2pPlan(starter, group, offsets, headers_at, all_headers_at, host_counts_at, left_at)
    return made


def block_threads(kernel: str) -> int:
    """Of each block of ``kernel`` in an operation."""
    threads: int = _core().p2p_threads()[kernel]
    return threads


def matrix_of_memory(
    at: int, rows: int, columns: int, code: int, bits: int, device_type: int, device: int, owner: object
) -> Any:
    """Memory as [rows, columns], for ``torch.from_dlpack``; ``owner`` lives as long as a tensor over it.

    Args:
        at: its address. code, bits: of the elements, device_type: as DLPack has them.
    """
    return _core().p2p_tensor(at, rows, columns, code, bits, device_type, device, owner)


def unpack(names: Sequence[str], packed: bytes) -> dict[str, int]:
    """A kernel's struct as words by name."""
    return dict(zip(names, struct.unpack(f"={len(names)}q", packed), strict=True))


def needed_shared_bytes(kernel: str, block: int, packed: bytes) -> int:
    """Dynamic shared memory of a block of ``block`` threads, which some words decide. packed: the kernel's struct."""
    needed: int = _core().p2p_shared_bytes(kernel, block, packed)
    return needed


def compiled_archs() -> tuple[str, ...]:
    """What nvcc compiled the kernels for when the native core was built, ("sm_80", "sm_90a"); () if it did not.

    Raises:
        MissingDependency: there is no native core.
    """
    archs: str = _core().cuda_archs()
    return tuple(archs.split(",")) if archs else ()


def compiled_for(archs: Sequence[str], capability: tuple[int, int]) -> str:
    """Which of ``archs`` runs on a GPU of this compute capability: its own, else "PTX" of sm_80, which the driver
    translates for what is newer; "" for none."""
    number = 10 * capability[0] + capability[1]
    own = next((arch for arch in archs if re.fullmatch(rf"sm_{number}[af]?", arch)), "")
    return own or ("PTX" if archs and number >= PTX_FROM else "")


def cuda_kernels_at_hand(device: torch.device) -> bool:
    """Whether ``cuda_launcher`` finds kernels for ``device``. Asks the driver only what it is."""
    from moe_comm.gpu import nvrtc

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
    from moe_comm.gpu.driver import nvrtc_launcher

    return nvrtc_launcher(device.index if device.index is not None else torch.cuda.current_device())


class NativeLauncher:
    """Kernels that the native core was compiled with.

    machine: "cuda", where nvcc compiled them in; "host" runs the same source on CPU memory, one block after the other.
    device: that streams and addresses belong to; without an index, the one that is current when this is made.

    Raises:
        MissingDependency: there is no native core. KernelError: it has no CUDA kernels.
    """

    def __init__(self, machine: Machine, device: torch.device | None = None) -> None:
        starters = _core().P2pStarter
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
