"""How a dispatcher reports an error of this rank to the other ranks, which would wait for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from moe_comm.comm.channel import AbortOnError, raised_text
from moe_comm.comm.header import Header, describe
from moe_comm.dispatch.arrays import as_tensors
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import InputError, MoeCommError, PeerError, PeerRaised, known_to_peers, mark_known

if TYPE_CHECKING:
    from moe_comm.comm.communicator import Communicator


class FaultReports(ABC):
    """Base class of ``Dispatcher``: raises errors of this rank on every rank."""

    comm: Communicator | None
    rank: int
    world: int
    before_dispatch: list[Callable[[], None]]

    @property
    @abstractmethod
    def handshakes(self) -> bool: ...

    @abstractmethod
    def header(self, op: str, handle: DispatchHandle, requires_grad: bool) -> Header: ...

    @abstractmethod
    def _next_header(
        self, op: str, hidden: int, dtype: torch.dtype, top_k: int, requires_grad: bool = False, **fields: Any
    ) -> Header: ...

    @abstractmethod
    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, DispatchHandle]: ...

    def refuse(self, fault: MoeCommError, x: object = None, *, label: str = "") -> NoReturn:
        """Raise ``fault`` of this rank on every rank, in place of the next dispatch. x: not used."""
        for call in self.before_dispatch:  # collective: the other ranks call it in their dispatch
            with suppress(MoeCommError):
                call()
        label = label if isinstance(label, str) else ""
        self._raise_fault(fault, self._next_header("dispatch", 0, torch.float32, 1, label=label))

    def readable(self, label: str, **values: Any) -> list[Tensor]:
        """Return tensors with the values of ``values`` in memory, or raise InputError in place of the next dispatch."""
        tensors, fault = as_tensors(**values)
        if fault is not None:
            self.refuse(fault, label=label)
        return tensors

    def refuse_operation(self, op: str, handle: Any, fault: MoeCommError) -> NoReturn:
        """Raise ``fault`` of this rank instead of ``op`` on the rows of ``handle``, on every rank.

        If operations are not ``checked``, the other ranks raise ``PeerError``, and the group is unusable afterwards.
        """
        if isinstance(handle, DispatchHandle):
            header = self.header(op, handle, False)
        else:
            header = self._next_header(op, 0, torch.float32, 1)
        self._raise_fault(fault, header)

    def _raise_fault(self, fault: MoeCommError, header: Header) -> NoReturn:
        """Raise ``fault`` instead of the operation of ``header``, on every rank: ``_send`` stops at the handshake."""
        if header.op == "dispatch" or self.handshakes:
            rows_TD = torch.empty(0, 0, dtype=torch.float32, device="cpu")
            ids_TK = torch.empty(0, 1, dtype=torch.int64, device="cpu")
            self._send(rows_TD, ids_TK, replace(header, fault=fault))
        elif self.world > 1:
            mark_known(fault, self.comm)
            self._report_stop(f"rank {self.rank} {raised_text(fault, header.label)}")
        raise fault

    def report(self, header: Header) -> AbortOnError:
        """Return a context manager for the operation of ``header``, that reports an exception to the other ranks.

        An exception before the ranks have compared their headers, as when there is no memory for a copy of the input,
        is raised as ``InputError`` on every rank. After a later one, the others raise ``PeerError`` where they wait.
        """
        return AbortOnError(partial(self._report, header))

    def _report(self, header: Header, error: Exception) -> None:
        if isinstance(error, PeerError) or error is header.fault or known_to_peers(error, self.comm):
            return
        if header.agreed:
            self._report_stop(f"rank {self.rank} {raised_text(error, header.label)}")
            return
        text = f"the input of {describe(header)} cannot be read: {type(error).__name__}: {error}"
        fault = error if isinstance(error, MoeCommError) else InputError(text)
        try:
            self._raise_fault(fault, header)
        except MoeCommError as raised:
            if raised is not error:
                raise raised from error

    def abort(self, error: Exception, *, label: str = "", in_flight: bool = False) -> None:
        """Report to the other ranks that this rank raised ``error`` between two operations.

        The other ranks raise ``PeerRaised`` from their current or next dispatcher operation on this group. The caller
        raises ``error`` again. This call waits for the other ranks for at most ``DispatchOptions.timeout_s``.
        Afterwards the group can be used again. Nothing happens if ``error`` came from an operation, because all ranks
        raise it.

        If the ranks do not compare headers in the next operation (rows are in flight, or operations are not
        ``checked``), the other ranks raise ``PeerError`` where they wait, and the group is unusable afterwards.

        Args:
            error: exception of this rank.
            label: name of the layer, for the other ranks' message.
            in_flight: rows of an operation that has started are still in transfer.
        """
        if self.world == 1 or known_to_peers(error, self.comm):
            return
        mark_known(error)
        text = raised_text(error, label)
        if in_flight or not self.handshakes:
            self._report_stop(f"rank {self.rank} {text}")
            return
        with suppress(MoeCommError):
            self.refuse(PeerRaised(text), label=label)

    def abort_on_error(self, label: str = "", *, in_flight: bool = False) -> AbstractContextManager[None]:
        """Return a context manager that calls ``abort`` for an exception that leaves the ``with`` block.

        The block holds the code between two operations: the experts, or the call of ``backward``.
        """
        return AbortOnError(partial(self.abort, label=label, in_flight=in_flight))

    def _report_stop(self, text: str) -> None:  # noqa: B027 - only backends over torch.distributed wait for a report
        """Report that this rank stops, to ranks that wait outside a handshake."""
