"""ZeRO-1 (arXiv 1910.02054): every rank holds a parameter whole, but updates its share only, as ``deal`` gives it.

    w [5, D] on 2 ranks        rank 0                     rank 1
    backward                   grad [5, D]                grad [5, D]
    reduce-scatter             sum of rows 0..3           sum of rows 3..5 (and one row of padding)
    step                       rows 0..3                  rows 3..5
    all-gather                 w [5, D]                   w [5, D]

So optimizer state and master weights are spread over the ranks, and no more bytes travel than for an all-reduce.
Parameters of one group travel together in buckets: [W, N], row r of which is what rank r owns of each, padded to the
largest share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.topology import ParallelMesh, Share, deal
from moe_comm.train.parallel.compress import Wire, buckets
from moe_comm.train.parallel.owned import Held, Owned, master_dtype
from moe_comm.train.parallel.replicate import clear_gradient, compute_in, take_gradient


@dataclass(frozen=True)
class _Dealt:
    """block: shape of the largest share, in which every rank's lies from ``offset`` on in its row of the bucket."""

    held: Held
    owned: Owned
    share: Share
    block: tuple[int, ...]
    offset: int

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + math.prod(self.block))

    @property
    def gaps(self) -> bool:
        """Whether the elements of this rank's share do not lie end to end in its block."""
        return self.share.dim > 0 and 0 < len(self.share.rows) < self.block[self.share.dim]

    def fill(self, blocks_WN: Tensor, whole: Tensor) -> None:
        """Deal ``whole`` out into the blocks of all ranks."""
        dim, (world, _) = self.share.dim, blocks_WN.shape
        missing = world * self.block[dim] - whole.shape[dim]
        if missing:
            whole = F.pad(whole, (0, 0) * (whole.dim() - 1 - dim) + (0, missing))
        dealt = whole.unflatten(dim, (world, self.block[dim])).movedim(dim, 0)
        blocks_WN[:, self.place].unflatten(1, self.block).copy_(dealt)

    def whole(self, blocks_WN: Tensor) -> Tensor:
        """What ``fill`` took, from the blocks of all ranks."""
        dim = self.share.dim
        dealt = blocks_WN[:, self.place].unflatten(1, self.block).movedim(0, dim)
        padded: Tensor = dealt.flatten(dim, dim + 1)
        return padded.narrow(dim, 0, self.held.param.shape[dim])

    def own(self, row_N: Tensor) -> Tensor:
        """A view of this rank's share in its row of a bucket."""
        return row_N[self.place].view(self.block).narrow(self.share.dim, 0, len(self.share.rows))


class _Bucket:
    def __init__(self, held: Sequence[Held], group: ProcessGroup, wire: Wire) -> None:
        self.group, self.wire = group, wire
        self.world, index = dist.get_world_size(group), dist.get_rank(group)
        blocks = [deal(item.param.shape, 0, self.world).shape(item.param.shape) for item in held]
        first = held[0].param
        self.master_N = torch.zeros(sum(map(math.prod, blocks)), dtype=master_dtype(first), device=first.device)
        self.dealt: list[_Dealt] = []
        offset = 0
        for item, block in zip(held, blocks, strict=True):
            param = item.param
            share = deal(param.shape, index, self.world)
            master = compute_in(param, item.dtype)
            own = share.of((param if master is None else master).detach())
            # Masters have no gaps, or fused optimizers would not take them.
            piece = self.master_N[offset : offset + own.numel()].view(own.shape)
            piece.copy_(own)
            owned = Owned(item.name, nn.Parameter(piece), item.sharding, share, item.sharding.sum_axes)
            self.dealt.append(_Dealt(item, owned, share, block, offset))
            offset += math.prod(block)
        self.dtype = held[0].dtype
        self.gaps = any(item.gaps for item in self.dealt)

    def reduce(self) -> None:
        parts_WN = self.master_N.new_empty(self.world, self.master_N.numel())
        for item in self.dealt:
            item.fill(parts_WN, take_gradient(item.held.param))
            if item.held.param.dtype == master_dtype(item.held.param):
                item.held.param.grad = None  # it has been copied: make room
        sum_N = self.wire.scatter_sum(parts_WN, self.group)
        for item in self.dealt:
            item.owned.value.grad = item.own(sum_N).contiguous()

    def publish(self) -> None:
        row_N = self.master_N.to(self.dtype, copy=self.gaps)
        for item in self.dealt:
            if item.gaps:
                item.own(row_N).copy_(item.owned.value)
        blocks_WN = self.wire.gather(row_N, self.group)
        for item in self.dealt:
            item.held.param.copy_(item.whole(blocks_WN))


class Dealt:
    """Parameters that every rank of their sum group holds whole, each updating its own share."""

    def __init__(self, held: Sequence[Held], mesh: ParallelMesh, wire: Wire) -> None:
        families: dict[tuple[tuple[int, ...], torch.dtype, torch.dtype], list[Held]] = {}
        for item in held:
            key = (mesh.ranks(*item.sharding.sum_axes), master_dtype(item.param), item.dtype)
            families.setdefault(key, []).append(item)
        self._buckets: list[_Bucket] = []
        for family in families.values():
            group = mesh.sum_group(family[0].sharding)
            assert group is not None
            sizes = [item.param.numel() * master_dtype(item.param).itemsize for item in family]
            for bucket in buckets(sizes, wire.bucket_bytes):
                self._buckets.append(_Bucket([family[i] for i in bucket], group, wire))
        self.zero_grad()

    @staticmethod
    def fits(held: Held, mesh: ParallelMesh) -> bool:
        """Whether there is something to deal out, and ranks to deal it to."""
        return mesh.size(*held.sharding.sum_axes) > 1 and held.param.dim() > 0 and held.param.numel() > 0

    @property
    def owned(self) -> list[Owned]:
        return [item.owned for bucket in self._buckets for item in bucket.dealt]

    def zero_grad(self) -> None:
        for bucket in self._buckets:
            for item in bucket.dealt:
                clear_gradient(item.held.param)
                item.owned.value.grad = None

    def reduce(self) -> None:
        for bucket in self._buckets:
            bucket.reduce()

    @torch.no_grad()
    def publish(self) -> None:
        for bucket in self._buckets:
            bucket.publish()
