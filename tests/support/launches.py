"""Launchers for tests without a device: one records launches, one runs them on the CPU and calls a function before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from moe_comm.gpu.arguments import Fields, Packer, Words, native_core, unpack
from moe_comm.gpu.launch import NativeLauncher


@dataclass(frozen=True)
class RecordedLaunch:
    """A recorded launch. ``words`` are the arguments as the kernel would read them."""

    kernel: str
    grid: int
    block: int
    shared: int
    stream: int
    words: dict[str, int]


@dataclass
class RecordingLauncher:
    """Records launches, for tests.

    Args:
        fields: arguments of each kernel.
        act: called with each launch, to simulate its effects.
    """

    fields: Fields
    act: Callable[[RecordedLaunch], None] | None = None
    launches: list[RecordedLaunch] = field(default_factory=list)

    def launch(self, kernel: str, grid: int, block: int, shared: int, stream: int, words: Words) -> None:
        """See ``Launcher``."""
        packed = Packer(self.fields).pack(kernel, words)
        launch = RecordedLaunch(kernel, grid, block, shared, stream, unpack(self.fields[kernel], packed))
        self.launches.append(launch)
        if self.act is not None:
            self.act(launch)


class HookedLauncher(NativeLauncher):
    """Runs kernels on the CPU, and calls ``before`` with the name of each."""

    def __init__(self, before: Callable[[str], None]) -> None:
        super().__init__("cpu")
        self._host, self._before = self.starter, before
        self.starter = native_core().P2pStarter.python(self._start)

    def _start(self, kernel: str, grid: int, block: int, shared: int, stream: int, packed: bytes) -> None:
        self._before(kernel)
        self._host.start(kernel, grid, block, shared, stream, packed)
