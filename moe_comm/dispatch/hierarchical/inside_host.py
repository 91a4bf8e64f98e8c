"""What moves rows between the ranks of one host for ``hierarchical``: another dispatcher, over the host's own group.

Through shared memory where it can be: CPU rows of a dtype that the native core knows, and room in /dev/shm. Otherwise,
and for a call whose rows find no room, by ``all_to_all`` over the host's group, with the same bits. All ranks of a host
choose alike: what the choice depends on has been compared, and a full /dev/shm is told in the handshake.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.communicator import Communicator
from moe_comm.comm.header import Header
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.backends.local import LocalDispatcher
from moe_comm.dispatch.backends.native import supported
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.hierarchical.relay_routes import HostMap
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions
from moe_comm.errors import HeapError, PeerError
from moe_comm.runtime.memory import native_is_built
from moe_comm.topology import ExpertPlacement


@dataclass(frozen=True)
class InsideHandle:
    """``handle`` as ``way`` made it for the ids ``ids_UK``."""

    way: Dispatcher
    handle: DispatchHandle
    ids_UK: Tensor


class InsideHost:
    """Dispatch and combine among the ranks of one host. Construction is collective over them.

    Args:
        placement: of the host's experts, whose ids here are counted from its first.
        comm, rank: of all ranks.
        shared: the host's ranks share memory.
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
        local = hosts.local(rank)
        plain_options = DispatchOptions(options.timeout_s, True, options.checked)
        self._shared: Dispatcher | None = None
        self._plain: AllToAllDispatcher | None = None
        if hosts.per_host == 1:
            self._alone = _alone(placement, plain_options)
            return
        own = comm.part(self._members, options.timeout_s)
        self._plain = AllToAllDispatcher(placement, own, local, plain_options)
        if shared:
            self._share(placement, own, local, plain_options)

    def _share(self, placement: ExpertPlacement, group: ProcessGroup, local: int, options: DispatchOptions) -> None:
        from moe_comm.dispatch.backends.shared_memory import SharedMemoryDispatcher  # needs the native core

        try:
            self._shared = SharedMemoryDispatcher(placement, group, local, options)
        except HeapError as error:  # on every rank of the host, if on one
            _warn(error)

    def empty_rows(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Storage that peers on this host read where it is, if there is some."""
        if self._shared is not None:
            try:
                return self._shared.empty_rows(num_rows, width, dtype, device)
            except HeapError:  # the operation that follows says so to all ranks
                pass
        return torch.empty(num_rows, width, dtype=dtype, device=device)

    def send(self, x_UD: Tensor, ids_UK: Tensor, header: Header) -> tuple[Tensor, InsideHandle]:
        """As ``Dispatcher._send``."""
        way = self._way(x_UD)
        with self._named():
            try:
                rows_RD, handle = way._send(x_UD, ids_UK, header)
            except HeapError as error:
                way = self._otherwise(way, error)
                rows_RD, handle = way._send(x_UD, ids_UK, header)
        return rows_RD, InsideHandle(way, handle, ids_UK)

    def sum(self, rows_RD: Tensor, weights_UK: Tensor | None, inside: InsideHandle, header: Header) -> Tensor:
        """As ``Dispatcher._sum``."""
        with self._named():
            try:
                return inside.way._sum(rows_RD, weights_UK, inside.handle, header)
            except HeapError as error:
                way, handle = self._again(inside, rows_RD, header, error)
                return way._sum(rows_RD, weights_UK, handle, header)

    def spread(
        self, grad_UD: Tensor, rows_RD: Tensor | None, weights_UK: Tensor, inside: InsideHandle, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        """As ``Dispatcher._spread``."""
        with self._named():
            try:
                return inside.way._spread(grad_UD, rows_RD, weights_UK, inside.handle, header)
            except HeapError as error:
                way, handle = self._again(inside, grad_UD, header, error)
                return way._spread(grad_UD, rows_RD, weights_UK, handle, header)

    def _way(self, x: Tensor) -> Dispatcher:
        if self._plain is None:
            return self._alone
        return self._shared if self._shared is not None and supported(x) else self._plain

    def _otherwise(self, way: Dispatcher, error: HeapError) -> AllToAllDispatcher:
        if self._plain is None or way is self._plain:
            raise error
        _warn(error)
        return self._plain

    def _again(
        self, inside: InsideHandle, rows: Tensor, header: Header, error: HeapError
    ) -> tuple[AllToAllDispatcher, DispatchHandle]:
        """The layout of the same dispatch for the way without shared memory."""
        way = self._otherwise(inside.way, error)
        handle = way.agree(rows.new_empty(inside.ids_UK.shape[0], 0), inside.ids_UK, header)
        return way, replace(handle, hidden=inside.handle.hidden)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors about peers say which ranks they number."""
        try:
            yield
        except PeerError as error:
            first, last = self._members[0], self._members[-1]
            raise type(error)(f"between ranks {first}..{last}, one host's, numbered from 0 here: {error}") from error


def _alone(placement: ExpertPlacement, options: DispatchOptions) -> Dispatcher:
    if not native_is_built():
        return LocalDispatcher(placement, None, 0, options)
    from moe_comm.dispatch.backends.local_native import NativeLocalDispatcher  # needs the native core

    return NativeLocalDispatcher(placement, None, 0, options)


def _warn(error: HeapError) -> None:
    warnings.warn(
        f"{error}; rows inside this host go over the group's backend instead, which is slower. Enlarge /dev/shm "
        "(docker run --shm-size)",
        RuntimeWarning,
        stacklevel=5,
    )


__all__ = ["InsideHandle", "InsideHost"]
