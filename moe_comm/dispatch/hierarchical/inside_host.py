"""Dispatch between the ranks of one host, for ``hierarchical``: another dispatcher over the host's subgroup.

It uses shared memory for CPU rows of a dtype that the native core supports. For other rows, and for calls whose rows do
not fit in /dev/shm, it uses ``all_to_all`` over the host's subgroup, with the same bits. All ranks of a host make the
same choice: its inputs have been compared, and the handshake reports a full /dev/shm.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_comm.comm.communicator import Communicator
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.backends.local import local_dispatcher
from moe_comm.dispatch.backends.native import supported
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.hierarchical.relay_routes import HostMap
from moe_comm.dispatch.operation import Operation
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions
from moe_comm.errors import HeapError, PeerError
from moe_comm.topology import ExpertPlacement


@dataclass(frozen=True)
class InsideHandle:
    """Handle of a dispatch inside the host, with the dispatcher and the expert ids of that dispatch."""

    dispatcher: Dispatcher
    handle: DispatchHandle
    ids_UK: Tensor


class InsideHost:
    """Dispatch and combine among the ranks of one host. Construction is collective over them.

    Args:
        placement: placement of the host's experts, whose ids start at 0.
        comm, hosts, rank: communicator and hosts of all ranks, and this process's rank among them.
        shared: whether the ranks of each host share memory.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        comm: Communicator,
        hosts: HostMap,
        rank: int,
        options: DispatchOptions,
        shared: bool,
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
        if shared:
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
        with self._rank_names():
            try:
                with dispatcher.running(operation):
                    rows_RD, handle = dispatcher._send(x_UD, ids_UK)
            except HeapError as error:
                dispatcher = self._fallback(dispatcher, error)
                with dispatcher.running(operation):
                    rows_RD, handle = dispatcher._send(x_UD, ids_UK)
        return rows_RD, InsideHandle(dispatcher, handle, ids_UK)

    def sum(self, rows_RD: Tensor, weights_UK: Tensor | None, inside: InsideHandle, operation: Operation) -> Tensor:
        """See ``Dispatcher._sum``."""
        with self._rank_names():
            try:
                with inside.dispatcher.running(operation):
                    return inside.dispatcher._sum(rows_RD, weights_UK, inside.handle)
            except HeapError as error:
                dispatcher = self._fallback(inside.dispatcher, error)
                with dispatcher.running(operation):
                    return dispatcher._sum(rows_RD, weights_UK, self._dispatch_again(dispatcher, inside, rows_RD))

    def spread(
        self, grad_UD: Tensor, rows_RD: Tensor | None, weights_UK: Tensor, inside: InsideHandle, operation: Operation
    ) -> tuple[Tensor, Tensor | None]:
        """See ``Dispatcher._spread``."""
        with self._rank_names():
            try:
                with inside.dispatcher.running(operation):
                    return inside.dispatcher._spread(grad_UD, rows_RD, weights_UK, inside.handle)
            except HeapError as error:
                dispatcher = self._fallback(inside.dispatcher, error)
                with dispatcher.running(operation):
                    handle = self._dispatch_again(dispatcher, inside, grad_UD)
                    return dispatcher._spread(grad_UD, rows_RD, weights_UK, handle)

    def _fallback(self, dispatcher: Dispatcher, error: HeapError) -> AllToAllDispatcher:
        if self._plain is None or dispatcher is self._plain:
            raise error
        _warn(error)
        return self._plain

    def _dispatch_again(self, dispatcher: AllToAllDispatcher, inside: InsideHandle, rows: Tensor) -> DispatchHandle:
        """Return the handle of the same dispatch, of the dispatcher without shared memory."""
        handle = dispatcher.prepare_dispatch(rows.new_empty(inside.ids_UK.shape[0], 0), inside.ids_UK)
        return replace(handle, hidden=inside.handle.hidden)

    @contextmanager
    def _rank_names(self) -> Iterator[None]:
        """Add the range of global ranks to errors about peers, whose rank numbers are local to the host."""
        try:
            yield
        except PeerError as error:
            first, last = self._members[0], self._members[-1]
            raise type(error)(f"between ranks {first}..{last} of one host, numbered from 0 here: {error}") from error


def _warn(error: HeapError) -> None:
    warnings.warn(
        f"{error}; rows inside this host are sent over the group's backend instead, which is slower. Enlarge /dev/shm "
        "(docker run --shm-size)",
        RuntimeWarning,
        stacklevel=5,
    )
