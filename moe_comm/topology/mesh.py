"""``ParallelMesh``: the process groups of a ``ParallelConfig``, and two DeviceMeshes over one world made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_comm.errors import ConfigError
from moe_comm.topology.parallel import ATTENTION_AXES, EXPERT_AXES, ParallelConfig
from moe_comm.topology.sharding import Sharding

STAGE = ("tp", "cp", "dp")
"""Axes of all ranks of one pipeline stage."""
GROUPS: tuple[tuple[str, ...], ...] = (
    ("tp",),
    ("cp",),
    ("dp",),
    ("pp",),
    ("tp", "cp"),
    ("cp", "dp"),
    STAGE,
    ("etp",),
    ("ep",),
    ("edp",),
    ("etp", "ep"),
    ("etp", "edp"),
)
"""Every group a mesh makes, by the axes on which its ranks differ."""


class ParallelMesh:
    """This rank's place in a folded mapping and the groups it is in. Every rank makes one alike. Collective.

    Needs the default process group where ``config.world`` is more than one; a single rank needs none.

    Args:
        device: of the DeviceMeshes, "cpu" or "cuda".

    Attributes:
        attention: DeviceMesh (pp, dp, cp, tp). expert: DeviceMesh (pp, edp, ep, etp). Outermost first, as DeviceMesh
            has it; ``mesh.attention["tp"]`` is the tensor-parallel one. Both None where there is no process group.
        place: this rank's coordinate on each of the seven axes. sizes: their sizes.

    Raises:
        ConfigError: the world has another size than ``config``.
    """

    def __init__(self, config: ParallelConfig, device: str = "cpu") -> None:
        world, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if world != config.world:
            raise ConfigError(f"the mapping ({config}) is for {config.world} ranks, but there are {world}")
        self.config = config
        self.device = device
        self.place: Mapping[str, int] = config.place(self.rank)
        self.sizes: Mapping[str, int] = config.sizes
        self.attention: DeviceMesh | None = None
        self.expert: DeviceMesh | None = None
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._tied: ProcessGroup | None = None
        if not dist.is_initialized():
            return
        for axes in GROUPS:
            self._make(self.ranks(*axes))
        if config.pp > 1:
            pipeline = self.ranks("pp")
            # Only the ends of the pipeline share the tied embedding; the ranks between never call it.
            if self.rank in (pipeline[0], pipeline[-1]):
                self._tied = self._make((pipeline[0], pipeline[-1]))
            else:
                # torch names a group by how many its maker has made: ranks that had made fewer would wait in vain for
                # the others to meet them in any group that comes after.
                dist.new_group(pipeline[1:-1], use_local_synchronization=True)
        self.attention = self._mesh(ATTENTION_AXES)
        self.expert = self._mesh(EXPERT_AXES)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """The ranks of this rank's group over ``axes``."""
        return self.config.group_of(self.rank, *axes)

    def group(self, *axes: str) -> ProcessGroup | None:
        """This rank's group over ``axes`` (one of ``GROUPS``, in any order); None where it would be alone.

        Raises:
            ConfigError: no such group is made.
        """
        ranks = self.ranks(*axes)
        if len(ranks) == 1:
            return None
        if ranks not in self._groups:
            raise ConfigError(f"no group over {axes}; there are {GROUPS}")
        return self._groups[ranks]

    def size(self, *axes: str) -> int:
        return self.config.size(*axes)

    @property
    def tied_group(self) -> ProcessGroup | None:
        """First and last pipeline stage, which both hold a tied embedding; None without pipeline, or between them."""
        return self._tied

    @property
    def world_group(self) -> ProcessGroup | None:
        """All ranks; None where this one is alone."""
        whole: Any = dist.group
        return whole.WORLD if self.config.world > 1 else None

    def sum_group(self, sharding: Sharding) -> ProcessGroup | None:
        """The group over which the gradient of a parameter with ``sharding`` is summed."""
        return self.group(*sharding.sum_axes)

    def flat_mesh(self, *axes: str) -> DeviceMesh:
        """A one-dimensional DeviceMesh over the group of ``axes``, such as ("cp", "dp") for FSDP. No communication."""
        ranks = self.ranks(*axes)
        if ranks not in self._groups:
            raise ConfigError(f"no group over {axes}; there are {GROUPS}")
        return DeviceMesh.from_group(self._groups[ranks], self.device, mesh_dim_names=("_".join(axes),))

    def _mesh(self, side: tuple[str, ...]) -> DeviceMesh:
        outermost_first = tuple(reversed(side))
        mesh = torch.arange(self.config.world).view([self.sizes[axis] for axis in outermost_first])
        groups = [self._groups[self.ranks(axis)] for axis in outermost_first]
        return DeviceMesh.from_group(groups, self.device, mesh=mesh, mesh_dim_names=outermost_first)

    def _make(self, ranks: tuple[int, ...]) -> ProcessGroup:
        if ranks not in self._groups:
            # Only members take part, so a rank makes the few groups it is in and not those of the whole world.
            group = self.world_group if len(ranks) == self.config.world else None
            self._groups[ranks] = group or dist.new_group(ranks, use_local_synchronization=True)
        return self._groups[ranks]
