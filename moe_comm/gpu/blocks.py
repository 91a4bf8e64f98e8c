"""Memory blocks of equal size, one per rank, that the kernels of all ranks read and write.

On GPUs they are torch's symmetric memory, and on CPUs files that the ranks of one host map
(``comm/shared_heap.mapped_blocks``). HeapError is raised if ranks share a GPU.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
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
