"""Shared memory of ranks on one host: one growing heap per rank, mapped by all ranks, and waits with deadlines.

rank 0  [control | blocks ...]  ◀──────┐ every rank maps every heap
rank 1  [control | blocks ...]  ◀──────┤ the name is removed after all ranks have mapped it,
rank 2  [control | blocks ...]  ◀──────┘ so a SIGKILL leaves nothing in /dev/shm
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

from moe_comm.comm.agree import agree, gather_texts
from moe_comm.comm.channel import Channel
from moe_comm.errors import ConfigError, HeapError
from moe_comm.runtime.groups import host_key
from moe_comm.runtime.memory import native

SEGMENT_PREFIX = "moe_comm"
SPIN_US = 50.0
"""Spin time before a rank with its own core sleeps, in microseconds. A wake-up takes about as long."""


@dataclass(frozen=True)
class SharedOptions:
    """Options of shared memory.

    Args:
        spin_us: microseconds to spin before sleeping; None spins only if each rank has its own core.
        initial_bytes: initial size of each heap.
        reserve_bytes: address range that each heap can grow into.
        first_progress: initial value of the progress counters, so that tests can let them wrap around.
    """

    spin_us: float | None = None
    initial_bytes: int = 4 << 20
    reserve_bytes: int = 1 << 38
    first_progress: int = 0


def _core_mask() -> int:
    """Return the cores that this process may use, as a bit mask."""
    return sum(1 << core for core in os.sched_getaffinity(0))


def _distinct_cores(masks: Iterable[str]) -> int:
    """Return the number of cores in the union of hexadecimal masks."""
    union = 0
    for mask in masks:
        union |= int(mask, 16)
    return union.bit_count()


class SharedHeap:
    """The heaps of all ranks, mapped into this process. Construction is collective over the ranks of ``channel``."""

    def __init__(self, channel: Channel, options: SharedOptions | None = None) -> None:
        core = native()
        core.sweep_stale(SEGMENT_PREFIX)
        try:
            self._create(core, channel, options or SharedOptions())
        finally:
            # Also after errors: a stored exception would keep this object, and so the name, alive.
            if hasattr(self, "heap"):
                self.heap.unlink()

    def _create(self, core: ModuleType, channel: Channel, options: SharedOptions) -> None:
        """Create this rank's heap and attach those of the others."""
        name = f"/{SEGMENT_PREFIX}.{os.getpid()}.{secrets.token_hex(8)}"
        # A rank that fails reports it in the next exchange, so that the others do not wait.
        outcome: str | Exception = f"{host_key()} {name} {_core_mask():x}"
        try:
            self.heap = core.Heap(name, core.Communicator.control_bytes(), options.initial_bytes, options.reserve_bytes)
        except HeapError as error:
            outcome = error
        gather = partial(gather_texts, channel, "setting up shared memory")
        keys, names, masks = zip(*(text.split(" ") for text in agree(outcome, gather)), strict=True)
        if len(set(keys)) > 1:  # on every rank
            raise ConfigError(
                "shared_memory needs all ranks of the group on one host with one /dev/shm; use all_to_all between hosts"
            )
        spin = SPIN_US if _distinct_cores(masks) >= channel.world else 0.0
        spin = spin if options.spin_us is None else options.spin_us
        outcome = ""
        try:
            self.communicator = core.Communicator(
                self.heap, channel.rank, channel.world, channel.timeout_s, spin, options.first_progress
            )
        except HeapError as error:
            outcome = error
        agree(outcome, gather)  # peers access the control region only after this exchange
        outcome = ""
        try:
            self.communicator.attach(list(names))
        except HeapError as error:
            outcome = error
        agree(outcome, gather)
