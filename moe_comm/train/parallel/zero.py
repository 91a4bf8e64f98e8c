"""ZeRO-1 (arXiv 1910.02054): each rank stores full parameters, and updates one shard of each (``shard_slice``).

    w [5, D] on 2 ranks        rank 0                     rank 1
    backward                   grad [5, D]                grad [5, D]
    reduce-scatter             sum of rows 0, 1, 2        sum of rows 3, 4 (and one row of padding)
    step                       rows 0, 1, 2               rows 3, 4
    all-gather                 w [5, D]                   w [5, D]

Optimizer state and master weights are sharded over the ranks. The communication volume is that of an all-reduce.
Parameters with the same reduction group and dtypes are packed into buckets [W, N]. Row r contains the shards of rank r,
padded to equal size.
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

from moe_comm.topology import ParallelMesh, ShardSlice, shard_slice
from moe_comm.train.parallel.compress import GradientReducer, buckets
from moe_comm.train.parallel.parameters import LocalParameter, OwnedParameter, master_dtype
from moe_comm.train.parallel.replicate import clear_gradient, compute_in, take_gradient


@dataclass(frozen=True)
class _BucketEntry:
    """A parameter in a bucket. block: shape of the largest shard. offset: offset of the block in each row."""

    trained: LocalParameter
    owned: OwnedParameter
    shard: ShardSlice
    block: tuple[int, ...]
    offset: int

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + math.prod(self.block))

    @property
    def gaps(self) -> bool:
        """Whether this rank's shard is not contiguous in its block."""
        return self.shard.dim > 0 and 0 < len(self.shard.rows) < self.block[self.shard.dim]

    def scatter(self, blocks_WN: Tensor, full: Tensor) -> None:
        """Copy the shards of ``full`` into the blocks of all ranks."""
        dim, (world, _) = self.shard.dim, blocks_WN.shape
        missing = world * self.block[dim] - full.shape[dim]
        if missing:
            full = F.pad(full, (0, 0) * (full.dim() - 1 - dim) + (0, missing))
        shards = full.unflatten(dim, (world, self.block[dim])).movedim(dim, 0)
        blocks_WN[:, self.place].unflatten(1, self.block).copy_(shards)

    def gather(self, blocks_WN: Tensor) -> Tensor:
        """Return the full tensor from the blocks of all ranks; the inverse of ``scatter``."""
        dim = self.shard.dim
        shards = blocks_WN[:, self.place].unflatten(1, self.block).movedim(0, dim)
        padded: Tensor = shards.flatten(dim, dim + 1)
        return padded.narrow(dim, 0, self.trained.param.shape[dim])

    def local(self, row_N: Tensor) -> Tensor:
        """Return a view of this rank's shard in its row of a bucket."""
        return row_N[self.place].view(self.block).narrow(self.shard.dim, 0, len(self.shard.rows))


class _Bucket:
    """A ``WeightBucket`` of sharded parameters. keep: whether ``pack`` keeps the gradients, for comparisons."""

    def __init__(self, trained: Sequence[LocalParameter], group: ProcessGroup, keep: bool) -> None:
        self.group, self.keep = group, keep
        self.params = [item.param for item in trained]
        self.world, index = dist.get_world_size(group), dist.get_rank(group)
        blocks = [shard_slice(item.param.shape, 0, self.world).shape(item.param.shape) for item in trained]
        first = trained[0].param
        self.master_N = torch.zeros(sum(map(math.prod, blocks)), dtype=master_dtype(first), device=first.device)
        self.entries: list[_BucketEntry] = []
        offset = 0
        for item, block in zip(trained, blocks, strict=True):
            param = item.param
            shard = shard_slice(param.shape, index, self.world)
            master = compute_in(param, item.dtype)
            initial = shard.of((param if master is None else master).detach())
            # Masters are contiguous, as fused optimizers require.
            value = self.master_N[offset : offset + initial.numel()].view(initial.shape)
            value.copy_(initial)
            owned = OwnedParameter(item.name, nn.Parameter(value), item.sharding, shard, item.sharding.sum_axes)
            self.entries.append(_BucketEntry(item, owned, shard, block, offset))
            offset += math.prod(block)
        self.dtype = trained[0].dtype
        self.gaps = any(item.gaps for item in self.entries)

    def pack(self) -> Tensor:
        blocks_WN = self.master_N.new_empty(self.world, self.master_N.numel())
        for item in self.entries:
            param = item.trained.param
            item.scatter(blocks_WN, take_gradient(param))
            if param.dtype == master_dtype(param) and not self.keep:
                param.grad = None  # free the copied gradient
        return blocks_WN

    def reduce(self, reducer: GradientReducer, group: ProcessGroup | None, packed: Tensor) -> Tensor:
        assert group is not None
        return reducer.scatter_sum(packed, group)

    def unpack(self, total: Tensor) -> None:
        for item in self.entries:
            item.owned.value.grad = item.local(total).contiguous()

    def pack_weights(self) -> Tensor:
        row_N = self.master_N.to(self.dtype, copy=self.gaps)
        for item in self.entries:
            if item.gaps:
                item.local(row_N).copy_(item.owned.value)
        return row_N

    def gather(self, reducer: GradientReducer, group: ProcessGroup, packed: Tensor) -> Tensor:
        return reducer.gather(packed, group)

    def unpack_weights(self, gathered: Tensor) -> None:
        for item in self.entries:
            item.trained.param.copy_(item.gather(gathered))


class ZeroParameters:
    """Parameters that all ranks of their reduction group store completely, and update in shards."""

    def __init__(
        self, trained: Sequence[LocalParameter], mesh: ParallelMesh, bucket_bytes: int, keep: bool = False
    ) -> None:
        families: dict[tuple[tuple[int, ...], torch.dtype, torch.dtype], list[LocalParameter]] = {}
        # Backward completes the gradients in about the reverse order of registration.
        for item in reversed(trained):
            key = (mesh.ranks(*item.sharding.sum_axes), master_dtype(item.param), item.dtype)
            families.setdefault(key, []).append(item)
        self.buckets: list[_Bucket] = []
        for family in families.values():
            group = mesh.sum_group(family[0].sharding)
            assert group is not None
            sizes = [item.param.numel() * master_dtype(item.param).itemsize for item in family]
            for bucket in buckets(sizes, bucket_bytes):
                self.buckets.append(_Bucket([family[i] for i in bucket], group, keep))
        self.zero_grad()

    @staticmethod
    def fits(trained: LocalParameter, mesh: ParallelMesh) -> bool:
        """Return whether the parameter can be sharded over more than one rank."""
        return mesh.size(*trained.sharding.sum_axes) > 1 and trained.param.dim() > 0 and trained.param.numel() > 0

    @property
    def owned(self) -> list[OwnedParameter]:
        return [item.owned for bucket in self.buckets for item in bucket.entries]

    def zero_grad(self) -> None:
        for bucket in self.buckets:
            for item in bucket.entries:
                clear_gradient(item.trained.param)
                item.owned.value.grad = None
