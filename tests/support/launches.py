"""Launchers for tests without a device: one records launches, one runs them on the CPU and calls a function before."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from moe_comm.gpu.arguments import kernel_fields
from moe_comm.gpu.launch import Launcher, NativeLauncher
from moe_comm.runtime.native_core import native


@dataclass(frozen=True)
class RecordedLaunch:
    """A recorded launch. ``words`` are the arguments as the kernel would read them."""

    kernel: str
    grid: int
    block: int
    shared: int
    stream: int
    words: dict[str, int]


class RecordingLauncher(Launcher):
    """Records launches. act: called with each launch, to simulate its effects."""

    def __init__(self, act: Callable[[RecordedLaunch], None] = lambda launch: None) -> None:
        super().__init__(native().P2pStarter.python(self._record))
        self._act, self._fields = act, kernel_fields()
        self.launches: list[RecordedLaunch] = []

    def _record(self, kernel: str, grid: int, block: int, shared: int, stream: int, packed: bytes) -> None:
        names = self._fields[kernel]
        words = dict(zip(names, struct.unpack(f"={len(names)}q", packed), strict=True))
        self.launches.append(RecordedLaunch(kernel, grid, block, shared, stream, words))
        self._act(self.launches[-1])


class HookedLauncher(NativeLauncher):
    """Runs kernels on the CPU, and calls ``before`` with the name of each."""

    def __init__(self, before: Callable[[str], None]) -> None:
        super().__init__("cpu")
        self._host, self._before = self.starter, before
        self.starter = native().P2pStarter.python(self._start)

    def _start(self, kernel: str, grid: int, block: int, shared: int, stream: int, packed: bytes) -> None:
        self._before(kernel)
        self._host.start(kernel, grid, block, shared, stream, packed)
