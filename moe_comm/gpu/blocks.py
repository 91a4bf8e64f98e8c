"""Blocks of memory, one a rank and all of one size, that the kernels of every rank read and write.

On GPUs they are torch's symmetric memory; on CPUs anonymous files that the ranks of one host map, which have no name in
/dev/shm and so leave nothing behind. A rank alone has a block of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import HeapError, MissingDependency

ALIGN = 256
"""Bytes; where every part of a block begins."""

Gather = Callable[[list[int]], list[list[int]]]
"""Numbers of this rank to those of all, by rank; collective."""


@dataclass(frozen=True)
class Blocks:
    """own: this rank's block, as bytes. addresses: of all ranks' blocks, as seen from this rank."""

    own: Tensor
    addresses: tuple[int, ...]
    keep: Any = field(repr=False, default=None)
    """Holds the mappings."""


def up(num_bytes: int, to: int = ALIGN) -> int:
    """``num_bytes``, rounded up to a multiple of ``to``."""
    return -(-num_bytes // to) * to


def alone(total: int, device: torch.device) -> Blocks:
    """The block of a rank without peers, all zeros."""
    own = torch.zeros(total + ALIGN, dtype=torch.uint8, device=device)
    own = own[-own.data_ptr() % ALIGN :][:total]
    return Blocks(own, (own.data_ptr(),))


def together(world: int, total: int, device: torch.device) -> list[Blocks]:
    """The blocks of ``world`` ranks in this one process and on one device, all zeros; by rank."""
    own_W = [alone(total, device).own for _ in range(world)]
    addresses = tuple(own.data_ptr() for own in own_W)
    return [Blocks(own, addresses, own_W) for own in own_W]


def symmetric(group: ProcessGroup, device: torch.device, total: int) -> Blocks:
    """Blocks on GPUs, all zeros; torch's symmetric memory. Collective: peers may write once all have come back from
    another collective.

    Raises:
        MissingDependency: this torch has none.
    """
    torch.cuda.synchronize(device)
    try:
        import torch.distributed._symmetric_memory as symmetric_memory
    except ImportError as error:
        raise MissingDependency(f"this torch has no symmetric memory for GPUs ({error})") from error
    own = symmetric_memory.empty(total, dtype=torch.uint8, device=device)
    own.zero_()
    handle = symmetric_memory.rendezvous(own, group)
    torch.cuda.synchronize(device)
    # Where torch cut it from a larger piece, it did so alike on every rank.
    first = own.data_ptr() - handle.buffer_ptrs[handle.rank]
    return Blocks(own, tuple(buffer + first for buffer in handle.buffer_ptrs), handle)


def mapped(gather: Gather, rank: int, host: int, total: int, what: str, first: bytes = b"") -> Blocks:
    """Blocks of CPU ranks on one host: each makes an anonymous file and maps the files of all. Collective.

    Args:
        host: a number that is the same on ranks of one host alone.
        first: what this rank's block begins with; the rest is zeros.
        what: it is for, in errors.

    Raises:
        HeapError: on every rank, if one has no room or cannot reach another's file.
    """
    fd, problem = -1, ""
    try:
        fd = os.memfd_create("moe_comm")
        os.posix_fallocate(fd, 0, total)
        os.pwrite(fd, first, 0)
    except OSError as error:
        problem = f"could not make {total} bytes of shared memory: {error}"
    try:
        told_WF = gather([os.getpid(), -1 if problem else fd, total, host])
        blocks: list[Tensor] = []
        if not problem:
            problem, blocks = _map_all(told_WF, rank, total)
        # Whoever is here has mapped all files or given up, so the descriptors may go.
        bad_W = [peer for peer, word in enumerate(gather([int(bool(problem))])) if word[0]]
    finally:
        if fd >= 0:
            os.close(fd)
    if bad_W:
        raise HeapError(f"{what}: {problem or f'ranks {bad_W} could not set it up'}")
    return Blocks(blocks[rank], tuple(block.data_ptr() for block in blocks), blocks)


def _map_all(told_WF: list[list[int]], rank: int, total: int) -> tuple[str, list[Tensor]]:
    """What went wrong, and the blocks in order of rank, each as bytes."""
    blocks: list[Tensor] = []
    for peer, (pid, fd, size, host) in enumerate(told_WF):
        if fd < 0:
            return f"rank {peer} has no shared memory", blocks
        if host != told_WF[rank][3]:
            return f"rank {peer} is on another host; kernels on CPUs need all ranks on one", blocks
        if size != total:
            return f"rank {peer} makes {size} bytes and rank {rank} {total}: they call different operators", blocks
        try:
            # Maps the file and closes it; mmap.mmap would keep it open.
            blocks.append(torch.from_file(f"/proc/{pid}/fd/{fd}", shared=True, size=total, dtype=torch.uint8))
        except RuntimeError as error:
            return f"could not map the memory of rank {peer}: {error}", blocks
    return "", blocks
