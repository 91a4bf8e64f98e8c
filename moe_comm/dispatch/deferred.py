"""The dispatcher of a layer on the meta device. It has a placement and moves no rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.header import Header
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions
from moe_comm.errors import ConfigError
from moe_comm.topology import ExpertPlacement


class DeferredDispatcher(Dispatcher):
    """Placeholder for a dispatcher, without communication or memory. ``connect`` replaces it.

    Args:
        placement, group, rank, options: arguments of the dispatcher that replaces this one.
        make: creates that dispatcher for rows on a device. Collective over ``group``.
    """

    name = "deferred"

    def __init__(
        self,
        placement: ExpertPlacement,
        group: ProcessGroup | None,
        rank: int,
        options: DispatchOptions | None,
        make: Callable[[torch.device | str], Dispatcher],
    ) -> None:
        # Pass no group: ranks number the dispatchers of a group, and this one takes part in no operation.
        super().__init__(placement, None, rank, options)
        self._group = group
        self.make = make

    @property
    def group(self) -> ProcessGroup | None:
        return self._group

    def _refuse(self) -> NoReturn:
        raise ConfigError("this MoE layer is on the meta device and cannot run; build it on the device it will run on")

    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, DispatchHandle]:
        self._refuse()

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle, header: Header) -> Tensor:
        self._refuse()

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        self._refuse()


def connect(dispatcher: Dispatcher, device: torch.device | str) -> Dispatcher:
    """Return the dispatcher for rows on ``device`` that replaces a deferred one, or ``dispatcher``. Collective.

    Raises:
        ConfigError, RankMismatch, PeerDied, PeerTimeout: as ``make_dispatcher``.
    """
    if not isinstance(dispatcher, DeferredDispatcher):
        return dispatcher
    made = dispatcher.make(device)
    made.has_unknown_experts = dispatcher.has_unknown_experts
    return made
