"""Dispatch and combine in the native core; ``local`` and ``shared_memory`` on CPU tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from moe_comm.comm.communicator import Communicator
from moe_comm.comm.header import Header, failure, fault_word
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import MoeCommError, RoutingError, mark_known
from moe_comm.runtime.memory import DTYPE_CODES, block, from_capsule, native, warm_rows

if TYPE_CHECKING:
    from moe_comm import _C


def supported(x: Tensor) -> bool:
    """Whether the native core can move this tensor's rows."""
    return x.device.type == "cpu" and x.dtype in DTYPE_CODES


def _dense(x: Tensor) -> Tensor:
    """``x`` with unit stride along its rows' elements; rows themselves may be any distance apart."""
    return x if x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= 0 else x.contiguous()


def _fault_of(header: Header) -> tuple[int, str]:
    """As the native core takes it."""
    return fault_word(header.fault), str(header.fault)


class _Underway:
    """A transfer between its halves. Leaving the ``with`` ends it: for all ranks, or, by an exception, as an error that
    the others hear of. One thread does it all."""

    _native: _C.Arriving | _C.Leaving
    _of: NativeRows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._native.finish()
        finally:
            self._native.abandon()  # does nothing once it is finished
            if not self._native.finished():
                self._of.leave_behind(self)


class ArrivingRows(_Underway):
    """Rows on their way to this rank's experts. ``rows_RD``: this rank's own stand, those of ``next`` peers, too."""

    def __init__(
        self, of: NativeRows, native: _C.Arriving, rows_RD: Tensor, handle: DispatchHandle, *kept: object
    ) -> None:
        self._of, self._native, self._arriving = of, native, native
        self.rows_RD, self.handle = rows_RD, handle
        self._kept = kept  # peers may be reading and writing it

    def ready(self, peer: int) -> bool:
        """Whether all rows of ``peer`` stand."""
        return self._arriving.ready(peer)

    def next(self, peers: Sequence[int]) -> int:
        """The first of ``peers`` of which they do, once there is one.

        Raises:
            PeerDied, PeerTimeout: none comes. PeerError: a rank failed.
        """
        return self._arriving.next(peers)


class LeavingRows(_Underway):
    """Results of this rank's experts that peers read where they stand, once they do."""

    def __init__(
        self,
        native: _C.Leaving,
        rows_RD: Tensor,
        y_TD: Tensor,
        rows: NativeRows,
        header: Header,
    ) -> None:
        self._native = self._leaving = native
        self._of, self._header, self._y_TD = rows, header, y_TD
        self._rows_RD = rows_RD  # peers read it

    def raise_flag(self, peer: int) -> None:
        """The rows that ``peer`` dispatched stand."""
        self._leaving.raise_flag(peer)

    def ready(self) -> bool:
        """Whether ``sum`` would not wait."""
        return self._leaving.ready()

    def sum(self, weights_TK: Tensor | None) -> Tensor:
        """[T, D] the sum of each token's rows, once all stand; this rank's own do.

        Raises:
            RankMismatch: on every rank. PeerDied, PeerTimeout: a rank is gone, or does not come. PeerError: it failed.
        """
        weights_TK = None if weights_TK is None else weights_TK.contiguous()
        try:
            self._leaving.sum(0 if weights_TK is None else weights_TK.data_ptr(), self._y_TD.data_ptr())
        except self._of.errors as error:
            raise self._of.explained(error, self._header) from None
        return self._y_TD


