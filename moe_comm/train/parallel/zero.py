"""ZeRO-1 (arXiv 1910.02054): every rank holds a parameter whole, but updates a part of its rows only.

    w [5, D] on 2 ranks        rank 0                     rank 1
    backward                   grad [5, D]                grad [5, D]
    reduce-scatter             sum of rows 0..3           sum of rows 3..5 (and one row of padding)
    step                       rows 0..3                  rows 3..5
    all-gather                 w [5, D]                   w [5, D]

So optimizer state and master weights are spread over the ranks, and no more bytes travel than for an all-reduce.
Parameters of one group travel together in buckets: [W, N], row r of which is what rank r owns of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.topology import FoldedMesh, row_range
from moe_comm.train.parallel.compress import Wire, buckets
from moe_comm.train.parallel.owned import Held, Owned, master_dtype
from moe_comm.train.parallel.replicate import clear_gradient, compute_in, take_gradient


@dataclass(frozen=True)
class _Dealt:
    """offset, length: where a rank's padded piece of the parameter lies in its row of the bucket."""

    held: Held
    owned: Owned
    offset: int
    length: int


class _Bucket:
    def __init__(self, held: Sequence[Held], group: ProcessGroup, wire: Wire) -> None:
        self.group, self.wire = group, wire
        self.world, index = dist.get_world_size(group), dist.get_rank(group)
        lengths = [len(row_range(item.param.shape[0], 0, self.world)) * _row(item.param) for item in held]
        first = held[0].param
        self.master_N = torch.zeros(sum(lengths), dtype=master_dtype(first), device=first.device)
        self.dealt: list[_Dealt] = []
        offset = 0
        for item, length in zip(held, lengths, strict=True):
            param = item.param
            rows = row_range(param.shape[0], index, self.world)
            master = compute_in(param, item.dtype)
            own = (param if master is None else master).detach()[rows.start : rows.stop]
            piece = self.master_N[offset : offset + own.numel()].view(own.shape)
            piece.copy_(own)
            owned = Owned(item.name, nn.Parameter(piece), item.sharding, rows, item.sharding.sum_axes)
            self.dealt.append(_Dealt(item, owned, offset, length))
            offset += length
        self.dtype = held[0].dtype

    def reduce(self) -> None:
        parts_WN = self.master_N.new_empty(self.world, self.master_N.numel())
        for item in self.dealt:
            flat = take_gradient(item.held.param).reshape(-1)
            padded = F.pad(flat, (0, self.world * item.length - flat.numel()))
            parts_WN[:, item.offset : item.offset + item.length] = padded.view(self.world, item.length)
            if item.held.param.dtype == master_dtype(item.held.param):
                item.held.param.grad = None  # it has been copied: make room
        sum_N = self.wire.scatter_sum(parts_WN, self.group)
        for item in self.dealt:
            value = item.owned.value
            value.grad = sum_N[item.offset : item.offset + value.numel()].view(value.shape)

    def publish(self) -> None:
        whole_WN = self.wire.gather(self.master_N.to(self.dtype), self.group)
        for item in self.dealt:
            flat: Tensor = whole_WN[:, item.offset : item.offset + item.length].reshape(-1)
            item.held.param.copy_(flat[: item.held.param.numel()].view(item.held.param.shape))


class Dealt:
    """Parameters that every rank of their sum group holds whole, each updating its own rows."""

    def __init__(self, held: Sequence[Held], mesh: FoldedMesh, wire: Wire) -> None:
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
    def fits(held: Held, mesh: FoldedMesh) -> bool:
        """Whether there are rows to deal out, and ranks to deal them to."""
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


def _row(param: Tensor) -> int:
    return param.numel() // param.shape[0]
