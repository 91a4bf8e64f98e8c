"""Memory blocks of equal size, one per rank, that the kernels of all ranks read and write.

On GPUs they are torch's symmetric memory. On CPUs they are anonymous files that the ranks of one host map. These files
have no name in /dev/shm, so nothing is left behind. HeapError is raised on every rank: a rank has no room, cannot map
the block of another, or shares its GPU.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import HeapError, MissingDependency

ALIGN = 256
"""Alignment in bytes of all parts of a block."""
SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Environment variable: ``1`` lets ranks on the same GPU use torch's symmetric memory."""

Gather = Callable[[list[int]], list[list[int]]]
"""Collective function from the numbers of this rank to those of all ranks."""


@dataclass(frozen=True)
class Blocks:
    """own: this rank's block, as bytes. addresses: of all blocks in this process. keep: owner of the mappings."""

    own: Tensor
    addresses: tuple[int, ...]
    keep: Any = field(repr=False, default=None)


def round_up(num_bytes: int, to: int = ALIGN) -> int:
    """Return ``num_bytes`` rounded up to a multiple of ``to``."""
    return -(-num_bytes // to) * to


def single_block(total: int, device: torch.device) -> Blocks:
    """Return the block of a rank without peers, filled with zeros."""
    own = torch.zeros(total + ALIGN, dtype=torch.uint8, device=device)
    own = own[-own.data_ptr() % ALIGN :][:total]
    return Blocks(own, (own.data_ptr(),))


def device_word(device: torch.device) -> int:
    """Return a number that identifies a rank's GPU by its UUID; 0 without one."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return zlib.crc32(str(torch.cuda.get_device_properties(index).uuid).encode()) + 1


def symmetric_blocks(group: ProcessGroup, device: torch.device, total: int) -> Blocks:
    """Return blocks on GPUs in torch's symmetric memory, filled with zeros. Collective.

    Peers may write to them after a later collective.
    """
    torch.cuda.synchronize(device)
    try:
        import torch.distributed._symmetric_memory as symmetric_memory
    except ImportError as error:
        raise MissingDependency(f"this torch has no symmetric memory for GPUs ({error})") from error
    own = symmetric_memory.empty(total, dtype=torch.uint8, device=device)
    own.zero_()
    with any_device_index(group, device):
        handle = symmetric_memory.rendezvous(own, group)
    torch.cuda.synchronize(device)
    # torch may allocate it inside a larger buffer, at the same offset on every rank.
    first = own.data_ptr() - handle.buffer_ptrs[handle.rank]
    return Blocks(own, tuple(buffer + first for buffer in handle.buffer_ptrs), handle)


@contextmanager
def any_device_index(group: ProcessGroup, device: torch.device) -> Iterator[None]:
    """Let torch accept ranks on different GPUs with the same index. Collective.

    torch takes ranks of a host with the same device index for ranks that share a GPU. If CUDA_VISIBLE_DEVICES shows
    each rank one GPU, all have the index 0. So this compares UUIDs, and switches torch's check off.
    """
    before = os.environ.get(SHARING)
    words = torch.zeros(group.size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(
        words, torch.tensor([device_word(device)], dtype=torch.int64, device=device), group=group
    )
    if before != "1" and len(set(words.tolist())) < group.size():
        raise HeapError(f"ranks share a GPU: {words.tolist()}; for tests, set {SHARING}=1 on every rank")
    os.environ[SHARING] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SHARING]
        else:
            os.environ[SHARING] = before


def mapped_blocks(gather: Gather, rank: int, host: int, total: int, what: str, first: bytes = b"") -> Blocks:
    """Return blocks of CPU ranks on one host. Each rank creates an anonymous file and maps those of all. Collective.

    Args:
        host: a number that identifies the host.
        what: purpose, for error messages.
        first: initial bytes of this rank's block; the rest is zeros.
    """
    fd, problem = -1, ""
    try:
        fd = os.memfd_create("moe_comm")
        os.posix_fallocate(fd, 0, total)
        os.pwrite(fd, first, 0)
    except OSError as error:
        problem = f"could not allocate {total} bytes of shared memory: {error}"
    try:
        files_WF = gather([os.getpid(), -1 if problem else fd, total, host])
        blocks: list[Tensor] = []
        if not problem:
            problem, blocks = _map_all(files_WF, rank, total)
        # After this exchange all ranks have mapped all files or failed, so the descriptors can be closed.
        bad_W = [peer for peer, word in enumerate(gather([int(bool(problem))])) if word[0]]
    finally:
        if fd >= 0:
            os.close(fd)
    if bad_W:
        raise HeapError(f"{what}: {problem or f'ranks {bad_W} could not set it up'}")
    return Blocks(blocks[rank], tuple(block.data_ptr() for block in blocks), blocks)


def _map_all(files_WF: list[list[int]], rank: int, total: int) -> tuple[str, list[Tensor]]:
    """Return an error text ("" for none), and the blocks as bytes, by rank."""
    blocks: list[Tensor] = []
    for peer, (pid, fd, size, host) in enumerate(files_WF):
        if fd < 0:
            return f"rank {peer} has no shared memory", blocks
        if host != files_WF[rank][3]:
            return f"rank {peer} is on another host; kernels on CPUs need all ranks on one", blocks
        if size != total:
            return f"rank {peer} needs {size} bytes and rank {rank} {total}: they call different operators", blocks
        try:
            # from_file closes the file after mapping it; mmap.mmap would keep it open.
            blocks.append(torch.from_file(f"/proc/{pid}/fd/{fd}", shared=True, size=total, dtype=torch.uint8))
        except RuntimeError as error:
            return f"could not map the memory of rank {peer}: {error}", blocks
    return "", blocks
