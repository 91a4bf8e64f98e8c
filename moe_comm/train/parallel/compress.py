"""Sums of gradients over ranks, as they are or with MegaScale-MoE's compression (arXiv 2505.11432).

A flat fp32 gradient of N elements on W ranks, each cut into W chunks; compressed:

    rank r     fp32 sum of its micro-batches ── cast ──▶ bf16 chunks 0..W-1
               all-to-all: chunk c of every rank goes to rank c                 2 bytes an element instead of 4
    rank c     adds the W bf16 chunks in fp32, in order of rank

An addend is rounded once, and sums are never kept in bf16 (a bf16 ring would round W - 1 times). With ZeRO-1 and FSDP
rank c keeps that fp32 sum, for it alone updates the chunk. With replication every rank needs every chunk: the sums go
round as bf16, and rank c too goes on with the rounded one, or the copies of a parameter would drift apart. (Two ranks
just swap what they have in bf16 and add it up in fp32: the same bytes, and no second rounding.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.layers.parallel.collectives import channel_of, gather_values, group_size, scatter_sum, sum_values


@dataclass
class Traffic:
    """Bytes that this rank has handed to others for gradients (``reduced``) and for new weights (``published``).

    As counted by volume: of n bytes to be all-gathered over W ranks a rank sends (W - 1) n, and of n bytes to be
    exchanged or reduce-scattered (W - 1) / W n; an all-reduce is both.
    """

    reduced: int = 0
    published: int = 0


class Wire:
    """Sums and gathers over process groups, compressed or not, counted. None as group: alone, nothing is sent.

    bucket_bytes: small tensors travel together up to this size.
    """

    def __init__(self, compress: bool = False, bucket_bytes: int = 64 << 20) -> None:
        self.compress, self.bucket_bytes = compress, bucket_bytes
        self.traffic = Traffic()

    def sum(self, flat_N: Tensor, group: ProcessGroup | None) -> Tensor:
        """[N] summed over ``group``, the same bits on every rank. The argument's values are unchanged."""
        world = group_size(group)
        if group is None or world == 1 or not flat_N.numel():
            return flat_N
        if not self._compresses(flat_N):
            self.traffic.reduced += 2 * (world - 1) * flat_N.nbytes // world
            return sum_values(flat_N, group)
        if world == 2:
            sent = flat_N.to(torch.bfloat16)
            self.traffic.reduced += sent.nbytes
            return _added(gather_values(sent, group, "compressed gradients"))
        parts = F.pad(flat_N, (0, -flat_N.numel() % world)).view(world, -1)
        own = self.scatter_sum(parts, group).to(torch.bfloat16)
        self.traffic.reduced += (world - 1) * own.nbytes
        whole = gather_values(own, group, "compressed gradient sums")
        return whole.view(-1)[: flat_N.numel()].to(flat_N.dtype)

    def sum_all(self, tensors: Sequence[Tensor], group: ProcessGroup | None) -> list[Tensor]:
        """Each of ``tensors``, all of one dtype, summed over ``group``."""
        if group is None:
            return list(tensors)
        done: list[Tensor] = []
        for bucket in buckets([tensor.nbytes for tensor in tensors], self.bucket_bytes):
            some = [tensors[i] for i in bucket]
            flat = some[0].reshape(-1) if len(some) == 1 else torch.cat([tensor.reshape(-1) for tensor in some])
            parts = self.sum(flat, group).split([tensor.numel() for tensor in some])
            done.extend(part.view(tensor.shape) for part, tensor in zip(parts, some, strict=True))
        return done

    def scatter_sum(self, parts_WN: Tensor, group: ProcessGroup) -> Tensor:
        """[W, N] summed over ``group``; this rank keeps its row [N]."""
        world = group_size(group)
        if world == 1 or not parts_WN.numel():
            return parts_WN[0]
        if not self._compresses(parts_WN):
            self.traffic.reduced += (world - 1) * parts_WN.nbytes // world
            return scatter_sum(parts_WN.detach(), group, 0)[0]
        sent = parts_WN.to(torch.bfloat16)
        self.traffic.reduced += (world - 1) * sent.nbytes // world
        ones = [1] * world
        return _added(channel_of(group).all_to_all(sent, ones, ones, "compressed gradients"))

    def gather(self, part_N: Tensor, group: ProcessGroup) -> Tensor:
        """[W, N]: the new weights of every rank's part."""
        self.traffic.published += (group_size(group) - 1) * part_N.nbytes
        return gather_values(part_N, group, "new weights")

    def _compresses(self, values: Tensor) -> bool:
        return self.compress and values.dtype == torch.float32


def buckets(sizes: Sequence[int], largest: int) -> list[list[int]]:
    """Indices of ``sizes`` in order, cut where a bucket would pass ``largest``; a bucket has at least one."""
    cut: list[list[int]] = []
    room = -1
    for i, size in enumerate(sizes):
        if size > room:
            cut.append([])
            room = largest
        cut[-1].append(i)
        room -= size
    return cut


def _added(parts_WN: Tensor) -> Tensor:
    """Sum over the first dimension in fp32, in order of rank."""
    total = parts_WN[0].to(torch.float32)
    for part in parts_WN[1:]:
        total += part
    return total
