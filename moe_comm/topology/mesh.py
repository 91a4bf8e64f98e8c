"""``ParallelMesh``: the process groups of a ``ParallelConfig``, and the two DeviceMeshes over the same ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_comm.errors import ConfigError
from moe_comm.topology.parallel import ATTENTION_AXES, EXPERT_AXES, ParallelConfig
from moe_comm.topology.sharding import Sharding

STAGE = ("tp", "cp", "dp")
"""The axes that span all ranks of one pipeline stage."""
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
"""Each group that a mesh creates, given by the axes on which its ranks differ."""


class ParallelMesh:
    """The process groups and the coordinates of this rank in a folded mapping. Collective.

    Needs the default process group if ``config.world`` is more than one.

    Args:
        device: device type of the DeviceMeshes, "cpu" or "cuda".

    Attributes:
        attention: DeviceMesh (pp, dp, cp, tp), outermost axis first; None without a process group.
        expert: DeviceMesh (pp, edp, ep, etp), outermost axis first; None without a process group.
        place: coordinate of this rank on each of the seven axes.
        sizes: size of each axis.
        tied_group: first and last pipeline stage, which share a tied embedding; None on other ranks.

    Raises:
        ConfigError: the world size differs from that of ``config``.
    """

    def __init__(self, config: ParallelConfig, device: str = "cpu") -> None:
        world, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if world != config.world:
            raise ConfigError(f"the mapping ({config}) is for {config.world} ranks, but the world size is {world}")
        self.config = config
        self.device = device
        self.place: Mapping[str, int] = config.place(self.rank)
        self.sizes: Mapping[str, int] = config.sizes
        self.attention: DeviceMesh | None = None
        self.expert: DeviceMesh | None = None
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self.tied_group: ProcessGroup | None = None
        if not dist.is_initialized():
            return
        for axes in GROUPS:
            self._make(self.ranks(*axes))
        if config.pp > 1:
            pipeline = self.ranks("pp")
            # Only the ends of the pipeline share the tied embedding; the ranks between never call it.
            if self.rank in (pipeline[0], pipeline[-1]):
                self.tied_group = self._make((pipeline[0], pipeline[-1]))
            else:
                # torch names a group by the number of groups that the process created before it. All ranks must
                # create the same number, or the rendezvous of later groups times out.
                dist.new_group(pipeline[1:-1], use_local_synchronization=True)
        self.attention = self._mesh(ATTENTION_AXES)
        self.expert = self._mesh(EXPERT_AXES)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks of this rank's group over ``axes``."""
        return self.config.group_of(self.rank, *axes)

    def group(self, *axes: str) -> ProcessGroup | None:
        """Return this rank's process group over ``axes``, or None if the group has one rank.

        Args:
            axes: one of ``GROUPS``, in any order.

        Raises:
            ConfigError: the mesh has no group over ``axes``.
        """
        ranks = self.ranks(*axes)
        if len(ranks) == 1:
            return None
        if ranks not in self._groups:
            raise ConfigError(f"the mesh has no group over {axes}; expected one of {GROUPS}")
        return self._groups[ranks]

    def size(self, *axes: str) -> int:
        """Return the number of ranks of the group over ``axes``."""
        return self.config.size(*axes)

    @property
    def world_group(self) -> ProcessGroup | None:
        """The group of all ranks; None for a single rank."""
        groups: Any = dist.group
        return groups.WORLD if self.config.world > 1 else None

    def sum_group(self, sharding: Sharding) -> ProcessGroup | None:
        """Return the group over which the gradient of a parameter with ``sharding`` is summed."""
        return self.group(*sharding.sum_axes)

    def flat_mesh(self, *axes: str, replicas: int = 1) -> DeviceMesh:
        """Return a 1-D DeviceMesh over the group of ``axes``, such as ("cp", "dp") for FSDP.

        Args:
            replicas: number of blocks of consecutive ranks into which the group is divided. The mesh is that of this
                rank's block. Collective over the block if it is more than 1.

        Raises:
            ConfigError: ``replicas`` does not divide the group.
        """
        ranks, block = self._blocks(axes, replicas)
        group = self._make(ranks[block]) if replicas > 1 else self._groups[ranks[block]]
        return DeviceMesh.from_group(group, self.device, mesh_dim_names=("_".join(axes),))

    def replica_group(self, *axes: str, replicas: int) -> ProcessGroup | None:
        """Return the group of the ranks with this rank's position in the other blocks of ``flat_mesh``. Collective.

        None if ``replicas`` is 1.
        """
        if replicas == 1:
            return None
        ranks, block = self._blocks(axes, replicas)
        place = ranks[block].index(self.rank)
        return self._make(tuple(members[place] for members in ranks))

    def _blocks(self, axes: Sequence[str], replicas: int) -> tuple[list[tuple[int, ...]], int]:
        """Return the ranks of each block of the group over ``axes``, and the index of this rank's block."""
        ranks = self.ranks(*axes)
        if ranks not in self._groups:
            raise ConfigError(f"the mesh has no group over {axes}; expected one of {GROUPS}")
        if len(ranks) % replicas:
            raise ConfigError(f"{replicas} replicas do not divide the {len(ranks)} ranks of {' x '.join(axes)}")
        size = len(ranks) // replicas
        return [ranks[i : i + size] for i in range(0, len(ranks), size)], ranks.index(self.rank) // size

    def close(self) -> None:
        """Destroy the process groups of the mesh, except that of all ranks. Collective; the mesh is unusable then."""
        groups = [*self._groups.values()]
        self._groups.clear()
        for group in groups:
            if group is not self.world_group:
                dist.destroy_process_group(group)

    def _mesh(self, grid: tuple[str, ...]) -> DeviceMesh:
        outermost_first = tuple(reversed(grid))
        mesh = torch.arange(self.config.world, device="cpu").view([self.sizes[axis] for axis in outermost_first])
        groups = [self._groups[self.ranks(axis)] for axis in outermost_first]
        return DeviceMesh.from_group(groups, self.device, mesh=mesh, mesh_dim_names=outermost_first)

    def _make(self, ranks: tuple[int, ...]) -> ProcessGroup:
        if ranks not in self._groups:
            # Only members create a group, so each rank creates few groups.
            group = self.world_group if len(ranks) == self.config.world else None
            self._groups[ranks] = group or dist.new_group(ranks, use_local_synchronization=True)
        return self._groups[ranks]


def expert_mesh(ep_size: int | None = None, device_type: str = "cpu") -> DeviceMesh | None:
    """Return a mesh with the dimensions "edp" and "ep" over all ranks. Collective.

    Ranks of one "ep" group are consecutive and hold different experts; ranks of one "edp" group hold the same experts
    and sum their gradients. ``swap_moe`` and ``MoELayer.build`` take the mesh or ``mesh["ep"]``.

        2 of 4 ranks      ranks 0, 1    experts 0..3, 4..7
                          ranks 2, 3    experts 0..3, 4..7

    Args:
        ep_size: ranks that the experts are distributed over; None for all ranks.
        device_type: "cpu" or "cuda".

    Returns:
        The mesh, or None without a default process group: the process then holds all experts.

    Raises:
        ConfigError: the number of ranks is not a multiple of ``ep_size``.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    ep_size = world if ep_size is None else ep_size
    if ep_size < 1 or world % ep_size:
        raise ConfigError(f"ep_size={ep_size} must be positive and divide the number of ranks, {world}")
    if not dist.is_initialized():
        return None
    return init_device_mesh(device_type, (world // ep_size, ep_size), mesh_dim_names=("edp", "ep"))
