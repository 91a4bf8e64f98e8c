"""Dispatch and combine of CPU tensors in the native core, for ``local`` and ``shared_memory``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_comm.comm.communicator import Communicator
from moe_comm.comm.header import Header, failure, fault_word
from moe_comm.dispatch.base import make_handle
from moe_comm.dispatch.pending import IncomingRows, OutgoingRows, PendingTransfer
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import MoeCommError, RoutingError, mark_known
from moe_comm.runtime.memory import DTYPE_CODES, block, from_capsule, native, warm_rows
from moe_comm.tensor_memory import address, row_address

if TYPE_CHECKING:
    from moe_comm import _C


def supported(x: Tensor) -> bool:
    """Return whether the native core can move rows of this tensor."""
    return x.device.type == "cpu" and x.dtype in DTYPE_CODES


def _dense(x: Tensor) -> Tensor:
    """Return ``x`` with unit stride inside rows. The stride between rows is arbitrary."""
    return x if x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= 0 else x.contiguous()


def _fault_args(header: Header) -> tuple[int, str]:
    """Return the fault of ``header`` as arguments of the native core."""
    return (0, "") if header.fault is None else (fault_word(header.fault), str(header.fault))


def _spread_args(
    header: Header,
    handle: DispatchHandle,
    grad_TD: Tensor,
    rows_RD: Tensor | None,
    weights_TK: Tensor,
    grad_TK: Tensor | None,
) -> tuple[Any, ...]:
    return (
        header.compared(),
        header.label,
        handle.state,
        *row_address(grad_TD, handle.dtype, (handle.num_tokens, handle.hidden)),
        *row_address(rows_RD, handle.dtype, (handle.num_rows, handle.hidden)),
        address(weights_TK, torch.float32, (handle.num_tokens, handle.top_k)),
        rows_RD is not None,
        address(grad_TK, torch.float32, (handle.num_tokens, handle.top_k)),
    )


WordsArgs = tuple[int, int, int, int]
"""Address, width, and strides of the words of slots; zeros without."""


def _words_args(words_TKX: Tensor | None, tokens: int, top_k: int) -> tuple[Tensor | None, WordsArgs]:
    """Return words that the native core reads in place, and its arguments."""
    if words_TKX is None:
        return None, (0, 0, 0, 0)
    if words_TKX.stride(2) != 1:
        words_TKX = words_TKX.contiguous()
    width = words_TKX.shape[2]
    pointer, _ = row_address(words_TKX, torch.float32, (tokens, top_k, width))
    return words_TKX, (pointer, width, words_TKX.stride(0), words_TKX.stride(1))


def _received(capsule: Any, rows: int, words: WordsArgs) -> Tensor | None:
    if capsule is None:
        return None
    return from_capsule(capsule) if rows else torch.empty(0, words[1], dtype=torch.float32, device="cpu")


class _NativeTransfer(PendingTransfer):
    """A transfer of the native core."""

    _native: _C.PendingReceive | _C.PendingSum
    _rows: NativeRows

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._native.finish()
        finally:
            self._native.abandon()  # has no effect after finish
            if not self._native.finished():
                self._rows.retain(self)


class NativeIncomingRows(_NativeTransfer, IncomingRows):
    """Rows that the native core receives."""

    def __init__(
        self, rows: NativeRows, native: _C.PendingReceive, rows_RD: Tensor, handle: DispatchHandle, *buffers: object
    ) -> None:
        self._rows, self._native, self._receive = rows, native, native
        self.rows_RD, self.handle = rows_RD, handle
        self._buffers = buffers  # peers may read and write them

    def ready(self, peer: int) -> bool:
        return self._receive.ready(peer)

    def next(self, peers: Sequence[int]) -> int:
        return self._receive.next(peers)


class NativeOutgoingRows(_NativeTransfer, OutgoingRows):
    """Outputs of experts that peers read through the native core."""

    def __init__(self, native: _C.PendingSum, rows_RD: Tensor, y_TD: Tensor, rows: NativeRows, header: Header) -> None:
        self._native = self._pending_sum = native
        self._rows, self._header, self._y_TD = rows, header, y_TD
        self._rows_RD = rows_RD  # peers read it

    def raise_flag(self, peer: int) -> None:
        self._pending_sum.raise_flag(peer)

    def ready(self) -> bool:
        return self._pending_sum.ready()

    def sum(self, weights_TK: Tensor | None) -> Tensor:
        weights_TK = None if weights_TK is None else weights_TK.contiguous()
        try:
            weights = address(weights_TK, torch.float32, (len(self._y_TD), self._header.top_k))
            self._pending_sum.sum(weights, address(self._y_TD, self._rows_RD.dtype))
        except self._rows.errors as error:
            raise self._rows.translated(error, self._header) from None
        return self._y_TD


class NativeRows:
    """The primitives ``_send``, ``_sum`` and ``_spread`` of a ``Dispatcher``, run by the native core's ``Transfer``.

    Args:
        expert_offsets: first expert of each rank, and the number of experts.
        comm: None if this process holds all experts.
        timeout_s: deadline of waits for a peer.
    """

    def __init__(
        self,
        heap: _C.Heap,
        expert_offsets: tuple[int, ...],
        rank: int,
        comm: Communicator | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        core = native()
        self.errors = (MoeCommError, core.HandshakeFailed)
        self._comm, self._timeout_s = comm, timeout_s
        self.rank = rank
        self.heap = heap
        self._transfer = core.Transfer(
            None if comm is None else comm.core, heap, list(expert_offsets), threads=torch.get_num_threads()
        )

    def empty_rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return a block of this rank's heap, which peers read in place."""
        return block(self.heap, num_rows, width, dtype)

    def _set_deadline(self) -> None:
        if self._comm is not None and self._comm.core_timeout_s != self._timeout_s:
            self._comm.set_core_timeout(self._timeout_s)

    def start_send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> NativeIncomingRows:
        """Start ``send``. This rank's own rows are complete on return; rows of peers may be in flight."""
        tokens, hidden = (x_TD.shape[0], x_TD.shape[1]) if header.fault is None else (0, header.hidden)
        fault, text = _fault_args(header)
        if not fault:
            x_TD = _dense(x_TD)
            ids_TK = ids_TK.to(torch.int64).contiguous()
        self._set_deadline()
        try:
            capsule, state, pending = self._transfer.start_send(
                header.compared(),
                header.label,
                fault,
                text,
                *((0, 0) if fault else row_address(x_TD, header.dtype, (tokens, hidden))),
                0 if fault else address(ids_TK, torch.int64, (tokens, header.top_k)),
                tokens,
                header.top_k,
                hidden,
                DTYPE_CODES.get(header.dtype, 0),
            )
        except self.errors as error:
            raise self.translated(error, header) from None
        rows = state.rows
        rows_RD = from_capsule(capsule) if rows and hidden else x_TD.new_empty(rows, hidden)
        handle = make_handle(header, x_TD, state.rows_per_expert, rows, state.dropped, state)
        return NativeIncomingRows(self, pending, rows_RD, handle, capsule)

    def send(
        self, x_TD: Tensor, ids_TK: Tensor, header: Header, words_TKX: Tensor | None = None
    ) -> tuple[Tensor, DispatchHandle, Tensor | None]:
        """Dispatch with one native call; see ``Dispatcher._send_with``."""
        if header.fault is not None:
            with self.start_send(x_TD, ids_TK, header) as incoming:
                return incoming.rows_RD, incoming.handle, None
        if not x_TD.is_contiguous():
            x_TD = _dense(x_TD)
        if ids_TK.dtype is not torch.int64 or not ids_TK.is_contiguous():
            ids_TK = ids_TK.to(torch.int64).contiguous()
        (tokens, hidden), dtype = x_TD.shape, x_TD.dtype
        words_TKX, words = _words_args(words_TKX, tokens, header.top_k)
        self._set_deadline()
        try:
            capsule, state, sizes, rows, dropped, received = self._transfer.send(
                header.compared(),
                header.label,
                *row_address(x_TD, dtype),
                address(ids_TK, torch.int64, (tokens, header.top_k)),
                (tokens, header.top_k, hidden, DTYPE_CODES[dtype]),
                words,
            )
        except self.errors as error:
            raise self.translated(error, header) from None
        rows_RD = from_capsule(capsule) if rows and hidden else x_TD.new_empty(rows, hidden)
        return rows_RD, make_handle(header, x_TD, sizes, rows, dropped, state), _received(received, rows, words)

    def start_sum(self, rows_RD: Tensor, handle: DispatchHandle, header: Header) -> NativeOutgoingRows:
        """Start ``sum``. ``rows_RD`` is a block of ``empty_rows``; the caller fills it and raises flags."""
        # Allocate before the call: an allocation failure after it would not be reported to the peers.
        y_TD = warm_rows(handle.num_tokens, handle.hidden, handle.dtype, handle.device)
        self._set_deadline()
        try:
            pending = self._transfer.start_sum(
                header.compared(),
                header.label,
                *_fault_args(header),
                handle.state,
                *((0, 0) if header.fault else row_address(rows_RD, handle.dtype, (handle.num_rows, handle.hidden))),
                False,  # computed: the caller fills rows_RD after this call
            )
        except self.errors as error:
            raise self.translated(error, header) from None
        return NativeOutgoingRows(pending, rows_RD, y_TD, self, header)

    def sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle, header: Header) -> Tensor:
        """Combine with one native call; see ``Dispatcher._sum``."""
        if weights_TK is not None and not weights_TK.is_contiguous():
            weights_TK = weights_TK.contiguous()
        y_TD = warm_rows(handle.num_tokens, handle.hidden, handle.dtype, handle.device)
        self._sum(rows_RD, weights_TK, y_TD, handle, header)
        return y_TD

    def sum_with(
        self, rows_RD: Tensor | None, words_RX: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor | None, Tensor]:
        """See ``Dispatcher._sum_with``."""
        y_TD = None
        if rows_RD is not None:
            y_TD = warm_rows(handle.num_tokens, handle.hidden, handle.dtype, handle.device)
        words_RX, width = words_RX.contiguous(), words_RX.shape[1]
        words_TKX = torch.empty(handle.num_tokens, handle.top_k, width, dtype=torch.float32, device="cpu")
        words = address(words_RX, torch.float32, (handle.num_rows, width)), width, address(words_TKX, torch.float32)
        self._sum(rows_RD, None, y_TD, handle, header, words)
        return y_TD, words_TKX

    def _sum(
        self,
        rows_RD: Tensor | None,
        weights_TK: Tensor | None,
        y_TD: Tensor | None,
        handle: DispatchHandle,
        header: Header,
        words: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Write sums to ``y_TD``. words: address and width of the rows' words, and address of the slots'."""
        if rows_RD is not None and not rows_RD.is_contiguous():
            rows_RD = _dense(rows_RD)
        self._set_deadline()
        try:
            self._transfer.sum(
                header.compared(),
                header.label,
                handle.state,
                *row_address(rows_RD, handle.dtype, (handle.num_rows, handle.hidden)),
                address(weights_TK, torch.float32, (handle.num_tokens, handle.top_k)),
                address(y_TD, handle.dtype),
                words,
            )
        except BaseException as error:
            raise self._failed(error, header, rows_RD) from None

    def start_spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[NativeIncomingRows, Tensor | None]:
        """Start ``spread``. The gradient of the weights is complete on return."""
        grad_TD = _dense(grad_TD)
        rows = None if rows_RD is None else _dense(rows_RD)
        weights_TK = weights_TK.contiguous()
        grad_TK = (
            None if rows is None else torch.empty(handle.num_tokens, handle.top_k, dtype=torch.float32, device="cpu")
        )
        self._set_deadline()
        try:
            capsule, pending = self._transfer.start_spread(
                *_spread_args(header, handle, grad_TD, rows, weights_TK, grad_TK)
            )
        except self.errors as error:
            raise self.translated(error, header) from None
        has_elements = handle.num_rows and handle.hidden
        grad_RD = from_capsule(capsule) if has_elements else grad_TD.new_empty(handle.num_rows, handle.hidden)
        return NativeIncomingRows(self, pending, grad_RD, handle, capsule, rows), grad_TK

    def spread(
        self,
        grad_TD: Tensor,
        rows_RD: Tensor | None,
        weights_TK: Tensor,
        handle: DispatchHandle,
        header: Header,
        words_TKX: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run the backward of combine with one native call; see ``Dispatcher._spread`` and ``_spread_with``."""
        if not grad_TD.is_contiguous():
            grad_TD = _dense(grad_TD)
        if rows_RD is not None and not rows_RD.is_contiguous():
            rows_RD = _dense(rows_RD)
        if not weights_TK.is_contiguous():
            weights_TK = weights_TK.contiguous()
        words_TKX, words = _words_args(words_TKX, handle.num_tokens, handle.top_k)
        grad_TK = (
            None if rows_RD is None else torch.empty(handle.num_tokens, handle.top_k, dtype=torch.float32, device="cpu")
        )
        self._set_deadline()
        try:
            capsule, received = self._transfer.spread(
                *_spread_args(header, handle, grad_TD, rows_RD, weights_TK, grad_TK), words
            )
        except BaseException as error:
            raise self._failed(error, header, rows_RD) from None
        has_elements = handle.num_rows and handle.hidden
        grad_RD = from_capsule(capsule) if has_elements else grad_TD.new_empty(handle.num_rows, handle.hidden)
        return grad_RD, grad_TK, _received(received, handle.num_rows, words)

    def retain(self, buffers: object) -> None:
        """Keep memory that peers may still read after an error, so that it is not reused."""
        if self._comm is not None:
            self._comm.retained.append(buffers)

    def _failed(self, error: BaseException, header: Header, rows_RD: Tensor | None) -> BaseException:
        """Return the exception to raise for an operation in which peers read ``rows_RD``."""
        if not isinstance(error, native().HandshakeFailed):  # after a failed handshake no peer reads
            self.retain(rows_RD)
        return self.translated(error, header) if isinstance(error, self.errors) else error

    def translated(self, error: Exception, header: Header) -> Exception:
        """Return the exception that every rank raises for ``error`` of the native core. It is marked as known."""
        result: Exception = error
        if not isinstance(error, MoeCommError):
            headers: list[bytes] = error.headers  # type: ignore[attr-defined]
            result = failure(headers, self.rank, header)
            if len(headers) == 1 and isinstance(result, RoutingError):
                result = RoutingError(str(result).removeprefix("rank 0: "))
        mark_known(result)
        return result
