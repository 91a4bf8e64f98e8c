"""Ranks of one host that share memory: one growing heap a rank, mapped by all, and waiting with deadlines.

rank 0  [control | blocks ...]  ◀──────┐ every rank maps every heap
rank 1  [control | blocks ...]  ◀──────┤ the name is removed as soon as all have: a SIGKILL leaks nothing
rank 2  [control | blocks ...]  ◀──────┘
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

import torch

from moe_comm.comm.channel import Channel
from moe_comm.errors import ConfigError, HeapError
from moe_comm.runtime.host import host_key
from moe_comm.runtime.memory import native

SEGMENT_PREFIX = "moe_comm"
TEXT_BYTES = 1024
"""Of what ranks tell each other at set-up: a name, and a bit for each core."""
SPIN_US = 50.0
"""How long a rank with a core of its own spins before it sleeps: waking up costs about as much."""


@dataclass(frozen=True)
class SharedOptions:
    """spin_us: microseconds to spin before sleeping; None spins only where
    every rank has a core. initial_bytes: room each heap starts with. reserve_bytes: address range each heap may grow
    into. first_progress: where the wrapping counters start (tests)."""

    spin_us: float | None = None
    initial_bytes: int = 4 << 20
    reserve_bytes: int = 1 << 38
    first_progress: int = 0


def _core_mask() -> int:
    """The cores this process may use, a bit each."""
    return sum(1 << core for core in os.sched_getaffinity(0))


def _distinct_cores(masks: Iterable[str]) -> int:
    """Cores that ranks with these hexadecimal masks have together; each may be pinned to its own."""
    together = 0
    for mask in masks:
        together |= int(mask, 16)
    return together.bit_count()


class SharedHeap:
    """This rank's heap and its peers', which all map. Construction is collective over the ranks of ``channel``.

    Attributes:
        heap: this rank's. communicator: of the native core, by which its operations meet.

    Raises:
        ConfigError: the ranks are not on one host.
        HeapError: shared memory is full or not accessible.
    """

    def __init__(self, channel: Channel, options: SharedOptions | None = None) -> None:
        core = native()
        core.sweep_stale(SEGMENT_PREFIX)
        try:
            self._meet(core, channel, options or SharedOptions())
        finally:
            # Whatever went wrong: an error that somebody keeps would keep this object, and so the name, alive.
            if hasattr(self, "heap"):
                self.heap.unlink()

    def _meet(self, core: ModuleType, channel: Channel, options: SharedOptions) -> None:
        """Make this rank's heap and attach the others'."""
        name = f"/{SEGMENT_PREFIX}.{os.getpid()}.{secrets.token_hex(8)}"
        # A rank that fails must not leave the others waiting in a collective: it says so in the next one.
        problem: Exception | None = None
        try:
            self.heap = core.Heap(name, core.Communicator.control_bytes(), options.initial_bytes, options.reserve_bytes)
        except HeapError as error:
            problem = error
        said = _gather_text(f"{host_key()} {name if problem is None else ''} {_core_mask():x}", channel)
        keys, names, masks = zip(*(text.split(" ") for text in said), strict=True)
        try:
            if len(set(keys)) > 1:
                raise ConfigError(
                    "shared_memory needs all ranks of the group on one host with one /dev/shm; "
                    "use all_to_all between hosts"
                )
            if problem is None and not all(names):
                raise HeapError(f"rank {names.index('')} could not create its shared memory")
            if problem is None:
                spin = SPIN_US if _distinct_cores(masks) >= channel.world else 0.0
                spin = spin if options.spin_us is None else options.spin_us
                self.communicator = core.Communicator(
                    self.heap, channel.rank, channel.world, channel.timeout_s, spin, options.first_progress
                )
                # Control regions must stand before peers look at them.
        except (HeapError, ConfigError) as error:
            problem = problem or error
        _agree(problem, channel, "set up its shared memory")
        try:
            self.communicator.attach(list(names))
        except HeapError as error:
            problem = error
        _agree(problem, channel, "attach the shared memory of its peers")


def _gather_text(text: str, channel: Channel) -> list[str]:
    """``text`` of every rank, by a collective of fixed size (no pickle)."""
    raw = text.encode()
    if len(raw) > TEXT_BYTES:
        raise ValueError(f"{text!r} is longer than {TEXT_BYTES} bytes")
    own = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
    own[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else own[:0]
    told = channel.all_gather(own.to(channel.control_device), "setting up shared memory")
    return [bytes(row).rstrip(b"\0").decode() for row in told.tolist()]


def _agree(problem: Exception | None, channel: Channel, what: str) -> None:
    """Raise on every rank if any has a problem."""
    failed = _gather_text("" if problem is None else "failed", channel)
    if problem is not None:
        raise problem
    if any(failed):
        raise HeapError(f"rank {failed.index('failed')} could not {what}")
