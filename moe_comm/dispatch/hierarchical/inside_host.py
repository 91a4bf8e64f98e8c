"""Dispatch and combine inside one host, between the ranks that the relays of ``hierarchical`` forward rows to."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from moe_comm.comm.communicator import Communicator
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.backends.local import local_dispatcher
from moe_comm.dispatch.backends.native import supported
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.hierarchical.relay_routes import HostMap
from moe_comm.dispatch.operation import Operation
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions, ExtraRoutes
from moe_comm.errors import HeapError, PeerError
from moe_comm.topology import ExpertPlacement

T = TypeVar("T")


@dataclass(frozen=True)
class InsideHandle:
    """Handle of a dispatch inside the host, with the dispatcher and the expert ids of that dispatch."""

    dispatcher: Dispatcher
    handle: DispatchHandle
    ids_UK: Tensor


class InsideHost:
    """Dispatch and combine among the ranks of one host. Construction is collective over them.

    CPU rows of a dtype that the native core supports use shared memory. Other rows, and calls whose rows do not fit in
    /dev/shm, use ``all_to_all`` over the host's subgroup, with the same bits. All ranks of a host make the same choice:
    its inputs have been compared, and the handshake reports a full /dev/shm.

    Args:
        placement: placement of the host's experts, whose ids start at 0.
        comm, hosts, rank: communicator and hosts of all ranks, and this process's rank among them.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        comm: Communicator,
        hosts: HostMap,
        rank: int,
        options: DispatchOptions,
    ) -> None:
        self._members = hosts.members(hosts.host(rank))
        local_rank = hosts.local(rank)
        plain_options = DispatchOptions(options.timeout_s, True, options.checked)
        self._shared: Dispatcher | None = None
        self._plain: AllToAllDispatcher | None = None
        if hosts.per_host == 1:
            self._alone: Dispatcher = local_dispatcher(placement, None, plain_options)
            return
        host_group = comm.subgroup(self._members, options.timeout_s)
        self._plain = AllToAllDispatcher(placement, host_group, local_rank, plain_options)
        if comm.native:
            from moe_comm.dispatch.backends.native import SharedMemoryDispatcher  # needs the native core

            try:
                self._shared = SharedMemoryDispatcher(placement, host_group, local_rank, plain_options)
            except HeapError as error:  # raised on every rank of the host, so all of them use ``_plain``
                _warn(error)

    def empty_rows(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return storage that peers on this host read in place, if possible."""
        if self._shared is not None:
            try:
                return self._shared.empty_rows(num_rows, width, dtype, device)
            except HeapError:  # the next operation reports it to all ranks
                pass
        return torch.empty(num_rows, width, dtype=dtype, device=device)

    def send(self, x_UD: Tensor, ids_UK: Tensor, operation: Operation) -> tuple[Tensor, InsideHandle]:
        """See ``Dispatcher._send``."""
        if self._plain is None:
            dispatcher = self._alone
        else:
            dispatcher = self._shared if self._shared is not None and supported(x_UD) else self._plain

        def call(dispatcher: Dispatcher) -> tuple[Tensor, InsideHandle]:
            rows_RD, handle = dispatcher._send(x_UD, ids_UK)
            return rows_RD, InsideHandle(dispatcher, handle, ids_UK)

        return self._run(call, dispatcher, operation)

    def sum(self, rows_RD: Tensor, weights_UK: Tensor | None, inside: InsideHandle, operation: Operation) -> Tensor:
        """See ``Dispatcher._sum``."""

        def call(dispatcher: Dispatcher) -> Tensor:
            return dispatcher._sum(rows_RD, weights_UK, self._handle_of(dispatcher, inside, rows_RD))

        return self._run(call, inside.dispatcher, operation)

    def spread(
        self, grad_UD: Tensor, rows_RD: Tensor | None, weights_UK: Tensor, inside: InsideHandle, operation: Operation
    ) -> tuple[Tensor, Tensor | None]:
        """See ``Dispatcher._spread``."""

        def call(dispatcher: Dispatcher) -> tuple[Tensor, Tensor | None]:
            return dispatcher._spread(grad_UD, rows_RD, weights_UK, self._handle_of(dispatcher, inside, grad_UD))

        return self._run(call, inside.dispatcher, operation)

    def share(
        self, grad_UD: Tensor, weights_UK: Tensor, inside: InsideHandle, operation: Operation
    ) -> tuple[Tensor, Tensor]:
        """Return each row's gradient of its token, and its weight [N, 1]."""

        def call(dispatcher: Dispatcher) -> tuple[Tensor, Tensor]:
            handle = self._handle_of(dispatcher, inside, grad_UD)
            handle.extra = ExtraRoutes(1, inside.ids_UK.reshape(-1, 1))
            return dispatcher._spread_with(grad_UD, torch.ones_like(weights_UK), weights_UK.unsqueeze(2), handle)

        return self._run(call, inside.dispatcher, operation)

    def return_dots(self, dots_N1: Tensor, inside: InsideHandle, operation: Operation) -> Tensor:
        """Return [U, K], the value of each slot's row, after ``share``."""

        def call(dispatcher: Dispatcher) -> Tensor:
            return dispatcher._sum_with(None, dots_N1, self._handle_of(dispatcher, inside, dots_N1))[1].squeeze(2)

        return self._run(call, inside.dispatcher, operation)

    def _run(self, call: Callable[[Dispatcher], T], dispatcher: Dispatcher, operation: Operation) -> T:
        """Run ``call`` with ``dispatcher``, or if /dev/shm is full, with the dispatcher without shared memory."""
        try:
            try:
                with dispatcher.running(operation):
                    return call(dispatcher)
            except HeapError as error:
                if self._plain is None or dispatcher is self._plain:
                    raise
                _warn(error)
            with self._plain.running(operation):
                return call(self._plain)
        except PeerError as error:  # the numbers of its ranks are local to the host
            first, last = self._members[0], self._members[-1]
            raise type(error)(f"between ranks {first}..{last} of one host, numbered from 0 here: {error}") from error

    def _handle_of(self, dispatcher: Dispatcher, inside: InsideHandle, rows: Tensor) -> DispatchHandle:
        """Return the handle of a dispatch; of the same dispatch without shared memory if ``dispatcher`` has none."""
        if dispatcher is inside.dispatcher:
            return inside.handle
        assert self._plain is not None
        handle = self._plain.prepare_dispatch(rows.new_empty(inside.ids_UK.shape[0], 0), inside.ids_UK)
        return replace(handle, hidden=inside.handle.hidden)


def _warn(error: HeapError) -> None:
    warnings.warn(
        f"{error}; rows inside this host are sent over the group's backend instead, which is slower. Enlarge /dev/shm "
        "(docker run --shm-size)",
        RuntimeWarning,
        stacklevel=5,
    )
