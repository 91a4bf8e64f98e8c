"""What one rank's optimizer updates of each parameter, and where that lies in the whole parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_comm.errors import ConfigError
from moe_comm.layers.parallel.names import state_key
from moe_comm.topology import Box, ParallelMesh, Sharding, Share, deal


@dataclass(frozen=True, eq=False)
class Owned:
    """The part of one parameter that this rank's optimizer updates.

    name: of the parameter in the whole model.
    value: this part, fp32 (float64 in a float64 model); its ``grad`` is whole after ``DataParallel.reduce``.
    sharding: how the parameter is cut over tensor- and expert-parallel ranks.
    share: which share of the rank's own part of the parameter ``value`` is; None: all of it.
    owner_axes: mesh axes over whose ranks the part is dealt out, fastest first; () where ``share`` is None.
    even: as ``deal`` was told.
    counted: False for a second copy of a parameter that two pipeline stages share, which norms leave out.
    """

    name: str
    value: nn.Parameter
    sharding: Sharding
    share: Share | None = None
    owner_axes: tuple[str, ...] = ()
    even: bool = False
    counted: bool = True

    @property
    def copied_axes(self) -> tuple[str, ...]:
        """Mesh axes whose ranks own the very same elements."""
        return tuple(axis for axis in self.sharding.sum_axes if axis not in self.owner_axes)

    @property
    def spread_axes(self) -> tuple[str, ...]:
        """Mesh axes over whose ranks the whole parameter is spread."""
        return (*(split.axis for split in self.sharding.splits), *self.owner_axes)

    def counts_once(self, place: Mapping[str, int]) -> bool:
        """Whether the rank at ``place`` stands for all ranks of its pipeline stage that own the same elements."""
        return all(place[axis] == 0 for axis in self.copied_axes)

    def boxes(self, mesh: ParallelMesh, rank: int | None = None) -> list[Box]:
        """Where the elements that ``rank`` (default: this one) of the same stage owns lie in the whole parameter."""
        place = mesh.place if rank is None else mesh.config.place(rank)
        share = self.share
        if rank is not None and share is not None:
            share = self._share_of(place, mesh.sizes)
        return self.sharding.boxes(place, mesh.sizes, share)

    def shape_of(self, mesh: ParallelMesh, rank: int) -> tuple[int, ...]:
        """Shape of what ``rank`` of the same stage owns."""
        place = mesh.config.place(rank)
        shape = self.sharding.local_shape(place, mesh.sizes)
        return shape if self.share is None else self._share_of(place, mesh.sizes).shape(shape)

    def _share_of(self, place: Mapping[str, int], sizes: Mapping[str, int]) -> Share:
        index, parts = 0, 1
        for axis in self.owner_axes:
            index += place[axis] * parts
            parts *= sizes[axis]
        return deal(self.sharding.local_shape(place, sizes), index, parts, self.even)


@dataclass(frozen=True, eq=False)
class Held:
    """A parameter of this rank's modules that is trained. dtype: in which it is to compute."""

    name: str
    param: nn.Parameter
    sharding: Sharding
    dtype: torch.dtype


def hold(modules: Sequence[nn.Module], shardings: Mapping[str, Sharding], mesh: ParallelMesh) -> list[Held]:
    """The trained parameters of ``modules``, in the order in which every rank of the stage has them.

    A parameter that two modules share comes once.

    Raises:
        ConfigError: two parameters have one name, or one has another shape than its sharding says.
    """
    found: dict[str, Held] = {}
    seen: set[nn.Parameter] = set()
    for name, param in named(modules):
        if not param.requires_grad or param in seen:
            continue
        seen.add(param)
        if name in found:
            raise ConfigError(f"two parameters are called {name}; names are those of the whole model, on every stage")
        sharding = shardings.get(name, Sharding(tuple(param.shape)))
        expected = sharding.local_shape(mesh.place, mesh.sizes)
        if tuple(param.shape) != expected:
            raise ConfigError(
                f"{name} has shape {tuple(param.shape)}, but its sharding leaves it {expected} of {sharding.shape}"
            )
        found[name] = Held(name, param, sharding, param.dtype)
    return list(found.values())


def named(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by their names as in a state dict, in which wrappers do not show."""
    for module in modules:
        yield from ((state_key(name), param) for name, param in module.named_parameters())


def master_dtype(param: Tensor) -> torch.dtype:
    """The dtype in which ``param`` is updated and its gradient summed: fp32, or float64 for float64."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32