class NativeRows:
    """The three primitives of ``Dispatcher`` on a ``_C.Transfer``.

    comm: None where this process holds all experts. timeout_s: how long it waits for a peer in these calls.

    Attributes:
        errors: what the native core raises.
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
        """A block of this rank's heap, which peers read in place."""
        return block(self.heap, num_rows, width, dtype)

    def start_send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> ArrivingRows:
        """The first half of ``send``: this rank's rows stand where they belong, the peers' may be on their way."""
        tokens, hidden = (x_TD.shape[0], x_TD.shape[1]) if header.fault is None else (0, header.hidden)
        fault, text = (0, "") if header.fault is None else _fault_of(header)
        if not fault:
            x_TD = _dense(x_TD)
            ids_TK = ids_TK.to(torch.int64).contiguous()
        if self._comm is not None and self._comm.limit_s != self._timeout_s:
            self._comm.limit(self._timeout_s)
        try:
            capsule, native_layout, arriving = self._transfer.start_send(
                header.compared(),
                header.label,
                fault,
                text,
                x_TD.data_ptr(),
                x_TD.stride(0) * x_TD.element_size() if fault == 0 else 0,
                ids_TK.data_ptr(),
                tokens,
                header.top_k,
                hidden,
                DTYPE_CODES.get(header.dtype, 0),
            )
        except self.errors as error:
            raise self.explained(error, header) from None
        rows = native_layout.rows
        rows_RD = from_capsule(capsule) if rows and hidden else x_TD.new_empty(rows, hidden)
        handle = DispatchHandle(
            num_tokens=tokens,
            top_k=header.top_k,
            hidden=hidden,
            dtype=header.dtype,
            device=x_TD.device,
            rows_per_expert=native_layout.rows_per_expert,
            num_rows=rows,
            num_dropped=native_layout.dropped,
            label=header.label,
            state=native_layout,
            call=header.seq,
            maker=header.maker,
        )
        return ArrivingRows(self, arriving, rows_RD, handle, capsule)

    def send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, DispatchHandle]:
        """Dispatch; see ``Dispatcher._send``. One native call."""
        if header.fault is not None:
            with self.start_send(x_TD, ids_TK, header) as arriving:
                return arriving.rows_RD, arriving.handle
        if not x_TD.is_contiguous():
            x_TD = _dense(x_TD)
        if ids_TK.dtype is not torch.int64 or not ids_TK.is_contiguous():
            ids_TK = ids_TK.to(torch.int64).contiguous()
        (tokens, hidden), dtype = x_TD.shape, x_TD.dtype
        if self._comm is not None and self._comm.limit_s != self._timeout_s:
            self._comm.limit(self._timeout_s)
        try:
            capsule, state, sizes, rows, dropped = self._transfer.send(
                header.compared(),
                header.label,
                x_TD.data_ptr(),
                x_TD.stride(0) * dtype.itemsize,
                ids_TK.data_ptr(),
                tokens,
                header.top_k,
                hidden,
                DTYPE_CODES[dtype],
            )
        except self.errors as error:
            raise self.explained(error, header) from None
        rows_RD = from_capsule(capsule) if rows and hidden else x_TD.new_empty(rows, hidden)
        return rows_RD, DispatchHandle(
            tokens,
            header.top_k,
            hidden,
            dtype,
            x_TD.device,
            sizes,
            rows,
            dropped,
            header.label,
            state,
            header.seq,
            header.maker,
        )

    def start_sum(self, rows_RD: Tensor, handle: DispatchHandle, header: Header) -> LeavingRows:
        """The first half of ``sum``. rows_RD: a block of ``empty_rows`` that is filled while flags rise."""
        # Now: that there is no room would be no news to the others.
        y_TD = warm_rows(handle.num_tokens, handle.hidden, handle.dtype, handle.device)
        if self._comm is not None and self._comm.limit_s != self._timeout_s:
            self._comm.limit(self._timeout_s)
        try:
            leaving = self._transfer.start_sum(
                header.compared(),
                header.label,
                *((0, "") if header.fault is None else _fault_of(header)),
                handle.state,
                rows_RD.data_ptr(),
                rows_RD.stride(0) * rows_RD.element_size(),
                False,  # computed
            )
        except self.errors as error:
            raise self.explained(error, header) from None
        return LeavingRows(leaving, rows_RD, y_TD, self, header)

    def sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle, header: Header) -> Tensor:
        """Combine; see ``Dispatcher._sum``. One native call."""
        if not rows_RD.is_contiguous():
            rows_RD = _dense(rows_RD)
        if weights_TK is not None and not weights_TK.is_contiguous():
            weights_TK = weights_TK.contiguous()
        y_TD = warm_rows(handle.num_tokens, handle.hidden, handle.dtype, handle.device)
        if self._comm is not None and self._comm.limit_s != self._timeout_s:
            self._comm.limit(self._timeout_s)
        try:
            self._transfer.sum(
                header.compared(),
                header.label,
                handle.state,
                rows_RD.data_ptr(),
                rows_RD.stride(0) * rows_RD.element_size(),
                0 if weights_TK is None else weights_TK.data_ptr(),
                y_TD.data_ptr(),
            )
        except BaseException as error:
            raise self._failed(error, header, rows_RD) from None
        return y_TD

    def start_spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[ArrivingRows, Tensor | None]:
        """The first half of ``spread``; the gradient of the weights is there already."""
        grad_TD = _dense(grad_TD)
        rows = None if rows_RD is None else _dense(rows_RD)
        weights_TK = weights_TK.contiguous()
        grad_TK = None if rows is None else torch.empty(handle.num_tokens, handle.top_k)
        if self._comm is not None and self._comm.limit_s != self._timeout_s:
            self._comm.limit(self._timeout_s)
        try:
            capsule, arriving = self._transfer.start_spread(
                header.compared(),
                header.label,
                handle.state,
                grad_TD.data_ptr(),
                grad_TD.stride(0) * grad_TD.element_size(),
                0 if rows is None else rows.data_ptr(),
                0 if rows is None else rows.stride(0) * rows.element_size(),
                weights_TK.data_ptr(),
                rows is not None,
                0 if grad_TK is None else grad_TK.data_ptr(),
            )
        except self.errors as error:
            raise self.explained(error, header) from None
        some = handle.num_rows and handle.hidden
        grad_RD = from_capsule(capsule) if some else grad_TD.new_empty(handle.num_rows, handle.hidden)
        return ArrivingRows(self, arriving, grad_RD, handle, capsule, rows), grad_TK

    def spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        """Combine backward; see ``Dispatcher._spread``. One native call."""
        if not grad_TD.is_contiguous():
            grad_TD = _dense(grad_TD)
        if rows_RD is not None and not rows_RD.is_contiguous():
            rows_RD = _dense(rows_RD)
        if not weights_TK.is_contiguous():
            weights_TK = weights_TK.contiguous()
        grad_TK = None if rows_RD is None else torch.empty(handle.num_tokens, handle.top_k)
        if self._comm is not None and self._comm.limit_s != self._timeout_s:
            self._comm.limit(self._timeout_s)
        try:
            capsule = self._transfer.spread(
                header.compared(),
                header.label,
                handle.state,
                grad_TD.data_ptr(),
                grad_TD.stride(0) * grad_TD.element_size(),
                0 if rows_RD is None else rows_RD.data_ptr(),
                0 if rows_RD is None else rows_RD.stride(0) * rows_RD.element_size(),
                weights_TK.data_ptr(),
                rows_RD is not None,
                0 if grad_TK is None else grad_TK.data_ptr(),
            )
        except BaseException as error:
            raise self._failed(error, header, rows_RD) from None
        some = handle.num_rows and handle.hidden
        grad_RD = from_capsule(capsule) if some else grad_TD.new_empty(handle.num_rows, handle.hidden)
        return grad_RD, grad_TK

    def leave_behind(self, kept: object) -> None:
        """Keep what peers may still be reading after an error: no other rows may stand there."""
        if self._comm is not None:
            self._comm.left_behind.append(kept)

    def _failed(self, error: BaseException, header: Header, rows_RD: Tensor | None) -> BaseException:
        """What to raise for ``error`` of a whole operation, in which peers read ``rows_RD``."""
        if not isinstance(error, native().HandshakeFailed):  # after which nobody reads
            self.leave_behind(rows_RD)
        return self.explained(error, header) if isinstance(error, self.errors) else error

    def explained(self, error: Exception, header: Header) -> Exception:
        """``error`` of the native core as every rank raises it, marked as known to all."""
        known: Exception = error
        if not isinstance(error, MoeCommError):
            headers: list[bytes] = error.headers  # type: ignore[attr-defined]
            known = failure(headers, self.rank, header)
            if len(headers) == 1 and isinstance(known, RoutingError):
                known = RoutingError(str(known).removeprefix("rank 0: "))
        mark_known(known)
        return known
