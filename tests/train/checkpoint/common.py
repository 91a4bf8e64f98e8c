"""A synthetic model with all kinds of sharding, and the checkpoint entries of each rank of a mapping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.topology import ExpertPlacement, ParallelConfig, Sharding, ShardSlice, Split, shard_slice
from moe_comm.train.checkpoint import Entry

EXPERTS = 3  # not divisible by any ep > 1 of the tests; at ep 4 one rank has no expert


@dataclass(frozen=True)
class Mapping_:
    """A mapping of ranks. style: which tensors are also sharded over the ranks that hold replicas: "replicate" none,
    "zero1" optimizer state, "fsdp" all."""

    config: ParallelConfig
    style: str

    def __str__(self) -> str:
        return f"{self.config} {self.style}".replace(", ", "-").replace(" ", "")


def shardings(config: ParallelConfig) -> dict[str, tuple[Sharding, torch.dtype, set[int]]]:
    """Return sharding, dtype and pipeline stages of each tensor, by name."""
    experts = ExpertPlacement.balanced(EXPERTS, config.ep).experts_per_rank
    first, last = 0, config.pp - 1
    f32 = torch.float32
    params = {
        "embed.weight": (Sharding((12, 6), (Split(0, "tp"),)), f32, {first, last}),  # tied: on both end stages
        "layers.0.q.weight": (Sharding((8, 6), (Split(0, "tp"),)), f32, {first}),
        "layers.0.o.weight": (Sharding((6, 8), (Split(1, "tp"),)), f32, {first}),
        "layers.0.norm.weight": (Sharding((5,)), f32, {first}),
        "layers.0.dense.w13": (Sharding((16, 6), (Split(0, "tp", segments=2),)), torch.bfloat16, {first}),
        "layers.1.moe.router.weight": (Sharding((EXPERTS, 6)), f32, {last}),
        "layers.1.moe.experts.w13": (
            Sharding((EXPERTS, 16, 6), (Split(0, "ep", sizes=experts), Split(1, "etp", segments=2)), expert=True),
            f32,
            {last},
        ),
        "layers.1.moe.experts.w2": (
            Sharding((EXPERTS, 6, 8), (Split(0, "ep", sizes=experts), Split(2, "etp")), expert=True),
            f32,
            {last},
        ),
        "layers.1.moe.bias": (Sharding((0,)), f32, {last}),
    }
    tensors = {}
    for name, (sharding, dtype, stages) in params.items():
        tensors[f"model/{name}"] = (sharding, dtype, stages)
        tensors[f"optimizer/{name}/exp_avg"] = (sharding, torch.float32, stages)
        tensors[f"optimizer/{name}/step"] = (Sharding(()), torch.int64, stages)
    return tensors


def whole_of(name: str, sharding: Sharding, dtype: torch.dtype) -> Tensor:
    """Return a tensor of random bits, including NaN and infinities. It depends on the name only."""
    generator = torch.Generator().manual_seed(sum(n * ord(c) for n, c in enumerate(name, 1)))
    count = math.prod(sharding.shape) * dtype.itemsize
    bits = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).view(sharding.shape)


def wholes(config: ParallelConfig) -> dict[str, Tensor]:
    return {name: whole_of(name, sharding, dtype) for name, (sharding, dtype, _) in shardings(config).items()}


def entries_of(mapping: Mapping_, rank: int, *, fill: bool = True) -> dict[str, Entry]:
    """Return the entries of ``rank``; with ``fill`` False, tensors of zeros to load into."""
    config = mapping.config
    place, sizes = config.place(rank), config.sizes
    entries = {}
    for name, (sharding, dtype, stages) in shardings(config).items():
        if place["pp"] not in stages:
            continue
        part = sharding.take(whole_of(name, sharding, dtype), place, sizes)
        share = None
        if mapping.style == "fsdp" or (mapping.style == "zero1" and name.startswith("optimizer")):
            share = share_of(part, sharding, place, sizes)
        if share is not None:
            part = share.of(part).clone()
        entries[name] = Entry.of(part if fill else torch.zeros_like(part), sharding, place, sizes, share)
    return entries


def share_of(part: Tensor, sharding: Sharding, place: Mapping[str, int], sizes: Mapping[str, int]) -> ShardSlice | None:
    if not part.shape:
        return None
    index = parts = 0
    parts = math.prod(sizes[axis] for axis in sharding.sum_axes)
    for axis in reversed(sharding.sum_axes):
        index = index * sizes[axis] + place[axis]
    return shard_slice(part.shape, index, parts)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Set ``owner.name`` to ``value`` inside the block; yields the old value. For ranks, which have no monkeypatch."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)
