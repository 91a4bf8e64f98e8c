"""Shared memory of ranks on one host: one growing heap per rank, mapped by all ranks, and waits with deadlines.

rank 0  [control | blocks ...]  ◀──────┐ every rank maps every heap
rank 1  [control | blocks ...]  ◀──────┤ the name is removed after all ranks have mapped it,
rank 2  [control | blocks ...]  ◀──────┘ so a SIGKILL leaves nothing in /dev/shm
"""

from __future__ import annotations

import os
import secrets
from functools import partial, reduce
from operator import or_
from types import ModuleType

from moe_comm.comm.agree import agree, gather_texts
from moe_comm.comm.channel import Channel
from moe_comm.errors import ConfigError, HeapError
from moe_comm.runtime.groups import host_key
from moe_comm.runtime.memory import native

SEGMENT_PREFIX = "moe_comm"
SPIN_US = 50.0
"""Spin time before a rank with its own core sleeps, in microseconds. A wake-up takes about as long."""
INITIAL_BYTES, RESERVE_BYTES = 4 << 20, 1 << 38
"""Initial size of each heap, and the address range that it can grow into."""
FIRST_PROGRESS = 0
"""Initial value of the progress counters. Tests let them wrap around."""


class SharedHeap:
    """The heaps of all ranks, mapped into this process. Construction is collective over the ranks of ``channel``."""

    def __init__(self, channel: Channel) -> None:
        core = native()
        core.sweep_stale(SEGMENT_PREFIX)
        try:
            self._create(core, channel)
        finally:
            # Also after errors: a stored exception would keep this object, and so the name, alive.
            if hasattr(self, "heap"):
                self.heap.unlink()

    def _create(self, core: ModuleType, channel: Channel) -> None:
        """Create this rank's heap and attach those of the others."""
        name = f"/{SEGMENT_PREFIX}.{os.getpid()}.{secrets.token_hex(8)}"
        # A rank that fails reports it in the next exchange, so that the others do not wait.
        cores = sum(1 << core for core in os.sched_getaffinity(0))
        outcome: str | Exception = f"{host_key()} {name} {cores:x}"
        try:
            self.heap = core.Heap(name, core.Communicator.control_bytes(), INITIAL_BYTES, RESERVE_BYTES)
        except HeapError as error:
            outcome = error
        gather = partial(gather_texts, channel, "setting up shared memory")
        keys, names, masks = zip(*(text.split(" ") for text in agree(outcome, gather)), strict=True)
        if len(set(keys)) > 1:  # on every rank
            raise ConfigError(
                "shared_memory needs all ranks of the group on one host with one /dev/shm; use all_to_all between hosts"
            )
        distinct_cores = reduce(or_, (int(mask, 16) for mask in masks)).bit_count()
        spin = SPIN_US if distinct_cores >= channel.world else 0.0
        outcome = ""
        try:
            self.communicator = core.Communicator(
                self.heap, channel.rank, channel.world, channel.timeout_s, spin, FIRST_PROGRESS
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
