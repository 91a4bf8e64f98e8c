"""Choose and build a dispatcher by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_comm.dispatch.base import Dispatcher, DispatchOptions
from moe_comm.dispatch.local import LocalDispatcher
from moe_comm.errors import ConfigError
from moe_comm.topology import ExpertPlacement

BACKENDS = ("auto", "local", "shared_memory", "all_to_all", "all_gather")


def make_dispatcher(
    num_experts: int,
    group: ProcessGroup | None = None,
    backend: str = "auto",
    *,
    experts_per_rank: Sequence[int] | None = None,
    options: DispatchOptions | None = None,
) -> Dispatcher:
    """Build a dispatcher for ``num_experts`` experts over the ranks of ``group``. Collective over the group.

    Args:
        group: the expert-parallel process group; None means this process holds every expert.
        backend: one of ``BACKENDS``; ``auto`` takes the cheapest that works for this group.
        experts_per_rank: how many experts each rank holds; balanced if not given.

    Raises:
        ConfigError: unknown backend, or sizes that do not add up.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"unknown dispatch backend {backend!r}; known: {', '.join(BACKENDS)}")
    world = dist.get_world_size(group) if group is not None else 1
    rank = dist.get_rank(group) if group is not None else 0
    placement = ExpertPlacement.of(num_experts, world, experts_per_rank)
    if world == 1:
        return LocalDispatcher(placement, group, rank, options)
    raise ConfigError(f"backend {backend!r} is not there yet")
