"""Dispatchers that all layers of a model share. They are attributes of the mesh, which the layers also share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moe_comm.dispatch import Dispatcher, DispatchOptions, make_dispatcher

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shared_dispatcher(
    num_experts: int,
    ep_mesh: DeviceMesh | None,
    device: torch.device,
    backend: str = "auto",
    options: DispatchOptions | None = None,
) -> Dispatcher:
    """Return the dispatcher over a mesh of one dimension, which the first call makes. That call is collective.

    Args:
        ep_mesh: None for all experts in this process.
        device, backend, options: see ``make_dispatcher``.
    """
    if ep_mesh is None:
        return make_dispatcher(num_experts, options=options)
    mesh: Any = ep_mesh
    dispatchers: dict[Any, Dispatcher] = vars(mesh).setdefault("_moe_comm_dispatchers", {})
    key = num_experts, device.type, backend, options
    if key not in dispatchers:
        dispatchers[key] = make_dispatcher(
            num_experts, ep_mesh.get_group(), backend=backend, options=options, device=device
        )
    return dispatchers[key]
