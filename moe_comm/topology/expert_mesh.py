"""The DeviceMesh over which a training system without an axis for experts distributes them."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_comm.errors import ConfigError


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
