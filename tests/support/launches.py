"""A launcher that records launches, for tests without a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from moe_comm.gpu.arguments import Fields, Packer, Words, unpack


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
