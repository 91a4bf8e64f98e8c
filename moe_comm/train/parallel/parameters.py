"""Parameters of a rank, and the shards that its optimizer updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_comm.errors import ConfigError
from moe_comm.layers.parallel.module import state_key
from moe_comm.topology import Box, ParallelMesh, Sharding, ShardSlice, shard_slice


@dataclass(eq=False)
class OwnedParameter:
    """The shard of one parameter that this rank's optimizer updates.

    Attributes:
        name: name of the parameter in the whole model.
        value: master weights of the shard, fp32 or float64. ``DataParallel.reduce`` sets its ``grad``.
        sharding: sharding of the parameter over tensor- and expert-parallel ranks; changes when experts are relocated.
        shard: slice of this rank's local parameter that ``value`` contains; None: all of it.
        owner_axes: mesh axes over which the local parameter is sharded, fastest first; () if ``shard`` is None.
        even: the ``even`` argument of ``shard_slice``.
        replicas: number of blocks into which the ranks of ``owner_axes`` are divided. Each block stores all shards.
        param: the parameter that the model computes with, if ``value`` is a separate master of its shard.
        offloaded: ``value`` is not in memory between updates, which also write ``weights``.
        counted: False for the second copy of a tied parameter, which the norm excludes.
    """

    name: str
    value: nn.Parameter
    sharding: Sharding
    shard: ShardSlice | None = None
    owner_axes: tuple[str, ...] = ()
    even: bool = False
    replicas: int = 1
    counted: bool = True
    param: nn.Parameter | None = None
    offloaded: bool = False

    @property
    def weights(self) -> Tensor | None:
        """What ``value`` is the master of: this rank's shard of ``param``, a view. None: the model computes with
        ``value`` itself, or gathers it.

        A new view each time, because copies of experts move a parameter to other memory.
        """
        if self.param is None:
            return None
        complete = self.param.detach()
        return complete if self.shard is None else self.shard.of(complete)

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Mesh axes whose ranks own the same elements, besides the ``replicas``."""
        return tuple(axis for axis in self.sharding.sum_axes if axis not in self.owner_axes)

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the parameter is sharded."""
        return (*(split.axis for split in self.sharding.splits), *self.owner_axes)

    def counts_once(self, mesh: ParallelMesh) -> bool:
        """Return whether this rank counts for all ranks of its stage that own the same elements."""
        index, shards = self._owner(mesh.place, mesh.sizes)
        return index < shards and all(mesh.place[axis] == 0 for axis in self.replicated_axes)

    def boxes(self, mesh: ParallelMesh, rank: int | None = None) -> list[Box]:
        """Return the positions in the full parameter of the elements that ``rank`` (default: this rank) owns."""
        place = mesh.place if rank is None else mesh.config.place(rank)
        shard = self.shard
        if rank is not None and shard is not None:
            shard = self._shard_of(place, mesh.sizes)
        return self.sharding.boxes(place, mesh.sizes, shard)

    def shape_of(self, mesh: ParallelMesh, rank: int) -> tuple[int, ...]:
        """Return the shape of the shard of ``rank``, a rank of the same stage."""
        place = mesh.config.place(rank)
        shape = self.sharding.local_shape(place, mesh.sizes)
        return shape if self.shard is None else self._shard_of(place, mesh.sizes).shape(shape)

    def _shard_of(self, place: Mapping[str, int], sizes: Mapping[str, int]) -> ShardSlice:
        index, shards = self._owner(place, sizes)
        return shard_slice(self.sharding.local_shape(place, sizes), index % shards, shards, self.even)

    def _owner(self, place: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return the index of the rank at ``place`` over ``owner_axes``, and the number of shards."""
        index, ranks = 0, 1
        for axis in self.owner_axes:
            index += place[axis] * ranks
            ranks *= sizes[axis]
        return index, ranks // self.replicas


@dataclass(frozen=True)
class WeightsReport:
    """Bytes of this rank's weights on the host.

    Attributes:
        stored: shards on the host, with FSDP's padding.
        read: shards that were copied to the device since the previous report.
        written: reduced gradients that were copied to the host.
    """

    stored: int
    read: int
    written: int


@dataclass(frozen=True, eq=False)
class LocalParameter:
    """A trained parameter of this rank's modules, and its compute dtype."""

    name: str
    param: nn.Parameter
    sharding: Sharding
    dtype: torch.dtype


def local_parameters(
    modules: Sequence[nn.Module], shardings: Mapping[str, Sharding], mesh: ParallelMesh
) -> list[LocalParameter]:
    """Return the trained parameters of ``modules``, in the same order on all ranks of the stage.

    A parameter that two modules share is returned once.
    """
    parameters: dict[str, LocalParameter] = {}
    unique: set[nn.Parameter] = set()
    for name, param in named_parameters(modules):
        if not param.requires_grad or param in unique:
            continue
        unique.add(param)
        if name in parameters:
            raise ConfigError(f"two parameters are called {name}; use the names of the whole model on all stages")
        sharding = shardings.get(name, Sharding(tuple(param.shape)))
        expected = sharding.local_shape(mesh.place, mesh.sizes)
        if tuple(param.shape) != expected:
            raise ConfigError(
                f"{name} has shape {tuple(param.shape)}, but its sharding of {sharding.shape} requires {expected}"
            )
        parameters[name] = LocalParameter(name, param, sharding, param.dtype)
    return list(parameters.values())


def named_parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters with their state dict names, without the names of wrappers."""
    for module in modules:
        yield from ((state_key(name), param) for name, param in module.named_parameters())


def master_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of the master weights and gradient sums of ``param``: fp32, or float64 for float64."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32
