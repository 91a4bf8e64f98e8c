"""The operations of a dispatcher: the header that ranks compare, the span, the checks, and the report of errors."""

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
from moe_comm.comm.header import DISPATCH_AGAIN, DTYPES, LEND, RETURN, GroupCalls, Header, describe
from moe_comm.dispatch.types import DROPPED, DispatchHandle, DispatchOptions, routing_error
from moe_comm.dispatch.wire_dtype import SAME, bytes_per_row
from moe_comm.errors import InputError, MoeCommError, PeerError, PeerRaised, mark_known
from moe_comm.kernels.fp8 import BLOCK
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import COMMUNICATION, EVENTS, Open
from moe_comm.runtime.memory import as_tensors

if TYPE_CHECKING:
    from moe_comm.comm.communicator import Communicator

KINDS = {
    "dispatch": Kind.DISPATCH,
    DISPATCH_AGAIN: Kind.DISPATCH,
    "combine backward": Kind.DISPATCH,
    "combine": Kind.COMBINE,
    "dispatch backward": Kind.COMBINE,
    LEND: Kind.DISPATCH,
    RETURN: Kind.COMBINE,
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

    def new_span(self) -> Open:
        """Return the span of this operation, which has not begun."""
        dispatcher = self.dispatcher
        if dispatcher.comm is None:
            return EVENTS.span(Kind.COMPUTE, self.op, layer=self.label)
        nbytes = 0
        if self.handle is not None:
            nbytes = dispatcher.sent_bytes(self.op, self.handle)
            nbytes += dispatcher.sent_bytes(DISPATCH_AGAIN, self.handle) if self.again else 0
        group = dispatcher.comm.span_group
        return EVENTS.span(KINDS[self.op], self.op, layer=self.label, group=group, nbytes=nbytes)

    def __enter__(self) -> Operation:
        dispatcher = self.dispatcher
        self.span = self.new_span()
        if dispatcher.comm is not None:
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
        return max(rows - handle.num_own, 0) * row_bytes  # ``num_own`` of peer_to_peer is an estimate

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


# --- checks of arguments. A fault is reported to the other ranks before it is raised ---

ID_DTYPES = (torch.int64, torch.int32)
EXTRA_DTYPES = (torch.float32, torch.int32)


def dispatch_fault(x_TD: Tensor, ids_TK: Tensor, num_experts: int | None) -> MoeCommError | None:
    """Return the error of invalid tensors of a dispatch, or None. num_experts None: the range of ids is not checked."""
    if x_TD.dim() != 2 or ids_TK.dim() != 2 or x_TD.shape[0] != ids_TK.shape[0]:
        return InputError(f"dispatch needs x [T, D] and ids [T, K]; got {tuple(x_TD.shape)} and {tuple(ids_TK.shape)}")
    if x_TD.dtype not in DTYPES:
        return InputError(f"rows must be float32, bfloat16, float16 or float64; got {x_TD.dtype}")
    if ids_TK.dtype not in ID_DTYPES:
        return InputError(f"expert ids must be int64 or int32; got {ids_TK.dtype}")
    if x_TD.device != ids_TK.device:
        return InputError(f"x is on {x_TD.device} but the expert ids are on {ids_TK.device}")
    if ids_TK.shape[1] < 1:
        return InputError("top-k must be at least 1; got ids of width 0")
    if num_experts is None or not ids_TK.numel():
        return None
    low, high = (int(v) for v in torch.aminmax(ids_TK))
    if low >= DROPPED and high < num_experts:
        return None
    return routing_error(ids_TK, num_experts)


def tokens_fault(x: Tensor, hidden: int) -> InputError | None:
    """Return the error of invalid tokens [..., D] of a layer with this hidden size, or None."""
    if x.dim() and x.shape[-1] == hidden and x.dtype in DTYPES:
        return None
    return InputError(f"this layer's hidden size is {hidden}; got x {tuple(x.shape)} {x.dtype}, must be floating-point")


def scaled_fault(x_TD: Tensor) -> InputError | None:
    """Return why the rows of a dispatch cannot be ``scaled``."""
    if x_TD.dim() == 2 and x_TD.shape[1] and not x_TD.shape[1] % BLOCK:
        return None
    return InputError(
        f"scaled rows have one scale per {BLOCK} channels, so D must be a positive multiple of {BLOCK}; got x "
        f"{tuple(x_TD.shape)}. Dispatch without scaled (expert_gemm_dtype='same'), or change the hidden size"
    )


def extra_fault(extra_TKX: Tensor, slots: tuple[int, ...], device: torch.device) -> InputError | None:
    """Return the error of invalid extra values of slots [T, K], or None."""
    got = type(extra_TKX).__name__
    if isinstance(extra_TKX, Tensor):
        shape, fits = extra_TKX.shape, extra_TKX.dtype in EXTRA_DTYPES and extra_TKX.device == device
        if fits and len(shape) == 3 and shape[:2] == slots and shape[2]:
            return None
        got = f"{extra_TKX.dtype} {list(shape)} on {extra_TKX.device}"
    return InputError(
        f"extra values must be float32 or int32 [{slots[0]}, {slots[1]}, X] on {device}, X at least 1; got {got}"
    )


def _maker_fault(maker: int, handle: Any) -> InputError | None:
    if not isinstance(handle, DispatchHandle):
        return InputError(f"the handle must come from dispatch of this dispatcher; got {type(handle).__name__}")
    if handle.maker == maker:
        return None
    return InputError(
        f"the handle of call {handle.call} belongs to another dispatcher; combine with the one that dispatched"
    )


def spread_fault(
    maker: int, x_TD: Tensor, handle: DispatchHandle, extra_TKX: Tensor | None = None
) -> InputError | None:
    """Return the error of invalid arguments of ``Dispatcher.spread``, or None. maker: id of the dispatcher."""
    if (fault := _maker_fault(maker, handle)) is not None:
        return fault
    if extra_TKX is not None:
        fault = extra_fault(extra_TKX, (handle.num_tokens, handle.top_k), handle.device)
        if fault is not None:
            return fault
        if handle.extra is None or handle.extra.width != extra_TKX.shape[2]:
            width = "none" if handle.extra is None else str(handle.extra.width)
            return InputError(f"spread got {extra_TKX.shape[2]} extra values for each slot; dispatch had {width}")
    given, expected = (
        (tuple(x_TD.shape), x_TD.dtype, x_TD.device),
        ((handle.num_tokens, handle.hidden), handle.dtype, handle.device),
    )
    if given == expected:
        return None
    return InputError(f"spread needs shape, dtype and device of the dispatched tokens, {expected}; got {given}")


def combine_fault(maker: int, rows_RD: Tensor, weights_TK: Tensor, handle: DispatchHandle) -> InputError | None:
    """Return the error of invalid arguments of ``Dispatcher.combine``, or None. maker: id of the dispatcher."""
    if not isinstance(handle, DispatchHandle) or handle.maker != maker:
        return _maker_fault(maker, handle)
    if rows_RD.shape != (handle.num_rows, handle.hidden) or rows_RD.dtype != handle.dtype:
        return InputError(
            f"combine needs rows [{handle.num_rows}, {handle.hidden}] {handle.dtype}, as returned by dispatch; "
            f"got {tuple(rows_RD.shape)} {rows_RD.dtype}"
        )
    if weights_TK.shape != (handle.num_tokens, handle.top_k):
        return InputError(f"combine needs weights [{handle.num_tokens}, {handle.top_k}]; got {tuple(weights_TK.shape)}")
    if weights_TK.is_complex():
        return InputError(f"combine needs real weights; got {weights_TK.dtype}")
    if rows_RD.device != handle.device or weights_TK.device != handle.device:
        return InputError(
            f"combine needs rows and weights on {handle.device}, the device of dispatch; "
            f"got rows on {rows_RD.device} and weights on {weights_TK.device}"
        )
    return None
