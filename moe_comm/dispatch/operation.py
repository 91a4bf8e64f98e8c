"""The operations of a dispatcher: the header that ranks compare, the span, and the report of errors to other ranks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor

from moe_comm.comm.channel import AbortOnError, needs_report, raised_text
from moe_comm.comm.header import GroupCalls, Header, describe
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions
from moe_comm.dispatch.wire_dtype import SAME, bytes_per_row
from moe_comm.errors import InputError, MoeCommError, PeerError, PeerRaised, mark_known
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import COMMUNICATION, EVENTS, Open
from moe_comm.runtime.memory import as_tensors

if TYPE_CHECKING:
    from moe_comm.comm.communicator import Communicator

KINDS = {
    "dispatch": Kind.DISPATCH,
    "combine backward": Kind.DISPATCH,
    "combine": Kind.COMBINE,
    "dispatch backward": Kind.COMBINE,
}
"""Span kind of each operation. DISPATCH sends rows to experts; COMBINE sends rows back to the ranks of the tokens."""


@dataclass(slots=True, eq=False)
class Operation(Header):
    """An operation of a dispatcher. In its ``with`` block it is ``dispatcher.context.operation``, and its span is open.

    An exception in the block is reported to the other ranks. An exception before the ranks have compared their headers
    (such as no memory for a copy of the input) is raised as ``InputError`` on every rank. After a later exception, the
    other ranks raise ``PeerError`` where they wait.

    handle: of the rows; None for a dispatch, whose span gets its bytes from ``record_handle``.
    """

    dispatcher: Operations = field(kw_only=True, repr=False)
    handle: DispatchHandle | None = field(default=None, repr=False)
    span: Open = field(init=False, repr=False)
    _outer: Operation = field(init=False, repr=False)
    _metered: bool = field(init=False, repr=False, default=False)

    def __enter__(self) -> Operation:
        dispatcher = self.dispatcher
        if dispatcher.comm is None:
            self.span = EVENTS.span(Kind.COMPUTE, self.op, layer=self.label)
        else:
            nbytes = 0 if self.handle is None else dispatcher.sent_bytes(self.op, self.handle)
            group = dispatcher.comm.span_group
            self.span = EVENTS.span(KINDS[self.op], self.op, layer=self.label, group=group, nbytes=nbytes)
            self._metered = COMMUNICATION.read
            if self._metered:
                COMMUNICATION.__enter__()
        self.span.__enter__()
        self._outer, dispatcher.context.operation = dispatcher.context.operation, self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        self.dispatcher.context.operation = self._outer
        self.span.__exit__(kind, error, traceback)
        if self._metered:
            COMMUNICATION.__exit__(kind, error, traceback)
        if error is not None:
            self.dispatcher.report(self).__exit__(kind, error, traceback)


class OperationContext(threading.local):
    """The operation that runs now, for the primitives of the backends. Threads may share a dispatcher with one rank."""

    operation: Operation = None  # type: ignore[assignment]
    """None between operations."""


class Operations(ABC):
    """Base class of ``Dispatcher``: starts operations, and raises an error of this rank on every rank.

    Attributes: see ``Dispatcher``.
    """

    packs: ClassVar[bool]
    world: int
    rank: int
    comm: Communicator | None
    options: DispatchOptions
    before_dispatch: list[Callable[[], None]]

    def __init__(self, calls: GroupCalls) -> None:
        self.calls = calls
        self.row_bytes: dict[tuple[str, int, torch.dtype], int] = {}
        self._ordinal = calls.add_dispatcher()
        self.context = OperationContext()

    @property
    @abstractmethod
    def num_experts(self) -> int: ...

    @property
    def handshakes(self) -> bool:
        """Whether every operation compares headers between ranks, or only dispatch does."""
        return self.options.checked

    @property
    def num_calls(self) -> int:
        """Number of operations that this dispatcher has started."""
        return self.calls.last(self._ordinal)

    def operation(self, op: str, handle: DispatchHandle, requires_grad: bool = False, **fields: Any) -> Operation:
        """Return the next operation, ``op`` on the rows of ``handle``. fields: of the header."""
        return Operation(
            op,
            self.calls.next(self._ordinal),
            handle.hidden,
            handle.dtype,
            handle.top_k,
            self.num_experts,
            requires_grad,
            handle.label,
            of_call=handle.call,
            ordinal=self._ordinal,
            calls=self.calls,
            dispatcher=self,
            handle=handle,
            **fields,
        )

    def _new_operation(
        self, op: str, hidden: int, dtype: torch.dtype, top_k: int, requires_grad: bool = False, **fields: Any
    ) -> Operation:
        return Operation(
            op,
            self.calls.next(self._ordinal),
            hidden,
            dtype,
            top_k,
            self.num_experts,
            requires_grad,
            ordinal=self._ordinal,
            calls=self.calls,
            dispatcher=self,
            **fields,
        )

    @contextmanager
    def running(self, operation: Operation) -> Iterator[None]:
        """Context manager: ``operation`` is the current one, without a span and without a report of errors.

        For the parts of an operation that stays in flight, and for operations inside that of another dispatcher.
        """
        context = self.context
        outer, context.operation = context.operation, operation
        try:
            yield
        finally:
            context.operation = outer

    def record_handle(self, span: Open, handle: DispatchHandle) -> None:
        """Record the sent bytes and the rows per expert of a dispatch in its span."""
        if span.index >= 0:
            span.put_rows(handle.rows_per_expert, 0 if self.comm is None else self.sent_bytes("dispatch", handle))

    def sent_bytes(self, op: str, handle: DispatchHandle) -> int:
        """Return the bytes of rows that this rank sends to others in ``op``, without routing weights and group scales.

        Returns 0 if rows are relayed or gathered: the inner collectives record their bytes.
        """
        if not EVENTS.enabled or handle.num_own is None:
            return 0
        slots = handle.num_tokens * handle.top_k - handle.num_dropped
        rows = slots if KINDS[op] is Kind.DISPATCH else handle.num_rows
        key = op, handle.hidden, handle.dtype
        row_bytes = self.row_bytes.get(key)
        if row_bytes is None:
            wire_dtype = self.options.wire_dtypes.of(op) if self.packs else SAME
            row_bytes = self.row_bytes[key] = bytes_per_row(handle.hidden, wire_dtype, handle.dtype)
        return (rows - handle.num_own) * row_bytes

    # --- reports of this rank's errors to the other ranks ---

    def refuse(self, fault: MoeCommError, x: object = None, *, label: str = "") -> NoReturn:
        """Raise ``fault`` of this rank on every rank, in place of the next dispatch. x: not used."""
        for call in self.before_dispatch:  # collective: the other ranks call it in their dispatch
            with suppress(MoeCommError):
                call()
        label = label if isinstance(label, str) else ""
        self._raise_fault(fault, self._new_operation("dispatch", 0, torch.float32, 1, label=label))

    def readable(self, label: str, **values: Any) -> list[Tensor]:
        """Return tensors with the values of ``values`` in memory, or raise InputError in place of the next dispatch."""
        tensors, fault = as_tensors(**values)
        if fault is not None:
            self.refuse(fault, label=label)
        return tensors

    def _readable(self, op: str, handle: DispatchHandle, **tensors: Tensor) -> list[Tensor]:
        """Return tensors with their values in memory, or raise InputError in place of ``op``."""
        values, fault = as_tensors(**tensors)
        if fault is not None:
            self.refuse_operation(op, handle, fault)
        return values

    def refuse_operation(self, op: str, handle: Any, fault: MoeCommError) -> NoReturn:
        """Raise ``fault`` of this rank instead of ``op`` on the rows of ``handle``, on every rank.

        If operations are not ``checked``, the other ranks raise ``PeerError``, and the group is unusable afterwards.
        """
        if isinstance(handle, DispatchHandle):
            self._raise_fault(fault, self.operation(op, handle))
        self._raise_fault(fault, self._new_operation(op, 0, torch.float32, 1))

    def _raise_fault(self, fault: MoeCommError, operation: Operation) -> NoReturn:
        """Raise ``fault`` instead of ``operation``, on every rank: ``_send`` stops at the handshake."""
        if operation.op == "dispatch" or self.handshakes:
            rows_TD = torch.empty(0, 0, dtype=torch.float32, device="cpu")
            ids_TK = torch.empty(0, 1, dtype=torch.int64, device="cpu")
            with self.running(replace(operation, fault=fault)):
                self._send(rows_TD, ids_TK)
        elif self.world > 1:
            mark_known(fault, self.comm)
            self._report_stop(f"rank {self.rank} {raised_text(fault, operation.label)}")
        raise fault

    def report(self, operation: Operation) -> AbortOnError:
        """Return a context manager that reports an exception in ``operation`` to the other ranks."""
        return AbortOnError(partial(self._report, operation))

    def _report(self, operation: Operation, error: Exception) -> None:
        if isinstance(error, PeerError) or error is operation.fault or not needs_report(error, self.comm):
            return
        if operation.agreed:
            self._report_stop(f"rank {self.rank} {raised_text(error, operation.label)}")
            return
        text = f"the input of {describe(operation)} cannot be read: {type(error).__name__}: {error}"
        fault = error if isinstance(error, MoeCommError) else InputError(text)
        try:
            self._raise_fault(fault, operation)
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
            label: name of the layer, for the other ranks' message.
            in_flight: rows of an operation that has started are still in transfer.
        """
        if self.world == 1 or not needs_report(error, self.comm):
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

    @abstractmethod
    def _send(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, DispatchHandle]: ...
