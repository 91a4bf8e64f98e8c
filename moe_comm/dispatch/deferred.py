"""A dispatcher's place in a layer that has no memory yet (the meta device): who holds what, and nothing that moves."""

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

Make = Callable[[torch.device | str], Dispatcher]


class DeferredDispatcher(Dispatcher):
    """Knows the placement; ``connect`` makes the dispatcher that moves rows. No communication, no heap.

    Args:
        make: the dispatcher for rows on a device; collective over ``group``.
    """

    name = "deferred"

    def __init__(
        self,
        placement: ExpertPlacement,
        group: ProcessGroup | None,
        rank: int,
        options: DispatchOptions | None,
        make: Make,
    ) -> None:
        # Not the group, whose dispatchers are numbered: this one takes part in nothing.
        super().__init__(placement, None, rank, options)
        self._group = group
        self.make = make

    @property
    def group(self) -> ProcessGroup | None:
        return self._group

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            "this MoE layer was built on the meta device, to look at shapes; build it on the device it is to run on"
        )

    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, DispatchHandle]:
        self._refuse()

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle, header: Header) -> Tensor:
        self._refuse()

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        self._refuse()


def connect(dispatcher: Dispatcher, device: torch.device | str) -> Dispatcher:
    """The dispatcher that a deferred one stands for, for rows on ``device``; any other as it is. Collective.

    Raises:
        ConfigError, RankMismatch, PeerDied, PeerTimeout: as ``make_dispatcher``.
    """
    return dispatcher.make(device) if isinstance(dispatcher, DeferredDispatcher) else dispatcher
