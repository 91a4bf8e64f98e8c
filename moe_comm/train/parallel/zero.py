"""Plain data parallelism, and ZeRO-1 (arXiv 1910.02054): each rank stores full parameters.

With ZeRO-1, each rank updates one shard of each (``shard_slice``):

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


def take_gradient(param: nn.Parameter) -> Tensor:
    """Return the gradient of ``param`` in its master dtype; zeros if there is none (experts without rows)."""
    if param.grad is None:
        return torch.zeros_like(param, dtype=master_dtype(param))
    return param.grad.to(master_dtype(param))


def clear_gradient(param: nn.Parameter) -> None:
    """Reset the gradient of ``param`` for the next step.

    A 16-bit parameter accumulates its micro-batches in fp32: autograd casts each gradient to ``grad_dtype`` and adds it
    in place. Its ``grad`` is zeros instead of None, because split backward passes assign a 16-bit gradient to an empty
    ``grad``.
    """
    if param.dtype == master_dtype(param):
        param.grad = None
    elif param.grad is None:
        param.grad = torch.zeros_like(param, dtype=master_dtype(param))
    else:
        param.grad.zero_()


@torch.no_grad()
def compute_in(param: nn.Parameter, dtype: torch.dtype) -> Tensor | None:
    """Cast ``param`` to ``dtype``, with gradients in the master dtype.

    Returns:
        The master weights before the cast; None if ``dtype`` is the master dtype, so that ``param`` is its own master.
    """
    master = param.detach().to(master_dtype(param))
    param.data = master.to(dtype)
    param.grad_dtype = master.dtype
    return None if dtype == master.dtype else master


@dataclass(frozen=True)
class _Replica:
    trained: LocalParameter
    owned: OwnedParameter
    has_master: bool


class ReplicatedBucket:
    """Gradients of replicated parameters that are reduced together, over ``group`` (None: this rank)."""

    def __init__(self, replicas: Sequence[_Replica], group: ProcessGroup | None) -> None:
        self._replicas, self.group = replicas, group
        self.params = [replica.trained.param for replica in replicas]

    def pack(self) -> Tensor:
        grads = [take_gradient(param).reshape(-1) for param in self.params]
        return grads[0] if len(grads) == 1 else torch.cat(grads)

    def reduce(self, reducer: GradientReducer, group: ProcessGroup | None, packed: Tensor) -> Tensor:
        return reducer.sum(packed, group)

    def unpack(self, total: Tensor) -> None:
        sums = total.split([param.numel() for param in self.params])
        for replica, total in zip(self._replicas, sums, strict=True):
            replica.owned.value.grad = total.view(replica.owned.value.shape)


class ReplicatedParameters:
    """Parameters that all ranks of their reduction group store, reduce and update completely."""

    def __init__(self, trained: Sequence[LocalParameter], mesh: ParallelMesh, bucket_bytes: int) -> None:
        self._replicas: list[_Replica] = []
        families: dict[tuple[tuple[int, ...], torch.dtype], list[_Replica]] = {}
        for item in trained:
            master = compute_in(item.param, item.dtype)
            value = item.param if master is None else nn.Parameter(master)
            owned = OwnedParameter(item.name, value, item.sharding, param=None if master is None else item.param)
            replica = _Replica(item, owned, master is not None)
            self._replicas.append(replica)
            families.setdefault((mesh.ranks(*item.sharding.sum_axes), value.dtype), []).append(replica)
        self.buckets: list[ReplicatedBucket] = []
        for family in families.values():
            group = mesh.sum_group(family[0].trained.sharding)
            # Backward completes the gradients in about the reverse order of registration.
            family.reverse()
            largest = 0 if group is None else bucket_bytes  # 0: one parameter each, which needs no copy
            for bucket in buckets([replica.owned.value.nbytes for replica in family], largest):
                self.buckets.append(ReplicatedBucket([family[i] for i in bucket], group))
        self.zero_grad()

    @property
    def owned(self) -> list[OwnedParameter]:
        return [replica.owned for replica in self._replicas]

    def zero_grad(self) -> None:
        for replica in self._replicas:
            clear_gradient(replica.trained.param)
            if replica.has_master:
                replica.owned.value.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        for replica in self._replicas:
            if replica.has_master and not replica.owned.offloaded:
                replica.trained.param.copy_(replica.owned.value)


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


class ZeroBucket:
    """Gradients of sharded parameters that are reduced together, and weights that are gathered after the update.

    keep: whether ``pack`` keeps the gradients, for comparisons.
    """

    def __init__(self, trained: Sequence[LocalParameter], group: ProcessGroup, keep: bool) -> None:
        self.group, self.keep = group, keep
        self.params = [item.param for item in trained]
        self.world, index = dist.get_world_size(group), dist.get_rank(group)
        blocks = [shard_slice(item.param.shape, 0, self.world).shape(item.param.shape) for item in trained]
        first = trained[0].param
        # Only the values refer to it: its memory is freed when they are offloaded.
        master_N = torch.zeros(sum(map(math.prod, blocks)), dtype=master_dtype(first), device=first.device)
        self.width = master_N.numel()
        self.entries: list[_BucketEntry] = []
        offset = 0
        for item, block in zip(trained, blocks, strict=True):
            param = item.param
            shard = shard_slice(param.shape, index, self.world)
            master = compute_in(param, item.dtype)
            initial = shard.of((param if master is None else master).detach())
            # Masters are contiguous, as fused optimizers require.
            value = master_N[offset : offset + initial.numel()].view(initial.shape)
            value.copy_(initial)
            owned = OwnedParameter(
                item.name,
                nn.Parameter(value),
                item.sharding,
                shard,
                item.sharding.sum_axes,
                param=param,
            )
            self.entries.append(_BucketEntry(item, owned, shard, block, offset))
            offset += math.prod(block)
        self.dtype = trained[0].dtype
        self.gaps = any(item.gaps for item in self.entries)

    def pack(self) -> Tensor:
        blocks_WN = self.entries[0].owned.value.new_empty(self.world, self.width)
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
        first = self.entries[0].owned
        if any(item.owned.offloaded for item in self.entries):
            row_N = first.value.new_zeros(self.width, dtype=self.dtype)
        else:
            row_N = first.value.detach().as_strided((self.width,), (1,), 0).to(self.dtype, copy=self.gaps)
        for item in self.entries:
            if item.owned.offloaded:
                item.local(row_N).copy_(item.shard.of(item.trained.param))
            elif item.gaps:
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
        self.buckets: list[ZeroBucket] = []
        for family in families.values():
            group = mesh.sum_group(family[0].sharding)
            assert group is not None
            sizes = [item.param.numel() * master_dtype(item.param).itemsize for item in family]
            for bucket in buckets(sizes, bucket_bytes):
                self.buckets.append(ZeroBucket([family[i] for i in bucket], group, keep))
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
