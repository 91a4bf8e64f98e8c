"""Shared memory of ranks on one host: a growing heap or a block of fixed size for each rank, which all ranks map.

rank 0  [control | blocks ...]  ◀──────┐ every rank maps every heap
rank 1  [control | blocks ...]  ◀──────┤ the name is removed after all ranks have mapped it,
rank 2  [control | blocks ...]  ◀──────┘ so a SIGKILL leaves nothing in /dev/shm
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from functools import partial, reduce
from operator import or_
from types import ModuleType

import torch
from torch import Tensor

from moe_comm.comm.agree import agree, attempt, gather_texts
from moe_comm.comm.channel import Channel
from moe_comm.errors import ConfigError, HeapError
from moe_comm.gpu.blocks import Blocks
from moe_comm.runtime.groups import host_key
from moe_comm.runtime.native_core import native

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
        # Peers access the control region only after this exchange.
        self.communicator = attempt(
            lambda: core.Communicator(self.heap, channel.rank, channel.world, channel.timeout_s, spin, FIRST_PROGRESS),
            gather,
        )
        attempt(lambda: self.communicator.attach(list(names)), gather)


def mapped_blocks(channel: Channel, total: int, what: str, first: bytes = b"") -> Blocks:
    """Return blocks of CPU ranks on one host. Each rank creates an anonymous file and maps those of all. Collective.

    The files have no name in /dev/shm, so nothing is left behind.

    Args:
        total: size of each block in bytes; the same on all ranks.
        what: purpose, for error messages.
        first: initial bytes of this rank's block; the rest is zeros.

    Raises:
        HeapError: a rank has no room, or cannot map the block of another; on every rank.
    """
    gather, fd = partial(gather_texts, channel, what), -1
    outcome: str | HeapError
    try:
        try:
            fd = os.memfd_create("moe_comm")
            os.posix_fallocate(fd, 0, total)
            os.pwrite(fd, first, 0)
            outcome = f"{os.getpid()} {fd} {total} {host_key()}"
        except OSError as error:
            outcome = HeapError(f"{what}: could not allocate {total} bytes of shared memory: {error}")
        files_W = [text.split(" ") for text in agree(outcome, gather)]
        # Afterwards all ranks have mapped all files, so the descriptors can be closed.
        blocks = attempt(lambda: [_mapped(file, files_W[channel.rank], what) for file in files_W], gather)
    finally:
        if fd >= 0:
            os.close(fd)
    return Blocks(blocks[channel.rank], tuple(block.data_ptr() for block in blocks), blocks)


def _mapped(file: Sequence[str], own: Sequence[str], what: str) -> Tensor:
    """Map a rank's file. ``file``: its process, descriptor, size and host; ``own``: those of this rank's file."""
    pid, fd, size, host = file
    if (size, host) != (own[2], own[3]):
        raise HeapError(
            f"{what}: ranks need {size} bytes on host {host} and {own[2]} bytes on host {own[3]}. Kernels on CPUs need "
            "the same operator on all ranks of one host"
        )
    try:
        # from_file closes the file after mapping it; mmap.mmap would keep it open.
        return torch.from_file(f"/proc/{pid}/fd/{fd}", shared=True, size=int(size), dtype=torch.uint8)
    except RuntimeError as error:
        raise HeapError(f"{what}: could not map the memory of process {pid}: {error}") from error
