"""A toy model on a parallel mesh with a closed-form gradient, for comparing shardings.

The loss of each parameter p is the sum over tokens t and elements of c_t (p - a_t)^2 / 2. The batch has 8 tokens for
every mapping. The ranks over which the gradient of p is reduced split the tokens, so the reduced gradient does not
depend on the mapping.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.topology import ParallelMesh, Sharding, Split
from moe_comm.train.optim import Optimizer, OptimizerOptions, make_optimizer
from moe_comm.train.parallel import DataParallel, DataParallelOptions, OwnedParameter
from moe_comm.train.pipeline import prepare_backward

TOKENS = 8
EXPERTS = 6
W13 = Sharding((8, 5), (Split(0, "tp", segments=2),))
SHARDINGS = {
    "embed.weight": Sharding((10, 4), (Split(0, "tp"),)),
    "scale": Sharding(()),
    "layers.0.norm.weight": Sharding((5,)),
    "layers.0.dense.w13": W13,
    "layers.0.dense.w2": Sharding((5, 4), (Split(1, "tp"),)),
    "layers.0.router.weight": Sharding((EXPERTS, 5)),
    "layers.0.experts.w13": Sharding((EXPERTS, 4, 5), (Split(0, "ep"), Split(1, "etp", segments=2)), expert=True),
    "layers.0.experts.w2": Sharding((EXPERTS, 5, 2), (Split(0, "ep"), Split(2, "etp")), expert=True),
    "layers.0.experts.b2": Sharding((EXPERTS, 5), (Split(0, "ep"),), expert=True),
    "layers.1.dense.w13": W13,
    "layers.1.odd": Sharding((5, 3)),
    "head.weight": Sharding((10, 4), (Split(0, "tp"),)),
}


def whole(name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    """Return a random global tensor that depends only on ``name`` and ``kind``, so that it is equal on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {kind}".encode()))
    return torch.randn(shape, generator=generator)


class Toy(nn.Module):
    """Tree of modules built from dotted parameter names. Each module holds its direct parameters."""

    def __init__(self, shardings: Mapping[str, Sharding], mesh: ParallelMesh, prefix: str = "") -> None:
        super().__init__()
        self.mesh, self.prefix, self.shardings_ = mesh, prefix, dict(shardings)
        children: dict[str, dict[str, Sharding]] = {}
        for name, sharding in shardings.items():
            head, _, rest = name.partition(".")
            if rest:
                children.setdefault(head, {})[rest] = sharding
            else:
                value = sharding.take(whole(prefix + name, "weight", sharding.shape), mesh.place, mesh.sizes)
                setattr(self, name, nn.Parameter(value))
        for head, inner in children.items():
            if head == "layers":
                layers: dict[str, dict[str, Sharding]] = {}
                for name, sharding in inner.items():
                    layer, _, rest = name.partition(".")
                    layers.setdefault(layer, {})[rest] = sharding
                modules = {k: Toy(v, mesh, f"{prefix}layers.{k}.") for k, v in layers.items()}
                self.layers = nn.ModuleDict(modules)
            else:
                setattr(self, head, Toy(inner, mesh, f"{prefix}{head}."))

    def forward(self, total: Tensor, part: int = 0, parts: int = 1) -> Tensor:
        """Add this module's loss on micro-batch ``part`` of ``parts`` to ``total``."""
        for name, param in self.named_parameters(recurse=False):
            total = total + self._loss(name, param, part, parts)
        for child in self.children():
            for module in child.values() if isinstance(child, nn.ModuleDict) else [child]:
                total = module(total, part, parts)
        return total

    def _loss(self, name: str, param: Tensor, part: int, parts: int) -> Tensor:
        sharding = self.shardings_[name]
        place, sizes = self.mesh.place, self.mesh.sizes
        index, members = 0, 1
        for axis in sharding.sum_axes:
            index += place[axis] * members
            members *= sizes[axis]
        total = param.new_zeros(())
        for token in range(TOKENS):
            if token % members == index and (token // members) % parts == part:
                target = whole(self.prefix + name, f"at {token}", sharding.shape)
                weight = whole(self.prefix + name, f"weight {token}", sharding.shape).abs()
                target, weight = (sharding.take(t, place, sizes).to(param.dtype) for t in (target, weight))
                total = total + (weight * (param - target).square()).sum() / 2
        return total


def make(
    mesh: ParallelMesh, options: DataParallelOptions, shardings: Mapping[str, Sharding] = SHARDINGS, **more: Any
) -> tuple[Toy, DataParallel]:
    model = Toy(shardings, mesh)
    return model, DataParallel(model, shardings, mesh, options, **more)


def backward(model: Toy, data_parallel: DataParallel, parts: int = 1) -> None:
    """Run forward and backward of all micro-batches of a step, and reduce the gradients over ranks."""
    data_parallel.zero_grad()
    for part in range(parts):
        last = part == parts - 1
        prepare_backward(model, last)
        loss = model(torch.zeros(()), part, parts)
        if last:
            data_parallel.begin_backward(model)
        loss.backward()
    data_parallel.end_backward(model)
    data_parallel.reduce()


def train(
    mesh: ParallelMesh,
    options: DataParallelOptions,
    optimizer_options: OptimizerOptions,
    *,
    lr: float = 0.05,
    steps: int = 3,
    parts: int = 2,
    shardings: Mapping[str, Sharding] = SHARDINGS,
    **more: Any,
) -> tuple[DataParallel, Optimizer, Toy]:
    model, data_parallel = make(mesh, options, shardings, **more)
    optimizer = make_optimizer(data_parallel.owned(), mesh, optimizer_options)
    for _ in range(steps):
        backward(model, data_parallel, parts)
        optimizer.step(lr)
        data_parallel.publish()
    return data_parallel, optimizer, model


Pieces = list[tuple[str, tuple[slice, ...], Tensor]]


def pieces(owned: list[OwnedParameter], mesh: ParallelMesh, values: Mapping[str, Tensor] | None = None) -> Pieces:
    """Return the shards that a rank owns as (parameter name, slices of the full parameter, values)."""
    result: Pieces = []
    for item in owned:
        value = item.value.detach() if values is None else values[item.name]
        result += [(item.name, box.full, value[box.local].clone()) for box in item.boxes(mesh)]
    return result


def assemble(
    of_ranks: list[Pieces], shardings: Mapping[str, Sharding] = SHARDINGS, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Assemble the full parameters from the shards of all ranks.

    Fails if an element has no owner, or if two owners have different values.
    """
    params = {name: torch.full(sharding.shape, torch.nan, dtype=dtype) for name, sharding in shardings.items()}
    for owned in of_ranks:
        for name, box, value in owned:
            current = params[name][box]
            assert (current.isnan() | (current == value)).all(), f"owners of {name} differ"
            params[name][box] = value
    for name, tensor in params.items():
        assert not tensor.isnan().any(), f"{name} has elements without an owner"
    return params
