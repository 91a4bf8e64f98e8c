"""Gradient reduction over ranks, with the optional compression of MegaScale-MoE (arXiv 2505.11432).

Compressed reduction of a flat fp32 gradient of N elements on W ranks:

    rank r     fp32 sum of its micro-batches ── cast ──▶ bf16 chunks 0..W-1
               all-to-all: send chunk c of each rank to rank c                  2 bytes per element instead of 4
    rank c     sums the W bf16 chunks in fp32, in rank order

Each addend is rounded once, and sums stay in fp32 (a bf16 ring would round W - 1 times). With ZeRO-1 and FSDP, rank c
keeps the fp32 sum because only rank c updates the chunk. With replication, the sums are all-gathered as bf16. Rank c
also uses the rounded sum, so that all replicas stay identical. Two ranks exchange their bf16 gradients and add them in
fp32, which sends the same number of bytes without the second rounding.
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
class GradientTraffic:
    """Bytes that this rank sent for gradients (``reduced``) and for new weights (``published``).

    Per rank, an all-gather of n bytes over W ranks counts (W - 1) n bytes, an all-to-all or reduce-scatter
    (W - 1) / W n bytes, and an all-reduce the sum of both.
    """

    reduced: int = 0
    published: int = 0


class GradientReducer:
    """Reduce and gather over process groups, with optional compression, and count the bytes.

    Args:
        compress: reduce fp32 gradients as bf16.
        bucket_bytes: small tensors are concatenated up to this size.
    """

    def __init__(self, compress: bool = False, bucket_bytes: int = 64 << 20) -> None:
        self.compress, self.bucket_bytes = compress, bucket_bytes
        self.traffic = GradientTraffic()

    def sum(self, flat_N: Tensor, group: ProcessGroup | None) -> Tensor:
        """Return ``flat_N`` summed over ``group`` (None: this rank), with the same bits on all ranks."""
        world = group_size(group)
        if group is None or world == 1 or not flat_N.numel():
            return flat_N
        if not self._compresses(flat_N):
            self.traffic.reduced += 2 * (world - 1) * flat_N.nbytes // world
            return sum_values(flat_N, group)
        if world == 2:
            sent = flat_N.to(torch.bfloat16)
            self.traffic.reduced += sent.nbytes
            return _sum_fp32(gather_values(sent, group, "compressed gradients"))
        chunks = F.pad(flat_N, (0, -flat_N.numel() % world)).view(world, -1)
        local = self.scatter_sum(chunks, group).to(torch.bfloat16)
        self.traffic.reduced += (world - 1) * local.nbytes
        gathered = gather_values(local, group, "compressed gradient sums")
        return gathered.view(-1)[: flat_N.numel()].to(flat_N.dtype)

    def sum_all(self, tensors: Sequence[Tensor], group: ProcessGroup | None) -> list[Tensor]:
        """Return each of ``tensors``, which have one dtype, summed over ``group``."""
        if group is None:
            return list(tensors)
        sums: list[Tensor] = []
        for bucket in buckets([tensor.nbytes for tensor in tensors], self.bucket_bytes):
            members = [tensors[i] for i in bucket]
            flat = members[0].reshape(-1) if len(members) == 1 else torch.cat([t.reshape(-1) for t in members])
            totals = self.sum(flat, group).split([tensor.numel() for tensor in members])
            sums.extend(total.view(tensor.shape) for total, tensor in zip(totals, members, strict=True))
        return sums

    def scatter_sum(self, chunks_WN: Tensor, group: ProcessGroup) -> Tensor:
        """Reduce-scatter [W, N] over ``group``; return this rank's row [N]."""
        world = group_size(group)
        if world == 1 or not chunks_WN.numel():
            return chunks_WN[0]
        if not self._compresses(chunks_WN):
            self.traffic.reduced += (world - 1) * chunks_WN.nbytes // world
            return scatter_sum(chunks_WN.detach(), group, 0)[0]
        sent = chunks_WN.to(torch.bfloat16)
        self.traffic.reduced += (world - 1) * sent.nbytes // world
        return _sum_fp32(channel_of(group).swap(sent, "compressed gradients"))

    def gather(self, shard_N: Tensor, group: ProcessGroup) -> Tensor:
        """All-gather the new weights [N] of each rank to [W, N]."""
        self.traffic.published += (group_size(group) - 1) * shard_N.nbytes
        return gather_values(shard_N, group, "new weights")

    def _compresses(self, values: Tensor) -> bool:
        return self.compress and values.dtype == torch.float32


def buckets(sizes: Sequence[int], largest: int) -> list[list[int]]:
    """Split the indices of ``sizes`` into consecutive buckets: of size up to ``largest``, or of one larger item."""
    result: list[list[int]] = []
    free = -1
    for i, size in enumerate(sizes):
        if size > free:
            result.append([])
            free = largest
        result[-1].append(i)
        free -= size
    return result


def _sum_fp32(chunks_WN: Tensor) -> Tensor:
    """Sum over the first dimension in fp32, in rank order."""
    total = chunks_WN[0].to(torch.float32)
    for chunk in chunks_WN[1:]:
        total += chunk
    return total
