"""Dispatchers that all layers of a model share. They live as long as the process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

from moe_comm.comm.group_setup import as_group, communicator_of
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.selection.factory import new_dispatcher
from moe_comm.dispatch.types import DispatchOptions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shared_dispatcher(
    num_experts: int,
    group: ProcessGroup | DeviceMesh | None,
    device: torch.device,
    backend: str = "auto",
    options: DispatchOptions | None = None,
) -> Dispatcher:
    """Return the dispatcher over a group, which the first call with these arguments makes. That call is collective.

    Args:
        group: a process group, or a mesh of one dimension. None: this process has all experts.
        device, backend, options: see ``make_dispatcher``.
    """
    members, options = as_group(group), options or DispatchOptions()
    if members is None:
        return new_dispatcher(num_experts, backend=backend, options=options, device=device)
    dispatchers: dict[object, Dispatcher] = communicator_of(members, options.timeout_s).keep("shared dispatchers", dict)
    key = num_experts, device.type, backend, options
    if key not in dispatchers:
        dispatchers[key] = new_dispatcher(num_experts, members, backend=backend, options=options, device=device)
    return dispatchers[key]
